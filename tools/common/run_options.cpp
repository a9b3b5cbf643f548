#include "common/run_options.hpp"

#include <fmt/format.h>

#include <CLI/Validators.hpp>
#include <algorithm>
#include <map>

#include "common/backend_probe.hpp"

namespace ferry::tools {

namespace {
const std::map<std::string, LaunchMode> launch_names = {
    {"auto", LaunchMode::kAuto}, {"fork", LaunchMode::kFork}, {"environment", LaunchMode::kEnvironment}};
constexpr double kMaxTimeoutSeconds = 86400.0;
constexpr double kMinTimeoutSeconds = 0.1;
}  // namespace

void add_common_options(CLI::App& command, CommonOptions* options) {
  command.add_option("--ranks", options->num_ranks,
                     fmt::format("Ranks, each a process (default {}; under a launcher, its number)", kDefaultNumRanks));
  command.add_option("--nodes", options->num_nodes, "Nodes that the ranks are spread over (only 1 so far)")
      ->capture_default_str();
  command.add_option("--backend", options->backend, "\"auto\" or a backend that `ferry doctor` lists")
      ->capture_default_str();
  command
      .add_option("--launch", options->launch,
                  "Who starts the ranks: fork (this command), environment (torchrun, mpirun, srun: this process is one "
                  "rank), auto (environment where a launcher's variables name more than one rank)")
      ->transform(CLI::CheckedTransformer(launch_names))
      ->option_text("{auto,fork,environment}");
  command.add_option("--timeout", options->timeout_s, "Deadline of every wait, in seconds")
      ->check(CLI::Range(kMinTimeoutSeconds, kMaxTimeoutSeconds))
      ->capture_default_str();
  command.add_option("--seed", options->seed, "Seed of everything that is made up")->capture_default_str();
}

Result<std::string> resolve_backend(const CommonOptions& options) {
  if (options.num_nodes != 1) {
    return Status(ErrorCode::kUnsupported,
                  fmt::format("--nodes {}: only 1 works so far, all ranks share this machine", options.num_nodes));
  }
  std::string names;
  std::string reasons;
  auto infos = probe_backends();
  if (!infos) return infos.status();
  for (const BackendInfo& backend : *infos) {
    const bool wanted = options.backend == "auto" || options.backend == backend.name;
    if (wanted && backend.available) return backend.name;
    if (wanted) reasons += fmt::format("{}{}: {}", reasons.empty() ? "" : "; ", backend.name, backend.reason);
    names += (names.empty() ? "" : ", ") + backend.name;
  }
  if (!reasons.empty()) {
    return Status(ErrorCode::kUnsupported, fmt::format("--backend {} cannot run here: {}", options.backend, reasons));
  }
  if (options.backend == "cuda") {
    return Status(ErrorCode::kInvalidArgument,
                  "--backend cuda: this build has no CUDA backend; configure with -DFERRY_CUDA=ON where nvcc is found");
  }
  return Status(
      ErrorCode::kInvalidArgument,
      fmt::format("--backend {}: this build has no such backend; it has {} (and auto)", options.backend, names));
}

}  // namespace ferry::tools
