#include "rail/rails.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <utility>

#include "net/numa.hpp"
#include "plan/to_size.hpp"

namespace ferry::rail {
namespace {

enum Channel : int {
  kHello = 0,
  kCall,
  kError,
  kChunks,
  kCredits,
  kBeats,
  kKernelChunks,
  kKernelCredits,
  kNumChannels
};

/// Flag in values of kCall and kError: the sender has left.
constexpr std::uint64_t kLeft = std::uint64_t{1} << 63;

/// Bits of progress in values of kBeats, below the beats. A group never lives long enough for the beats to overflow,
/// and progress is only compared with its value a moment before.
constexpr int kProgressBits = 24;
constexpr std::uint64_t kProgressMask = (std::uint64_t{1} << kProgressBits) - 1;

/// Time to report to peers, over any working network, why the group is broken: a hundred round trips around the world
/// and some lost packets.
constexpr std::int64_t kLastWordsNs = 1'000'000'000;

RailMemory::Shape shape_of(const Topology& topology, const RingShape& ring) {
  return {to_size(topology.num_nodes()), sizeof(CallHeader), sizeof(ErrorRecord), ring};
}

RailMemory::Shape rings_only(const Topology& topology, const RingShape& ring) {
  return {to_size(topology.num_nodes()), 0, 0, ring};
}

}  // namespace

Rails::Rails(const BackendContext& context, const RailsOptions& options)
    : topology_(context.topology),
      node_(topology_.node_of(topology_.rank)),
      memory_(nullptr, shape_of(topology_, options.ring)) {
  if (options.words == nullptr) own_words_ = std::make_unique<net::RingWords[]>(to_size(num_nodes()));
  words_ = options.words != nullptr ? options.words : own_words_.get();
  for (int step = 1; step < num_nodes(); ++step) peer_nodes_.push_back((node_ + step) % num_nodes());
}

Rails::~Rails() { leave(); }

std::size_t Rails::memory_bytes(const Topology& topology, const RingShape& ring) {
  return RailMemory(nullptr, shape_of(topology, ring)).size_bytes();
}

std::size_t Rails::rings_bytes(const Topology& topology, const RingShape& ring) {
  return RailMemory(nullptr, rings_only(topology, ring)).size_bytes() +
         net::gpu_probe_bytes(to_size(topology.num_nodes()));
}

Result<std::unique_ptr<Rails>> Rails::create(const BackendContext& context, const RailsOptions& options,
                                             const Status& my_status, std::function<void()> wake_rank) {
  std::unique_ptr<Rails> rails(new Rails(context, options));
  NetworkParams params;
  params.engine.self = rails->node_;
  params.engine.num_peers = rails->num_nodes();
  params.engine.num_channels = kNumChannels;
  params.engine.memory = options.memory;
  params.engine.memory_bytes = rails->memory_.size_bytes();
  params.engine.gpu_memory = options.gpu.memory;
  params.engine.read_back_gpu_writes = options.gpu.read_back_writes;
  params.engine.timeout_ns = context.options.timeout_ns;
  params.engine.ranks = rails->ranks_of_rail();
  params.places = options.places;
  params.gpu_pci_address = options.gpu_pci_address;
  params.failed_attempt = options.failed_attempt;
  const Result<bool> follows_numa = net::follows_numa();
  Result<Network> network = open_network(context, params, my_status.ok() ? follows_numa.status() : my_status);
  if (!network.ok()) return network.status();
  rails->memory_ = RailMemory(network->engine->memory().data(), shape_of(rails->topology_, options.ring));
  rails->proxy_ =
      std::make_unique<net::Proxy>(std::move(network->engine), network->options, std::move(wake_rank), options.spins);
  if (*follows_numa) {
    rails->proxy_->run_on(net::cpus_of_node(net::numa_node_of(options.gpu_pci_address), net::allowed_cpus()));
  }
  rails->make_rings();
  if (!options.gpu.memory.empty()) rails->attach_gpu_rings(options.gpu);
  rails->network_ = std::move(*network);
  return rails;
}

Status Rails::start() {
  if (Status status = proxy_->start(network_.addresses); !status.ok()) {
    return Status(status.code(),
                  fmt::format("Group::create: connecting over {}: {}", network_.describe(), status.message()),
                  status.peer());
  }
  for (const int node : peer_nodes_) proxy_->notify(node, kHello, 1);
  return {};
}

void Rails::make_rings() {
  rings_.resize(to_size(num_nodes()));
  const RingShape& shape = memory_.ring_shape();
  for (const int node : peer_nodes_) {
    const std::size_t in = memory_.ring_in(to_size(node), to_size(node_));
    const std::size_t out = memory_.ring_out(to_size(node_), to_size(node));
    net::RingWords& words = words_[to_size(node)];
    proxy_->attach_ring(node, {.words = &words,
                               .num_chunks = shape.num_chunks,
                               .chunk_stride = shape.chunk_bytes,
                               .send_offset = out,
                               .remote_offset = memory_.ring_in(to_size(node_), to_size(node)),
                               .chunk_channel = kChunks,
                               .credit_channel = kCredits});
    rings_[to_size(node)] = std::make_unique<Ring>(Ring::Parts{.proxy = proxy_.get(),
                                                               .words = &words,
                                                               .peer = node,
                                                               .peer_rank = rank_of(node),
                                                               .chunks_in = memory_.at(in),
                                                               .chunks_out = memory_.at(out),
                                                               .shape = shape});
  }
}

void Rails::attach_gpu_rings(const RailsOptions::GpuRings& gpu) {
  gpu_memory_.emplace(gpu.memory.data(), rings_only(topology_, gpu.shape));
  kernel_words_ = gpu.words;
  for (const int node : peer_nodes_) {
    proxy_->attach_kernel_ring(node,
                               {.words = gpu.words + node,
                                .num_chunks = gpu.shape.num_chunks,
                                .chunk_stride = gpu.shape.chunk_bytes,
                                .send_offset = net::kGpuOffset + gpu_memory_->ring_out(to_size(node_), to_size(node)),
                                .remote_offset = net::kGpuOffset + gpu_memory_->ring_in(to_size(node_), to_size(node)),
                                .chunk_channel = kKernelChunks,
                                .credit_channel = kKernelCredits});
  }
}

std::vector<int> Rails::ranks_of_rail() const {
  std::vector<int> ranks;
  for (int node = 0; node < num_nodes(); ++node) ranks.push_back(rank_of(node));
  return ranks;
}

bool Rails::greeted(int node) const { return node == node_ || proxy_->received(node, kHello) != 0; }

void Rails::allow_inline_progress(bool allowed) {
  inline_progress_ =
      allowed && std::ranges::all_of(proxy_->paths(), [](const net::Path& path) { return path.in_memory; });
}

void Rails::announce(const CallHeader& header) {
  const std::size_t parity = header.call % 2;
  num_announced_ = header.call;
  std::memcpy(memory_.at(memory_.header_out(parity)), &header, sizeof(header));
  for (const int node : peer_nodes_) {
    proxy_->put_notify(node, kCall, memory_.header_out(parity), memory_.header_in(parity, to_size(node_)),
                       sizeof(header), header.call);
  }
}

bool Rails::has_header(int node, std::uint64_t call) const {
  return node == node_ || (proxy_->received(node, kCall) & ~kLeft) >= call;
}

const std::byte* Rails::headers(std::uint64_t call) const { return memory_.at(memory_.header_in(call % 2, 0)); }

void Rails::beat(std::uint64_t progress) {
  const std::uint64_t value = ++num_beats_ << kProgressBits | (progress & kProgressMask);
  for (const int node : peer_nodes_) proxy_->notify(node, kBeats, value);
}

Rails::WaitSign Rails::wait_sign(int node) const {
  const std::uint64_t value = proxy_->received(node, kBeats);
  return {value >> kProgressBits, value & kProgressMask};
}

void Rails::report_error(const ErrorRecord& record) {
  has_reported_ = true;
  std::memcpy(memory_.at(memory_.error_out()), &record, sizeof(record));
  for (const int node : peer_nodes_) {
    proxy_->put_notify(node, kError, memory_.error_out(), memory_.error_in(to_size(node_)), sizeof(record), 1);
  }
}

std::optional<ReportedError> Rails::reported_error() const {
  for (const int node : peer_nodes_) {
    if ((proxy_->received(node, kError) & ~kLeft) == 0) continue;
    const std::span<const std::byte, sizeof(ErrorRecord)> bytes(memory_.at(memory_.error_in(to_size(node))),
                                                                sizeof(ErrorRecord));
    return ReportedError{rank_of(node), usable_error_record(bytes, topology_.num_ranks)};
  }
  return std::nullopt;
}

Status Rails::presence(int rank) const {
  const int node = topology_.node_of(rank);
  // Check all channels: then everything put before on any of them has arrived, in particular the reason for leaving.
  const auto is_closed = [node](net::RingWords* words) {
    return words == nullptr || std::atomic_ref(words[node].closed).load(std::memory_order_acquire) != 0;
  };
  const bool closed = is_closed(words_) && is_closed(kernel_words_);
  if (closed && (proxy_->received(node, kCall) & proxy_->received(node, kError) & kLeft) != 0) {
    return Status(ErrorCode::kPeerLost, "has destroyed its group", rank);
  }
  const Status status = proxy_->peer_status(node);
  if (status.ok()) return {};
  const std::string through =
      network_.devices.devices.empty() ? "" : fmt::format(" through {}", network_.devices.devices);
  return Status(status.code(), fmt::format("lost its network connection{} ({})", through, status.message()), rank);
}

void Rails::leave() {
  if (proxy_ == nullptr) return;
  for (const int node : peer_nodes_) {
    proxy_->notify(node, kCall, num_announced_ | kLeft);
    proxy_->notify(node, kError, (has_reported_ ? 1 : 0) | kLeft);
    proxy_->close_ring(node);
  }
}

void Rails::expect_no_answers() {
  if (proxy_ != nullptr) proxy_->limit_close_time(kLastWordsNs);
}

}  // namespace ferry::rail
