#include "common/launch_plan.hpp"

#include <fmt/format.h>

#include <array>
#include <charconv>
#include <cstdlib>
#include <string_view>

namespace ferry::tools {

namespace {

/// Null: the launcher does not say.
struct LauncherVariables {
  const char* name;
  const char* rank_variable;
  const char* size_variable;
  const char* local_size_variable;  ///< ranks on this host
  const char* num_hosts_variable;
};

/// In the order in which the library's bootstrap looks: what was set by hand first.
constexpr std::array<LauncherVariables, 5> kLaunchers = {{
    {"FERRY_* variables", "FERRY_RANK", "FERRY_NUM_RANKS", nullptr, nullptr},
    {"torchrun", "RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", nullptr},
    {"Open MPI's mpirun", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE", nullptr},
    {"MPICH's or Intel's mpirun", "PMI_RANK", "PMI_SIZE", "MPI_LOCALNRANKS", "SLURM_NNODES"},
    {"srun", "SLURM_PROCID", "SLURM_NTASKS", nullptr, "SLURM_NNODES"},
}};

/// One process per rank on one machine: beyond this the fork itself is surely a typing mistake.
constexpr int kMaxForkedRanks = 512;

Status invalid(std::string text) { return {ErrorCode::kInvalidArgument, std::move(text)}; }

/// The launcher whose ranks these are.
const LauncherVariables* launcher_seen() {
  for (const LauncherVariables& launcher : kLaunchers) {
    if (std::getenv(launcher.rank_variable) != nullptr && std::getenv(launcher.size_variable) != nullptr) {
      return &launcher;
    }
  }
  return nullptr;
}

/// A divisor of `num_ranks`; absent where the variable is not set.
Result<std::optional<int>> read_divisor(const char* variable, int num_ranks) {
  const char* text = variable == nullptr ? nullptr : std::getenv(variable);
  if (text == nullptr || *text == '\0') return std::optional<int>();
  const std::string_view digits(text);
  int value = 0;
  const auto [stop, error] = std::from_chars(digits.begin(), digits.end(), value);
  if (error == std::errc() && stop == digits.end() && value >= 1 && num_ranks % value == 0) return std::optional(value);
  return invalid(fmt::format(
      "{}={} for {} ranks: expected a divisor of their number, every host having as many ranks as any other; start as "
      "many on each, or give --nodes and unset {}",
      variable, digits, num_ranks, variable));
}

/// Hosts that the launcher spread its ranks over, 1 where it does not say.
Result<int> count_hosts(int num_ranks) {
  const LauncherVariables* launcher = launcher_seen();
  if (launcher == nullptr) return 1;
  auto local_ranks = read_divisor(launcher->local_size_variable, num_ranks);
  if (!local_ranks) return local_ranks.status();
  if (*local_ranks) return num_ranks / **local_ranks;
  auto num_hosts = read_divisor(launcher->num_hosts_variable, num_ranks);
  if (!num_hosts) return num_hosts.status();
  return num_hosts->value_or(1);
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
  auto num_hosts = count_hosts(plan.num_ranks);
  if (!num_hosts) return num_hosts.status();
  plan.num_hosts = *num_hosts;
  const LauncherVariables* launcher = launcher_seen();
  plan.description = fmt::format("{} ranks started by {}{}; each process is one rank, this one is rank {}",
                                 plan.num_ranks, launcher == nullptr ? "the environment" : launcher->name,
                                 plan.num_hosts == 1 ? std::string() : fmt::format(" on {} hosts", plan.num_hosts),
                                 plan.bootstrap.rank);
  if (Status status = set_num_nodes(request.num_nodes, &plan); !status) return status;
  return plan;
}

}  // namespace

std::vector<LauncherSeen> launchers_seen() {
  std::vector<LauncherSeen> seen;
  for (const LauncherVariables& launcher : kLaunchers) {
    const char* rank = std::getenv(launcher.rank_variable);
    const char* size = std::getenv(launcher.size_variable);
    if (rank == nullptr || size == nullptr) continue;
    seen.push_back({launcher.name, launcher.rank_variable, rank, launcher.size_variable, size});
  }
  return seen;
}

Result<LaunchPlan> plan_launch(const LaunchRequest& request) {
  LaunchMode mode = request.mode;
  if (mode == LaunchMode::kAuto) {
    // A launcher that started a single rank (an interactive shell inside an allocation, say) leaves the forking to us.
    const auto seen = launchers_seen();
    mode = !seen.empty() && seen.front().num_ranks != "1" ? LaunchMode::kEnvironment : LaunchMode::kFork;
  }
  if (mode == LaunchMode::kEnvironment) return plan_from_environment(request);

  LaunchPlan plan;
  plan.num_ranks = request.num_ranks.value_or(request.default_num_ranks);
  if (plan.num_ranks < 1 || plan.num_ranks > kMaxForkedRanks) {
    return invalid(
        fmt::format("--ranks {} is out of range; 1 to {} ranks can be forked here", plan.num_ranks, kMaxForkedRanks));
  }
  plan.description = fmt::format("{} ranks, each a process forked by this command", plan.num_ranks);
  if (Status status = set_num_nodes(request.num_nodes, &plan); !status) return status;
  return plan;
}

}  // namespace ferry::tools
