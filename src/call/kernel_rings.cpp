#include "call/kernel_rings.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <string_view>
#include <utility>

#include "core/create_together.hpp"
#include "node/futex.hpp"
#include "plan/to_size.hpp"

namespace ferry::call {
namespace {

/// Longest wait for the greetings of peers whose cards reach this rank's GPU: many times what hundreds of connections
/// take, and short for a person who starts a job.
constexpr std::int64_t kMostAttemptNs = 10'000'000'000;
constexpr std::int64_t kAttemptShare = 4;
/// Interval of looks at peers that may be lost.
constexpr std::int64_t kLookNs = 20'000'000;

/// Ranks of one host have no card between them.
Status check_hosts(const Topology& topology, const std::vector<RankPlace>& places) {
  for (int node = 0; node < topology.num_nodes(); ++node) {
    const int peer = node * topology.ranks_per_node + topology.rail_of(topology.rank);
    if (peer == topology.rank || !places[to_size(peer)].on_this_host) continue;
    return Status(ErrorCode::kUnsupported, fmt::format("it shares a host with rank {}", peer), peer);
  }
  return {};
}

/// Waits until all peers have greeted, which they do once their cards have reached this rank's GPU.
Status await_attempt(GroupState& state, rail::Rails& rails) {
  const std::int64_t limit_ns = longest_attempt_ns(state.timeout_ns());
  const std::int64_t begin_ns = node::monotonic_ns();
  state.expect_wait(begin_ns);
  while (true) {
    const std::uint32_t doorbell = state.peers().doorbell();
    const auto missing = std::ranges::find_if(rails.peer_nodes(), [&](int node) { return !rails.greeted(node); });
    if (missing == rails.peer_nodes().end()) return {};
    for (const int node : rails.peer_nodes()) {
      if (Status status = rails.connection(node); !status.ok()) return status;
    }
    const std::int64_t now_ns = node::monotonic_ns();
    if (Status status = state.check_interrupt(now_ns, "Group::create"); !status.ok()) return status;
    const std::int64_t left_ns = begin_ns + limit_ns - now_ns;
    if (left_ns <= 0) {
      const int rank = rails.rank_of(*missing);
      constexpr double kNsPerSecond = 1e9;
      return Status(ErrorCode::kTimeout,
                    fmt::format("the card of rank {} did not reach its GPU in {:.1f} s", rank,
                                static_cast<double>(limit_ns) / kNsPerSecond),
                    rank);
    }
    state.peers().sleep(doorbell, 1, std::min(left_ns, kLookNs));
  }
}

/// The part of an error that says what failed at which rank, without what to do about it.
std::string first_clause(std::string_view text) {
  static constexpr std::string_view kColon = ": ";
  const auto end_of_prefix = [](std::string_view part, std::size_t from) {
    const std::size_t at = part.find(kColon, from);
    return at == std::string_view::npos ? part.size() : at + kColon.size();
  };
  const std::string_view who = text.starts_with("rank ") ? text.substr(0, end_of_prefix(text, 0)) : "";
  text.remove_prefix(who.size());
  if (const std::size_t engine = text.find("network engine "); engine != std::string_view::npos) {
    text.remove_prefix(end_of_prefix(text, engine));
  } else if (text.starts_with("Group::create: ")) {
    text.remove_prefix(end_of_prefix(text, 0));
  }
  return fmt::format("{}{}", who, text.substr(0, text.find("; ")));
}

}  // namespace

std::int64_t longest_attempt_ns(std::int64_t timeout_ns) {
  return std::min(kMostAttemptNs, timeout_ns / kAttemptShare);
}

Status add_rings(const KernelRings& rings, const KernelRingsSource& source, rail::RailsOptions& options) {
  if (rings.in_gpu) {
    options.gpu = {rings.shape, rings.memory, rings.words, rings.read_back_writes};
    options.memory = rings.host_memory;
    options.words = rings.host_words;
  } else {
    options.ring = rings.shape;
    options.memory = rings.memory;
    options.words = rings.words;
  }
  options.gpu_pci_address = source.gpu.pci_address;
  return rings.status;
}

Result<GpuRingsAttempt> attempt_gpu_rings(const BackendContext& context, const KernelRingsSource& source,
                                          const std::vector<RankPlace>& places, GroupState& state,
                                          const Status& my_status) {
  const Topology& topology = state.topology();
  Bootstrap& bootstrap = *context.bootstrap;
  Status failure;
  rail::RailsOptions options{.ring = rail::default_ring_shape(to_size(topology.num_nodes())),
                             .spins = state.spins(),
                             .places = places,
                             .failed_attempt = &failure};
  Status mine = my_status.ok() ? check_hosts(topology, places) : my_status;
  if (mine.ok()) mine = add_rings(source.make(true), source, options);
  Result<std::unique_ptr<rail::Rails>> rails =
      rail::Rails::create(context, options, mine, [&state] { state.peers().ring_self(); });
  if (!failure.ok()) return GpuRingsAttempt{nullptr, first_clause(failure.message())};
  if (!rails.ok()) return rails.status();

  Result<Attempt> outcome = gather_attempt(bootstrap, (*rails)->start(), {}, state.timeout_ns());
  if (outcome.ok() && outcome->failure.ok()) {
    mine = await_attempt(state, **rails);
    outcome = state.broken().ok() ? gather_attempt(bootstrap, mine, {}, state.timeout_ns()) : state.broken();
  }
  if (outcome.ok() && outcome->failure.ok()) return GpuRingsAttempt{std::move(*rails), {}};
  // Every rank ends its rails now.
  (*rails)->expect_no_answers();
  rails->reset();
  if (!outcome.ok()) return outcome.status();
  return GpuRingsAttempt{nullptr, first_clause(outcome->failure.message())};
}

}  // namespace ferry::call
