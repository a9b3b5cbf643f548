#include "rail/rails.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <utility>

#include "core/group_options.hpp"
#include "plan/to_size.hpp"
#include "rail/net_devices.hpp"

namespace ferry::rail {
namespace {

enum Channel : int { kHello = 0, kCall, kError, kChunks, kCredits, kBeats, kNumChannels };

/// In values of kCall and kError: the sender has left.
constexpr std::uint64_t kLeft = std::uint64_t{1} << 63;

/// In values of kBeats, below the beats: progress. So many beats take longer than any group lives, and progress is only
/// compared with what it was a moment before.
constexpr int kProgressBits = 24;
constexpr std::uint64_t kProgressMask = (std::uint64_t{1} << kProgressBits) - 1;

/// Enough to report to peers why the group is broken, over any working network: a hundred round trips around the world
/// and some lost packets.
constexpr std::int64_t kLastWordsNs = 1'000'000'000;

RailMemory::Shape shape_of(const Topology& topology, const RingShape& ring) {
  return {to_size(topology.num_nodes()), sizeof(CallHeader), sizeof(ErrorRecord), ring};
}

Result<const net::EngineFactory*> choose_engine(const std::string& name) {
  std::string reasons;
  std::string names;
  for (const net::EngineFactory& factory : net::engine_factories()) {
    names += fmt::format(", {}", factory.name);
    // The loopback network does not leave the process: only on request.
    if (name != factory.name && (name != "auto" || factory.name == "loopback")) continue;
    const Status status = factory.probe();
    if (status.ok()) return &factory;
    reasons += fmt::format("; {}: {}", factory.name, status.message());
  }
  if (reasons.empty()) {
    return Status(
        ErrorCode::kInvalidArgument,
        fmt::format("Group::create: transport is \"{}\", expected \"auto\" or one of this build's{}", name, names));
  }
  return Status(ErrorCode::kUnsupported,
                fmt::format("Group::create: transport \"{}\" cannot run on this machine{}", name, reasons));
}

/// What a rank tells the others of its engine: the version, a zero, and how to reach it.
std::vector<std::byte> to_message(std::string_view version, const net::Blob& address) {
  const auto text = std::as_bytes(std::span(version));
  std::vector<std::byte> message(text.begin(), text.end());
  message.push_back(std::byte{0});
  message.insert(message.end(), address.begin(), address.end());
  return message;
}

std::string_view version_in(std::span<const std::byte> message) {
  const auto end = std::ranges::find(message, std::byte{0});
  return {reinterpret_cast<const char*>(message.data()), static_cast<std::size_t>(end - message.begin())};
}

net::Blob address_in(std::span<const std::byte> message) {
  const std::size_t begin = std::min(version_in(message).size() + 1, message.size());
  return {message.begin() + static_cast<std::ptrdiff_t>(begin), message.end()};
}

/// The same on every rank.
Status check_versions(const std::vector<std::vector<std::byte>>& messages) {
  std::vector<std::string_view> versions;
  for (const std::vector<std::byte>& message : messages) versions.push_back(version_in(message));
  return check_engine_versions(versions);
}

/// Adds the name of the call, which an engine does not know.
Status while_creating(const Status& status) {
  if (status.ok()) return status;
  return Status(status.code(), fmt::format("Group::create: {}", status.message()), status.peer());
}

}  // namespace

Status check_engine_versions(std::span<const std::string_view> versions) {
  const auto other = std::ranges::find_if(versions, [&](std::string_view one) { return one != versions.front(); });
  if (other == versions.end()) return {};
  const auto rank = other - versions.begin();
  return Status(ErrorCode::kUnsupported,
                fmt::format("Group::create: rank 0 has {} and rank {} has {}; install the same version on all hosts "
                            "(FERRY_UCX_LIBRARY names another one that a host has; `ferry doctor` shows which is used)",
                            versions.front(), rank, *other),
                static_cast<int>(rank));
}

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

Result<std::unique_ptr<Rails>> Rails::create(const BackendContext& context, const RailsOptions& options,
                                             const Status& my_status, std::function<void()> wake_rank) {
  // A rank that fails reports it in the gather below, so that all ranks fail together.
  Status status = my_status;
  std::unique_ptr<Rails> rails(new Rails(context, options));
  net::Blob address;
  net::EngineOptions engine_options{.self = rails->node_,
                                    .num_peers = rails->num_nodes(),
                                    .num_channels = kNumChannels,
                                    .memory = options.memory,
                                    .memory_bytes = rails->memory_.size_bytes(),
                                    .timeout_ns = context.options.timeout_ns,
                                    .ranks = rails->ranks_of_rail()};
  std::unique_ptr<net::Engine> engine;
  if (status.ok()) {
    const Result<const net::EngineFactory*> factory = choose_engine(context.options.transport);
    status = factory.status();
    if (status.ok()) {
      rails->engine_name_ = (*factory)->name;
      status = rails->choose_devices(context, options, **factory, &engine_options);
    }
    if (status.ok()) {
      Result<std::unique_ptr<net::Engine>> created = (*factory)->create(engine_options);
      status = while_creating(created.status());
      if (created.ok()) engine = std::move(*created);
    }
  }
  if (status.ok()) {
    rails->memory_ = RailMemory(engine->memory().data(), shape_of(rails->topology_, options.ring));
    Result<net::Blob> mine = engine->address();
    status = while_creating(mine.status());
    if (mine.ok()) address = std::move(*mine);
  }
  Result<std::vector<std::vector<std::byte>>> all =
      gather_or_fail(*context.bootstrap, status, to_message(engine != nullptr ? engine->version() : "", address),
                     context.options.timeout_ns);
  if (!all.ok()) return all.status();
  if (Status versions = check_versions(*all); !versions.ok()) return versions;

  std::vector<net::Blob> rail;
  for (int node = 0; node < rails->num_nodes(); ++node)
    rail.push_back(address_in((*all)[to_size(rails->rank_of(node))]));
  rails->proxy_ = std::make_unique<net::Proxy>(std::move(engine), engine_options, std::move(wake_rank), options.spins);
  rails->make_rings();
  rails->addresses_ = std::move(rail);
  return rails;
}

/// Also tells the engine which peers are on this host, where it needs none.
Status Rails::choose_devices(const BackendContext& context, const RailsOptions& options,
                             const net::EngineFactory& factory, net::EngineOptions* engine_options) {
  if (*factory.devices_variable == '\0') return {};
  bool leaves_this_host = false;
  for (const int rank : engine_options->ranks) {
    const bool is_here = options.places[to_size(rank)].on_this_host;
    engine_options->on_this_host.push_back(is_here);
    leaves_this_host = leaves_this_host || !is_here;
  }
  const NetDeviceRequest request{.wanted = context.options.net_devices,
                                 .engine_variable = factory.devices_variable,
                                 .bootstrap_address = context.bootstrap->local_address(),
                                 .places = options.places,
                                 .gpu_pci_address = options.gpu_pci_address,
                                 .rail = topology_.rail_of(topology_.rank)};
  // Also where no device is needed: a wrong name is an error everywhere.
  Result<NetDeviceChoice> chosen = choose_net_devices(request, ferry::net_devices());
  if (!leaves_this_host && chosen.status().code() != ErrorCode::kInvalidArgument) {
    net_devices_.reason = "to ranks of this host only";
    return {};
  }
  if (!chosen.ok()) return while_creating(chosen.status());
  net_devices_ = std::move(*chosen);
  engine_options->net_devices = net_devices_.devices;
  return {};
}

std::string Rails::describe_network() const {
  if (net_devices_.reason.empty()) return engine_name_;
  if (net_devices_.devices.empty()) return fmt::format("{} ({})", engine_name_, net_devices_.reason);
  return fmt::format("{} through {} ({})", engine_name_, net_devices_.devices, net_devices_.reason);
}

Status Rails::start() {
  if (Status status = proxy_->start(addresses_); !status.ok()) {
    return Status(status.code(),
                  fmt::format("Group::create: connecting over {}: {}", describe_network(), status.message()),
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
    proxy_->put(node, kCall, memory_.header_out(parity), memory_.header_in(parity, to_size(node_)), sizeof(header));
    proxy_->notify(node, kCall, header.call);
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
    proxy_->put(node, kError, memory_.error_out(), memory_.error_in(to_size(node_)), sizeof(record));
    proxy_->notify(node, kError, 1);
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
  // All channels: everything put before on any of them has then arrived, in particular the reason for leaving.
  const bool closed = std::atomic_ref(words_[to_size(node)].closed).load(std::memory_order_acquire) != 0;
  if (closed && (proxy_->received(node, kCall) & proxy_->received(node, kError) & kLeft) != 0) {
    return Status(ErrorCode::kPeerLost, "has destroyed its group", rank);
  }
  const Status status = proxy_->peer_status(node);
  if (status.ok()) return {};
  const std::string through = net_devices_.devices.empty() ? "" : fmt::format(" through {}", net_devices_.devices);
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
