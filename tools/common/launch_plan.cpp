#include "common/launch_plan.hpp"

#include <fmt/format.h>

#include <array>
#include <cstdlib>

namespace ferry::tools {

namespace {

struct LauncherVariables {
  const char* name;
  const char* rank_variable;
  const char* size_variable;
};

/// In the order in which the library's bootstrap looks: what was set by hand first.
constexpr std::array<LauncherVariables, 5> kLaunchers = {{
    {"FERRY_* variables", "FERRY_RANK", "FERRY_NUM_RANKS"},
    {"torchrun", "RANK", "WORLD_SIZE"},
    {"Open MPI's mpirun", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"},
    {"MPICH's or Intel's mpirun", "PMI_RANK", "PMI_SIZE"},
    {"srun", "SLURM_PROCID", "SLURM_NTASKS"},
}};

/// One process per rank on one machine: beyond this the fork itself is surely a typing mistake.
constexpr int kMaxForkedRanks = 512;

Result<LaunchPlan> plan_from_environment(std::optional<int> num_ranks) {
  auto options = tcp_bootstrap_options_from_environment();
  if (!options) return options.status();
  if (num_ranks && *num_ranks != options->num_ranks) {
    return Status(ErrorCode::kInvalidArgument,
                  fmt::format("--ranks {} disagrees with the launcher, which started {} ranks; leave --ranks out, or "
                              "give --launch fork to start the ranks from this process",
                              *num_ranks, options->num_ranks));
  }
  LaunchPlan plan;
  plan.from_environment = true;
  plan.num_ranks = options->num_ranks;
  plan.bootstrap = std::move(*options);
  const auto seen = launchers_seen();
  plan.description =
      fmt::format("{} ranks started by {}; each process is one rank, this one is rank {}", plan.num_ranks,
                  seen.empty() ? "the environment" : seen.front().name, plan.bootstrap.rank);
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

Result<LaunchPlan> plan_launch(LaunchMode mode, std::optional<int> num_ranks, int default_num_ranks) {
  if (mode == LaunchMode::kAuto) {
    // A launcher that started a single rank (an interactive shell inside an allocation, say) leaves the forking to us.
    const auto seen = launchers_seen();
    mode = !seen.empty() && seen.front().num_ranks != "1" ? LaunchMode::kEnvironment : LaunchMode::kFork;
  }
  if (mode == LaunchMode::kEnvironment) return plan_from_environment(num_ranks);

  LaunchPlan plan;
  plan.num_ranks = num_ranks.value_or(default_num_ranks);
  if (plan.num_ranks < 1 || plan.num_ranks > kMaxForkedRanks) {
    return Status(
        ErrorCode::kInvalidArgument,
        fmt::format("--ranks {} is out of range; 1 to {} ranks can be forked here", plan.num_ranks, kMaxForkedRanks));
  }
  plan.description = fmt::format("{} ranks, each a process forked by this command", plan.num_ranks);
  return plan;
}

}  // namespace ferry::tools
