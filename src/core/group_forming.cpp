/// How a group forms, and forms again when ranks were lost: Group::create, suspend and renew.

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <optional>
#include <utility>

#include "core/backend.hpp"
#include "core/call_gate.hpp"
#include "core/call_numbers.hpp"
#include "core/create_together.hpp"
#include "core/expert_placement.hpp"
#include "core/group_log.hpp"
#include "core/group_options.hpp"
#include "core/latency_calls.hpp"
#include "core/present_ranks.hpp"
#include "ferry/group.hpp"

namespace ferry {
namespace {

/// A backend that has been made by all ranks, or renewed.
struct Formed {
  Topology topology;
  std::unique_ptr<Backend> backend;  // null: the present one was renewed
};

/// Group that is formed again.
struct Renewed {
  Status status{};             ///< an error of this rank alone
  Backend* backend = nullptr;  ///< null: the group is new
  Topology topology{};

  std::string_view operation() const { return backend == nullptr ? "create" : "renew"; }
};

Status check_topology(const Topology& before, const Topology& now) {
  if (now.ranks_per_node == before.ranks_per_node && now.num_ranks == before.num_ranks) return {};
  return Status(
      ErrorCode::kUnsupported,
      fmt::format("renew: the group's {} ranks would be on {} nodes, and only groups of one node are renewed; "
                  "start processes on this host, or create a new group",
                  now.num_ranks, now.num_nodes()));
}

/// Collective over the ranks that are present. `finish(formed)` does what is left to do on this rank; if it lacks
/// memory, the others learn it.
template <typename Finish>
Result<Formed> form(Bootstrap& members, const GroupOptions& options, const Renewed& before, Finish finish) {
  const Status are_valid = check_present_ranks(options, members);
  const GroupOptions all_present;
  PresentRanks ranks(members, are_valid.ok() ? options : all_present);
  const LogRank here{ranks.rank(), ranks.num_ranks()};
  const auto agree = [&](Bootstrap& shared) {
    const LogPhase phase(here, "create: agreement on options");
    return agree_on_options(shared, options, before.status.ok() ? are_valid : before.status);
  };
  const auto form_mine = [&](Bootstrap& shared) -> Result<Formed> {
    Result<AgreedOptions> agreed = agree(shared);
    if (!agreed.ok()) return agreed.status();
    BackendContext context{&shared, agreed->topology, options, std::move(agreed->tuning)};
    context.options.ring_memory = agreed->ring_memory;
    context.options.num_reserved_sms = agreed->num_reserved_sms;
    context.options.network_poll_ns = agreed->network_poll_ns;
    log_options(before.operation(), context, agreed->factory->name);
    const LogPhase phase(here, "create: backend");
    if (before.backend != nullptr) {
      if (Status same = check_topology(before.topology, agreed->topology); !same.ok()) return same;
      context.earlier_waits_ns = before.backend->wait_times_ns();
      if (const std::optional<Status> renewed = before.backend->renew(context)) {
        if (!renewed->ok()) return *renewed;
        Formed formed{agreed->topology, nullptr};
        finish(formed);
        return formed;
      }
    }
    Result<std::unique_ptr<Backend>> backend = agreed->factory->create(context);
    if (!backend.ok()) return backend.status();
    Formed formed{agreed->topology, std::move(*backend)};
    finish(formed);
    return formed;
  };
  Result<Formed> formed = create_together(ranks, "Group::create", time_to_agree_ns(options.timeout_ns), form_mine);
  log_error(here, formed.status());
  return formed;
}

Status check_one_node(std::string_view operation, const Topology& topology) {
  if (topology.num_nodes() == 1) return {};
  return Status(ErrorCode::kUnsupported,
                fmt::format("{}: the group has {} nodes, and only groups of one node are renewed; create a new group",
                            operation, topology.num_nodes()));
}

/// Checks that the member of the bootstrap is this rank.
Status check_place(int member, const std::vector<int>& present_ranks, int rank) {
  const auto place = std::ranges::find(present_ranks, rank) - present_ranks.begin();
  if (place == member && place < std::ssize(present_ranks)) return {};
  return Status(
      ErrorCode::kInvalidArgument,
      fmt::format("renew: present_ranks is [{}], and rank {} of the group is rank {} of the bootstrap; expected "
                  "it at that index",
                  fmt::join(present_ranks, ", "), rank, member));
}

}  // namespace

Group::Group(Topology topology, std::unique_ptr<Backend> backend, const GroupOptions& options)
    : topology_(topology),
      options_(std::make_unique<GroupOptions>(options)),
      backend_(std::move(backend)),
      placements_(std::make_unique<ExpertPlacements>(topology)),
      gate_(std::make_unique<CallGate>()),
      errors_(std::make_unique<ErrorLog>(log_rank(topology))) {
  begin_calls();
}

/// Makes earlier Routings those of another group.
void Group::begin_calls() {
  latency_calls_ = std::make_unique<LatencyCalls>();
  numbers_ = std::make_unique<CallNumbers>(backend_->takes_streams());
  identity_ = std::make_shared<const char>();
}

Group::~Group() {
  // Only the process that created the backend may end it.
  if (gate_->is_copy()) {
    static_cast<void>(backend_.release());
  } else if (backend_ != nullptr) {
    log_line(LogLevel::kInfo, log_rank(topology_), "left: the group ends without destroy");
  }
}

Result<std::shared_ptr<Group>> Group::create(std::shared_ptr<Bootstrap> bootstrap, const GroupOptions& options) {
  static_cast<void>(open_log());  // its error is one of the options
  if (bootstrap == nullptr) {
    const Status status(ErrorCode::kInvalidArgument,
                        "Group::create: the bootstrap is null; create one with create_tcp_bootstrap or "
                        "create_in_process_bootstraps");
    log_error({}, status);
    return status;
  }
  const LogPhase phase({bootstrap->rank(), bootstrap->num_ranks()}, "create: all");
  std::shared_ptr<Group> group;
  const Result<Formed> formed = form(*bootstrap, options, {}, [&](Formed& mine) {
    group = std::shared_ptr<Group>(new Group(mine.topology, std::move(mine.backend), options));
  });
  if (!formed.ok()) return formed.status();
  group->backend_->created();
  log_formed("create", group->topology_, *group->backend_);
  return group;
}

Result<std::vector<int>> Group::suspend() {
  CallPass pass;
  if (Status status = enter("suspend", pass); !status.ok()) return noted(status);
  if (Status status = check_one_node("suspend", topology_); !status.ok()) return noted(status);
  Result<std::vector<int>> silent = backend_->suspend();
  is_suspended_ = true;
  if (!silent.ok()) return noted(silent.status());
  std::erase_if(*silent, [&](int one) { return one == rank() || !is_present(*options_, one); });
  std::ranges::sort(*silent);
  silent->erase(std::unique(silent->begin(), silent->end()), silent->end());
  log_line(LogLevel::kInfo, log_rank(topology_), "suspend: silent_ranks=[{}]", fmt::join(*silent, ","));
  return silent;
}

Status Group::renew(std::shared_ptr<Bootstrap> bootstrap, const std::vector<int>& present_ranks) {
  constexpr std::string_view kName = "renew";
  CallPass pass;
  if (Status status = take_turn(kName, pass); !status.ok()) return noted(status);
  if (bootstrap == nullptr) return noted(Status(ErrorCode::kInvalidArgument, "renew: the bootstrap is null"));
  if (Status status = check_one_node(kName, topology_); !status.ok()) return noted(status);
  std::optional<GroupOptions> options;
  const Status mine = attempt(kName, rank(), [&]() -> Status {
    if (!is_suspended_) {
      is_suspended_ = true;
      if (const auto silent = backend_->suspend(); !silent.ok()) return silent.status();
    }
    options.emplace(*options_);
    options->backend = backend_->name();
    options->num_ranks = num_ranks();
    options->present_ranks = present_ranks;
    return check_place(bootstrap->rank(), present_ranks, rank());
  });
  const Renewed before{mine, backend_.get(), topology_};
  Result<Formed> formed = form(*bootstrap, options ? *options : *options_, before, [&](const Formed&) {
    begin_calls();
    options_->present_ranks = present_ranks;
  });
  if (!formed.ok()) {
    // Others may have succeeded: a member can be lost after it has sent its last message.
    backend_->leave();
    return formed.status();
  }
  if (formed->backend != nullptr) backend_ = std::move(formed->backend);
  backend_->created();
  log_formed("renew", topology_, *backend_);
  is_suspended_ = false;
  return {};
}

}  // namespace ferry
