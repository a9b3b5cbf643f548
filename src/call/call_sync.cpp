#include "call/call_sync.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cstring>
#include <utility>

#include "call/wait.hpp"
#include "core/cores.hpp"
#include "core/create_together.hpp"
#include "core/log.hpp"
#include "net/threads.hpp"
#include "plan/to_size.hpp"
#include "rail/net_devices.hpp"
#include "rail/network.hpp"

namespace ferry::call {
namespace {

using node::CallDescriptor;
using node::Phase;

std::string_view waiting_for(Phase phase) {
  switch (phase) {
    case Phase::kDescribed:
      return "to make the same call";
    case Phase::kCollected:
      return "to collect the other nodes' calls";
    case Phase::kStaged:
      return "to stage its rows";
    case Phase::kWritten:
      return "to write its rows";
    case Phase::kDone:
      return "to finish its part";
  }
  return "";
}

rail::RingShape ring_shape(const Topology& topology) { return rail::default_ring_shape(to_size(topology.num_nodes())); }

}  // namespace

std::size_t CallSync::network_bytes(const Topology& topology) {
  if (topology.num_nodes() == 1) return 0;
  return node::round_up_to_page(headers_bytes(topology)) + rail::Rails::memory_bytes(topology, ring_shape(topology));
}

Result<std::unique_ptr<CallSync>> CallSync::create(const BackendContext& context, const KernelRingsSource* source) {
  const bool has_rails = context.topology.num_nodes() > 1;
  net::ReservedThreads threads;
  const Status reserved = rail::reserve_threads(context.topology, &threads);
  const RankPlace place =
      has_rails ? rail::place_to_publish(context, source != nullptr ? &source->gpu : nullptr) : RankPlace{};
  const LogRank rank{context.topology.rank, context.topology.num_ranks};
  Result<node::Rendezvous> met = [&] {
    const LogPhase phase(rank, "create: meeting of the node's ranks");
    return node::rendezvous(context, place, reserved);
  }();
  if (!met.ok()) return met.status();
  threads.give_back();
  std::vector<RankPlace> places = std::move(met->places);
  std::unique_ptr<CallSync> sync(new CallSync(context, std::move(*met)));
  sync->places_ = std::move(places);
  if (has_rails) {
    const LogPhase phase(rank, "create: connections between nodes");
    if (Status status = sync->connect_rails(context, source); !status.ok()) return status;
    const rail::RingShape shape = sync->rails().chunks().shape;
    log_line(LogLevel::kInfo, rank, "create: rings memory={} num_chunks={} chunk_bytes={} proxy_spins={}",
             sync->rails().has_gpu_rings() ? "gpu" : "host", shape.num_chunks, shape.chunk_bytes, sync->state_.spins());
  }
  return sync;
}

Status CallSync::connect_rails(const BackendContext& context, const KernelRingsSource* source) {
  Status status;
  Result<std::byte*> headers = peers().arena().take(headers_bytes());
  if (headers.ok()) {
    headers_ = *headers;
  } else {
    status = Status(headers.status().code(),
                    fmt::format("Group::create: no room for call headers: {}", headers.status().message()));
  }
  if (source == nullptr) {
    why_host_memory_ = "ranks have no GPU";
  } else if (context.options.ring_memory == "host") {
    why_host_memory_ = "GroupOptions::ring_memory or FERRY_RING_MEMORY is host";
  } else if (context.options.ring_memory == "auto") {
    why_host_memory_ = rail::why_host_memory(places_);
    if (why_host_memory_.empty()) {
      Result<GpuRingsAttempt> attempt = attempt_gpu_rings(context, *source, places_, state_, status);
      if (!attempt.ok()) return attempt.status();
      if (attempt->rails != nullptr) {
        state_.set_rails(std::move(attempt->rails));
        return {};
      }
      why_host_memory_ = std::move(attempt->why_not);
    }
  }
  return connect_host_rails(context, source, status);
}

/// Rails whose rings are where the option says; with "auto", in host memory.
Status CallSync::connect_host_rails(const BackendContext& context, const KernelRingsSource* source,
                                    const Status& my_status) {
  rail::RailsOptions options{.ring = ring_shape(topology()), .spins = state_.spins(), .places = places_};
  Status status;
  if (source != nullptr) status = add_rings(source->make(context.options.ring_memory == "gpu"), *source, options);
  if (status.ok()) status = my_status;
  Result<std::unique_ptr<rail::Rails>> created =
      rail::Rails::create(context, options, status, [this] { peers().ring_self(); });
  if (!created.ok()) return created.status();
  state_.set_rails(std::move(*created));
  // No rank waits for the greeting of a rank that failed to start. The network connects during the exchange.
  if (status = gather_or_fail(*context.bootstrap, rails().start(), {}, state_.timeout_ns()).status(); !status.ok()) {
    return status;
  }
  if (status = await_greetings(); !status.ok()) return status;
  // Kernels have no thread that could drive the network, and threads other than the rank's report their errors.
  rails().allow_inline_progress(source == nullptr && !cores_suffice_for(topology().num_ranks));
  return {};
}

Status CallSync::await_greetings() {
  const std::string what = fmt::format("to connect over {}", rails().describe_network());
  Wait wait(state_, what);
  while (true) {
    wait.begin_poll();
    const auto list_missing = [this](std::vector<int>* missing) {
      for (const int node : rails().peer_nodes()) {
        if (!rails().greeted(node)) missing->push_back(rails().rank_of(node));
      }
    };
    std::vector<int> missing;
    list_missing(&missing);
    if (missing.empty()) return {};
    if (Status status = wait.idle(list_missing); !status.ok()) return status;
  }
}

Status CallSync::begin(CallDescriptor descriptor) {
  if (!broken().ok()) return broken();
  state_.set_operation(to_string(descriptor.record.operation));
  if (has_rails()) return begin_over_nodes(descriptor);
  peers().open(descriptor);
  if (Status status = wait(Phase::kDescribed); !status.ok()) return status;
  std::vector<const CallRecord*> records;
  for (int rank = 0; rank < peers().num_ranks(); ++rank) {
    records.push_back(peers().peer(rank).is_absent ? nullptr : &peers().descriptor_of(rank).record);
  }
  return agree(records);
}

Status CallSync::agree(std::span<const CallRecord* const> records) {
  Status agreement = check_agreement(records);
  if (agreement.ok()) {
    peers().recorder().reach(CallPhase::kMoving);
    return agreement;
  }
  // The other ranks may have given up the call already because a rank was late: then the group is broken and cannot go
  // on.
  Status reported = state_.adopt_reported_error();
  return reported.ok() ? agreement : reported;
}

Status CallSync::begin_over_nodes(CallDescriptor descriptor) {
  const std::uint64_t call = peers().call() + 1;
  const rail::CallHeader header{call, descriptor.record, descriptor.max_recv_rows, descriptor.num_entries};
  descriptor.collected = peers().locate(headers_block(call), topology().num_nodes(), sizeof(rail::CallHeader),
                                        static_cast<std::int64_t>(rails().header_stride()));
  {
    const rail::Rails::InlineProgress progress(rails());
    // The network first: its exchange takes longer.
    rails().announce(header);
    peers().open(descriptor);
    if (Status status = await_headers(); !status.ok()) return status;
  }
  publish_headers();
  post(Phase::kCollected);
  if (Status status = wait(Phase::kCollected); !status.ok()) return status;
  return collect_headers();
}

Status CallSync::await_headers() {
  Wait wait(state_, waiting_for(Phase::kDescribed));
  const auto missing_node = [this](int node) { return !rails().has_header(node, peers().call()); };
  while (true) {
    wait.begin_poll();
    if (std::ranges::none_of(rails().peer_nodes(), missing_node)) return {};
    const auto list_missing = [&](std::vector<int>* missing) {
      for (const int node : rails().peer_nodes()) {
        if (missing_node(node)) missing->push_back(rails().rank_of(node));
      }
    };
    if (Status status = wait.idle(list_missing); !status.ok()) return status;
  }
}

/// Copies the rail peers' headers to memory that this node's ranks can read and that no rail peer can change.
void CallSync::publish_headers() {
  std::memcpy(headers_block(peers().call()), rails().headers(peers().call()), headers_block_bytes(topology()));
}

Status CallSync::collect_headers() {
  const auto num_ranks = to_size(topology().num_ranks);
  std::vector<const CallRecord*> records(num_ranks);
  peer_calls_.assign(num_ranks, {});
  received_.resize(num_ranks);
  for (int local = peers().first_rank(); local < peers().end_rank(); ++local) {
    const CallDescriptor& descriptor = peers().descriptor_of(local);
    const node::Location& location = descriptor.collected;
    const std::byte* const headers =
        peers().resolve(location, local, {topology().num_nodes(), sizeof(rail::CallHeader)});
    if (headers == nullptr) return bad_location(descriptor.record.operation, local);
    for (int node = 0; node < topology().num_nodes(); ++node) {
      const auto rank = to_size(node * topology().ranks_per_node + topology().rail_of(local));
      if (node == rails().node()) {
        // From the descriptor, which rail peers cannot write.
        records[rank] = &descriptor.record;
        peer_calls_[rank] = {descriptor.max_recv_rows, descriptor.num_entries};
        continue;
      }
      rail::CallHeader& header = received_[rank];
      const std::span<const std::byte, sizeof(rail::CallHeader)> bytes(headers + node * location.stride_bytes,
                                                                       sizeof(rail::CallHeader));
      if (Status status = rail::parse_call_header(bytes, peers().call(), &header); !status.ok()) {
        return fail(status.code(), static_cast<int>(rank),
                    fmt::format("{}: rank {} {}; run the same build on every rank", state_.operation(), rank,
                                status.message()));
      }
      records[rank] = &header.record;
      peer_calls_[rank] = {header.max_recv_rows, header.num_entries};
    }
  }
  return agree(records);
}

Status CallSync::wait(Phase phase, const std::vector<bool>* awaited) {
  if (!broken().ok()) return broken();
  const auto is_missing = [&](int rank) {
    if (awaited != nullptr && !(*awaited)[to_size(rank - peers().first_rank())]) return false;
    return rank != peers().rank() && !peers().peer(rank).is_absent && !peers().reached(rank, phase);
  };
  Wait wait(state_, waiting_for(phase));
  // Flags only grow: a rank seen to have arrived need not be polled again.
  int next = peers().first_rank();
  while (true) {
    wait.begin_poll();
    while (next < peers().end_rank() && !is_missing(next)) ++next;
    if (next == peers().end_rank()) return {};
    const auto list_missing = [&](std::vector<int>* missing) {
      for (int rank = next; rank < peers().end_rank(); ++rank) {
        if (is_missing(rank)) missing->push_back(rank);
      }
    };
    if (Status status = wait.idle(list_missing); !status.ok()) return status;
  }
}

NetworkUsage CallSync::network_usage() {
  NetworkUsage usage;
  if (!has_rails()) return usage;
  usage.transport = rails().engine_name();
  usage.net_devices = rails().net_devices();
  usage.ring_memory = rails().has_gpu_rings() ? "gpu" : "host";
  usage.why_host_memory = why_host_memory_;
  usage.service_level = rails().card_settings().service_level;
  usage.num_paths = rails().card_settings().num_paths;
  // paths() first: it waits until everything given to the network before is counted.
  const std::vector<net::Path> paths = rails().paths();
  for (int node = 0; node < rails().num_nodes(); ++node) {
    if (node == rails().node()) continue;
    const net::PeerTraffic traffic = rails().traffic(node);
    usage.rails.push_back({rails().rank_of(node), traffic.put_bytes, traffic.num_puts + traffic.num_notifies, {}});
  }
  for (const net::Path& path : paths) {
    for (RailUsage& rail : usage.rails) {
      if (rail.rank == rails().rank_of(path.peer)) rail.route = path.description;
    }
  }
  return usage;
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

}  // namespace ferry::call
