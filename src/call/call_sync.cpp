#include "call/call_sync.hpp"

#include <fmt/format.h>
#include <sched.h>

#include <algorithm>
#include <cstring>
#include <utility>

#include "call/wait.hpp"
#include "core/group_options.hpp"
#include "plan/to_size.hpp"

namespace ferry::call {
namespace {

using node::CallDescriptor;
using node::Phase;

/// Does this process have that many cores? A rank that polls must not take the core of a rank that it waits for.
bool cores_suffice_for(int num_threads) {
  cpu_set_t usable;
  // More processors than the set has room for are enough for any node.
  return sched_getaffinity(0, sizeof usable, &usable) != 0 || CPU_COUNT(&usable) >= num_threads;
}

int threads_of_node(const Topology& topology) {
  const int threads_per_rank = topology.num_nodes() > 1 ? 2 : 1;  // the network's proxy
  return topology.ranks_per_node * threads_per_rank;
}

std::string_view waiting_for(Phase phase) {
  switch (phase) {
    case Phase::kDescribed:
      return "to make the same call";
    case Phase::kCollected:
      return "to collect the other nodes' calls";
    case Phase::kStaged:
      return "to stage its rows";
    case Phase::kDone:
      return "to finish its part";
  }
  return "";
}

}  // namespace

CallSync::CallSync(const BackendContext& context, node::Rendezvous rendezvous)
    : topology_(context.topology),
      timeout_ns_(context.options.timeout_ns),
      spins_(cores_suffice_for(threads_of_node(context.topology))),
      peers_(topology_.rank, topology_.node_of(topology_.rank) * topology_.ranks_per_node, std::move(rendezvous)) {}

CallSync::~CallSync() {
  leave();
  // Peers that answer do so soon, and there is nothing to finish with the others.
  if (rails_ != nullptr && !broken_.ok()) rails_->expect_no_answers();
  // The headers stay: ranks of this node may still read those of the last call. They go with the arena.
  rails_.reset();
}

Result<std::unique_ptr<CallSync>> CallSync::create(const BackendContext& context) {
  Result<node::Rendezvous> met = node::rendezvous(context);
  if (!met.ok()) return met.status();
  std::unique_ptr<CallSync> sync(new CallSync(context, std::move(*met)));
  if (context.topology.num_nodes() > 1) {
    if (Status status = sync->connect_rails(context); !status.ok()) return status;
  }
  return sync;
}

Status CallSync::connect_rails(const BackendContext& context) {
  const rail::RailsOptions options{rail::default_ring_shape(to_size(topology_.num_nodes())), spins_};
  Result<std::byte*> headers = peers_.arena().take(2 * to_size(topology_.num_nodes()) * rail::kCallHeaderStride);
  Status status;
  if (headers.ok()) {
    headers_ = *headers;
  } else {
    status = Status(headers.status().code(),
                    fmt::format("Group::create: no room for call headers: {}", headers.status().message()));
  }
  Result<std::unique_ptr<rail::Rails>> rails =
      rail::Rails::create(context, options, status, [this] { peers_.ring_self(); });
  if (!rails.ok()) return rails.status();
  rails_ = std::move(*rails);
  status = rails_->start();
  if (status.ok()) status = await_greetings();
  if (status.ok()) rails_->allow_inline_progress(!cores_suffice_for(topology_.num_ranks));
  Result<std::vector<std::vector<std::byte>>> ready =
      gather_or_fail(*context.bootstrap, status, {}, context.options.timeout_ns);
  // If it failed, all ranks leave, and none has anything that another waits for.
  if (!ready.ok()) rails_->expect_no_answers();
  return ready.status();
}

Status CallSync::await_greetings() {
  const std::string what = fmt::format("to connect over {}", rails_->engine_name());
  Wait wait(*this, what);
  while (true) {
    wait.begin_poll();
    const auto list_missing = [this](std::vector<int>* missing) {
      for (const int node : rails_->peer_nodes()) {
        if (!rails_->greeted(node)) missing->push_back(rails_->rank_of(node));
      }
    };
    std::vector<int> missing;
    list_missing(&missing);
    if (missing.empty()) return {};
    if (Status status = wait.idle(list_missing); !status.ok()) return status;
  }
}

Status CallSync::begin(CallDescriptor descriptor) {
  if (!broken_.ok()) return broken_;
  operation_ = to_string(descriptor.record.operation);
  if (rails_ != nullptr) return begin_over_nodes(descriptor);
  peers_.open(descriptor);
  if (Status status = wait(Phase::kDescribed); !status.ok()) return status;
  std::vector<const CallRecord*> records;
  for (int rank = 0; rank < peers_.num_ranks(); ++rank) records.push_back(&peers_.descriptor_of(rank).record);
  return check_agreement(records);
}

Status CallSync::begin_over_nodes(CallDescriptor descriptor) {
  const std::uint64_t call = peers_.call() + 1;
  const rail::CallHeader header{call, descriptor.record, descriptor.max_recv_rows, descriptor.num_entries};
  descriptor.collected = peers_.locate(headers_ + call % 2 * headers_block_bytes(), topology_.num_nodes(),
                                       sizeof(rail::CallHeader), static_cast<std::int64_t>(rails_->header_stride()));
  {
    const rail::Rails::InlineProgress progress(*rails_);
    // The network first: it is the longer way.
    rails_->announce(header);
    peers_.open(descriptor);
    if (Status status = await_headers(); !status.ok()) return status;
  }
  publish_headers();
  post(Phase::kCollected);
  if (Status status = wait(Phase::kCollected); !status.ok()) return status;
  return collect_headers();
}

Status CallSync::await_headers() {
  Wait wait(*this, waiting_for(Phase::kDescribed));
  const auto missing_node = [this](int node) { return !rails_->has_header(node, peers_.call()); };
  while (true) {
    wait.begin_poll();
    if (std::ranges::none_of(rails_->peer_nodes(), missing_node)) return {};
    const auto list_missing = [&](std::vector<int>* missing) {
      for (const int node : rails_->peer_nodes()) {
        if (missing_node(node)) missing->push_back(rails_->rank_of(node));
      }
    };
    if (Status status = wait.idle(list_missing); !status.ok()) return status;
  }
}

/// Copies the rail peers' headers to where this node's ranks can read them and no rail peer can change them.
void CallSync::publish_headers() {
  std::memcpy(headers_block(), rails_->headers(peers_.call()), headers_block_bytes());
}

Status CallSync::collect_headers() {
  const auto num_ranks = to_size(topology_.num_ranks);
  std::vector<const CallRecord*> records(num_ranks);
  peer_calls_.assign(num_ranks, {});
  received_.resize(num_ranks);
  for (int local = peers_.first_rank(); local < peers_.end_rank(); ++local) {
    const CallDescriptor& descriptor = peers_.descriptor_of(local);
    const node::Location& location = descriptor.collected;
    const std::byte* const headers = peers_.resolve(location, local, {topology_.num_nodes(), sizeof(rail::CallHeader)});
    if (headers == nullptr) return bad_location(descriptor.record.operation, local);
    for (int node = 0; node < topology_.num_nodes(); ++node) {
      const auto rank = to_size(node * topology_.ranks_per_node + topology_.rail_of(local));
      if (node == rails_->node()) {
        // From the descriptor, which no rail peer can write.
        records[rank] = &descriptor.record;
        peer_calls_[rank] = {descriptor.max_recv_rows, descriptor.num_entries};
        continue;
      }
      rail::CallHeader& header = received_[rank];
      const std::span<const std::byte, sizeof(rail::CallHeader)> bytes(headers + node * location.stride_bytes,
                                                                       sizeof(rail::CallHeader));
      if (Status status = rail::parse_call_header(bytes, peers_.call(), &header); !status.ok()) {
        return fail(
            status.code(), static_cast<int>(rank),
            fmt::format("{}: rank {} {}; do all ranks run the same build?", operation_, rank, status.message()));
      }
      records[rank] = &header.record;
      peer_calls_[rank] = {header.max_recv_rows, header.num_entries};
    }
  }
  return check_agreement(records);
}

Status CallSync::wait(Phase phase, const std::vector<bool>* awaited) {
  if (!broken_.ok()) return broken_;
  const auto is_missing = [&](int rank) {
    if (awaited != nullptr && !(*awaited)[to_size(rank - peers_.first_rank())]) return false;
    return rank != peers_.rank() && !peers_.reached(rank, phase);
  };
  Wait wait(*this, waiting_for(phase));
  // Flags do not go back: ranks that were seen need not be polled again.
  int next = peers_.first_rank();
  while (true) {
    wait.begin_poll();
    while (next < peers_.end_rank() && !is_missing(next)) ++next;
    if (next == peers_.end_rank()) return {};
    const auto list_missing = [&](std::vector<int>* missing) {
      for (int rank = next; rank < peers_.end_rank(); ++rank) {
        if (is_missing(rank)) missing->push_back(rank);
      }
    };
    if (Status status = wait.idle(list_missing); !status.ok()) return status;
  }
}

Status CallSync::fail(ErrorCode code, int culprit, std::string_view message, std::string_view note) {
  if (!broken_.ok()) return broken_;
  broken_ = Status(code, std::string(message).append(note), culprit);
  ErrorRecord record;
  record.code = code;
  record.culprit = culprit;
  const std::size_t length = std::min(message.size(), record.message.size());
  std::copy_n(message.data(), length, record.message.data());
  record.message_bytes = static_cast<std::int32_t>(length);
  peers_.report_error(record);
  if (rails_ != nullptr) rails_->report_error(record);
  return broken_;
}

Status CallSync::out_of_memory(Operation operation) {
  return fail(ErrorCode::kSystem, rank(),
              fmt::format("{}: rank {} ran out of memory; use smaller batches or a machine with more",
                          to_string(operation), rank()));
}

Status CallSync::bad_location(Operation operation, int rank) {
  return fail(ErrorCode::kInternal, rank,
              fmt::format("{}: rank {} published a location outside its arena; please report this bug",
                          to_string(operation), rank));
}

void CallSync::leave() {
  peers_.leave();
  if (rails_ != nullptr) rails_->leave();
}

}  // namespace ferry::call
