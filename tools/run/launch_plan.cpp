#include "run/launch_plan.hpp"

#include <fmt/format.h>

#include <charconv>
#include <string_view>
#include <vector>

#include "run/hosts.hpp"

namespace ferry::tools {

namespace {

/// One process per rank on one machine: a larger number is surely a typing mistake.
constexpr int kMaxForkedRanks = 512;

Status invalid(std::string text) { return {ErrorCode::kInvalidArgument, std::move(text)}; }

/// A divisor of `num_ranks`; absent if the variable is not set.
Result<std::optional<int>> read_divisor(const std::optional<EnvironmentVariable>& variable, int num_ranks) {
  if (!variable) return std::optional<int>();
  const std::string_view digits(variable->value);
  int value = 0;
  const auto [stop, error] = std::from_chars(digits.begin(), digits.end(), value);
  if (error == std::errc() && stop == digits.end() && value >= 1 && num_ranks % value == 0) return std::optional(value);
  return invalid(fmt::format(
      "{}={} for {} ranks: expected a divisor of their number, because all hosts have the same number of ranks; start "
      "as many ranks on each host, or give --nodes and unset {}",
      variable->name, digits, num_ranks, variable->name));
}

/// Number of hosts by the launcher's variables; absent if they do not give it.
Result<std::optional<int>> read_num_hosts(const LauncherVariables& launcher, int num_ranks) {
  auto local_ranks = read_divisor(launcher.num_local_ranks, num_ranks);
  if (!local_ranks) return local_ranks.status();
  if (*local_ranks) return std::optional(num_ranks / **local_ranks);
  return read_divisor(launcher.num_hosts, num_ranks);
}

/// Sets num_hosts. Collective where no variable gives it.
Status set_num_hosts(const std::optional<LauncherVariables>& launcher, std::int64_t timeout_ns, LaunchPlan* plan) {
  if (plan->num_ranks == 1) return {};
  if (launcher) {
    auto known = read_num_hosts(*launcher, plan->num_ranks);
    if (!known) return known.status();
    if (*known) {
      plan->num_hosts = **known;
      return {};
    }
  }
  plan->bootstrap.timeout_ns = timeout_ns;
  auto joined = create_tcp_bootstrap(plan->bootstrap);
  if (!joined) return joined.status();
  auto counted = find_num_hosts(**joined, timeout_ns);
  if (!counted) return counted.status();
  if (plan->num_ranks % *counted != 0) {
    return invalid(fmt::format("{} ranks run on {} hosts, expected as many on each; start as many ranks on each host",
                               plan->num_ranks, *counted));
  }
  plan->num_hosts = *counted;
  plan->joined = std::move(*joined);
  return {};
}

std::string divisors_of(int number) {
  std::string text;
  for (int divisor = 1; divisor <= number; ++divisor) {
    if (number % divisor == 0) text += fmt::format("{}{}", text.empty() ? "" : ", ", divisor);
  }
  return text;
}

Status set_num_nodes(std::optional<int> wanted, LaunchPlan* plan) {
  plan->num_nodes = wanted.value_or(plan->num_hosts);
  if (plan->num_nodes < 1 || plan->num_ranks % plan->num_nodes != 0) {
    return invalid(
        fmt::format("--nodes {}: {} ranks cannot be spread evenly over that many nodes; give one of {}, or another "
                    "number of ranks (--ranks)",
                    plan->num_nodes, plan->num_ranks, divisors_of(plan->num_ranks)));
  }
  if (plan->num_nodes % plan->num_hosts != 0) {
    return invalid(fmt::format(
        "--nodes {}: the launcher spread the ranks over {} hosts, and ranks of one node share a host; leave --nodes "
        "out, or give a multiple of {}",
        plan->num_nodes, plan->num_hosts, plan->num_hosts));
  }
  if (plan->num_nodes > plan->num_hosts) {
    plan->description += fmt::format("; {} nodes of {} are emulated{}: between them only the network", plan->num_nodes,
                                     plan->num_ranks / plan->num_nodes, plan->num_hosts == 1 ? " on this host" : "");
  }
  return {};
}

Result<LaunchPlan> plan_from_environment(const LaunchRequest& request) {
  auto options = tcp_bootstrap_options_from_environment();
  if (!options) return options.status();
  if (request.num_ranks && *request.num_ranks != options->num_ranks) {
    return invalid(
        fmt::format("--ranks {} disagrees with the launcher, which started {} ranks; leave --ranks out, or "
                    "give --launch fork to start the ranks from this process",
                    *request.num_ranks, options->num_ranks));
  }
  LaunchPlan plan;
  plan.from_environment = true;
  plan.num_ranks = options->num_ranks;
  plan.bootstrap = std::move(*options);
  // Empty if variables of several launchers give the rank and the number of ranks.
  const std::vector<LauncherVariables> launchers = launcher_variables_from_environment();
  std::string started_by = "the environment";
  if (!launchers.empty()) started_by = launchers.front().launcher;
  const auto launcher = launchers.empty() ? std::nullopt : std::optional(launchers.front());
  if (Status status = set_num_hosts(launcher, request.timeout_ns, &plan); !status) return status;
  plan.description = fmt::format(
      "{} ranks started by {}{}; each process is one rank, this one is rank {}", plan.num_ranks, started_by,
      plan.num_hosts == 1 ? std::string() : fmt::format(" on {} hosts", plan.num_hosts), plan.bootstrap.rank);
  if (Status status = set_num_nodes(request.num_nodes, &plan); !status) return status;
  return plan;
}

}  // namespace

Result<LaunchPlan> plan_launch(const LaunchRequest& request) {
  LaunchMode mode = request.mode;
  if (mode == LaunchMode::kAuto) {
    // A launcher that started a single rank (e.g. an interactive shell inside an allocation) leaves the forking to this
    // command.
    const auto launchers = launcher_variables_from_environment();
    const bool is_one_of_many = !launchers.empty() && launchers.front().num_ranks.value != "1";
    mode = is_one_of_many ? LaunchMode::kEnvironment : LaunchMode::kFork;
  }
  if (mode == LaunchMode::kEnvironment) return plan_from_environment(request);

  LaunchPlan plan;
  plan.num_ranks = request.num_ranks.value_or(request.default_num_ranks);
  if (plan.num_ranks < 1 || plan.num_ranks > kMaxForkedRanks) {
    return invalid(
        fmt::format("--ranks {} is out of range; 1 to {} ranks can be forked here", plan.num_ranks, kMaxForkedRanks));
  }
  plan.as_threads = mode == LaunchMode::kThreads;
  plan.description = plan.as_threads ? fmt::format("{} ranks, each a thread of this command", plan.num_ranks)
                                     : fmt::format("{} ranks, each a process forked by this command", plan.num_ranks);
  if (Status status = set_num_nodes(request.num_nodes, &plan); !status) return status;
  return plan;
}

}  // namespace ferry::tools
