#include "run/run_options.hpp"

#include <fmt/format.h>

#include <CLI/Validators.hpp>
#include <cmath>
#include <cstdlib>
#include <limits>
#include <string_view>

#include "report/output.hpp"
#include "run/backend_probe.hpp"
#include "run/option_types.hpp"

namespace ferry::tools {

namespace {
/// Maximum size that a CPU group accepts (node::Arena): half of the addresses of a process on x86-64.
constexpr std::uint64_t kMaxArenaBytes = std::uint64_t{1} << 46;
constexpr double kMaxTimeoutSeconds = 86400.0;
constexpr double kMinTimeoutSeconds = 0.1;

/// Refuses a unit without a number, which a script passes if a variable is not set and CLI::AsSizeValue would read as
/// one unit.
std::string starts_with_digit(std::string& given) {
  const bool starts = !given.empty() && given.front() >= '0' && given.front() <= '9';
  return starts ? std::string() : given + " does not begin with a number";
}

}  // namespace

void add_common_options(CLI::App& command, CommonOptions* options) {
  // The launch plan decides which numbers are valid.
  constexpr int kMinInt = std::numeric_limits<int>::min();
  constexpr int kMaxInt = std::numeric_limits<int>::max();
  command
      .add_option("--ranks", options->num_ranks,
                  fmt::format("Ranks, each a process (default {}; under a launcher, its number)", kDefaultNumRanks))
      ->check(whole_number(kMinInt, kMaxInt))
      ->option_text("INT");
  command
      .add_option("--nodes", options->num_nodes,
                  "Nodes that the ranks are spread over evenly; ranks of different nodes share nothing but the network "
                  "(default 1; under a launcher, its hosts)")
      ->check(whole_number(kMinInt, kMaxInt))
      ->option_text("INT");
  command
      .add_option(
          "--transport", options->transport,
          "The network between nodes (default auto: the best that works); loopback joins ranks that are threads "
          "(--launch threads), as slow as FERRY_LOOPBACK_RATE says, in bytes per second")
      ->check(CLI::IsMember({"auto", "ucx", "loopback"}))
      ->option_text("{auto,ucx,loopback}");
  command.add_option("--net-device,--net-devices", options->net_devices,
                     "Network devices between hosts, e.g. eth0 or mlx5_0:1,mlx5_1:1 (default: FERRY_NET_DEVICES, else "
                     "the interface that leads to rank 0 and all RDMA cards; `ferry doctor` lists them)");
  command
      .add_option(
          "--ring-memory", options->ring_memory,
          "Memory of GPU ranks' rings between nodes (default FERRY_RING_MEMORY, else gpu where every rank's card "
          "reaches its GPU, else host); gpu has not run on any network card yet")
      ->check(CLI::IsMember({"auto", "host", "gpu"}))
      ->option_text("{auto,host,gpu}");
  command.add_option("--backend", options->backend, "\"auto\" or a backend that `ferry doctor` lists")
      ->capture_default_str();
  add_choice<LaunchMode>(
      command, "--launch", &options->launch,
      {{"auto", LaunchMode::kAuto},
       {"fork", LaunchMode::kFork},
       {"environment", LaunchMode::kEnvironment},
       {"threads", LaunchMode::kThreads}},
      "Who starts the ranks: fork (this command), environment (torchrun, mpirun, srun: this process is one rank), "
      "threads (this command, without processes of their own), auto (environment where a launcher's variables name "
      "more "
      "than one rank)");
  command.add_option("--timeout", options->timeout_s, "Deadline of every wait, in seconds")
      ->check(CLI::Range(kMinTimeoutSeconds, kMaxTimeoutSeconds))
      ->check(is_number)
      ->capture_default_str();
  command
      .add_option(
          "--arena", options->arena_bytes,
          "Maximum symmetric memory of a rank, staging included, such as 8G or 512M (units of 1024; default 32G)")
      ->transform(CLI::AsSizeValue(false))
      ->transform(CLI::Validator(starts_with_digit, "", "size"))
      ->check(whole_number(std::uint64_t{1}, kMaxArenaBytes))
      ->option_text("SIZE");
  command.add_option("--seed", options->seed, "Seed of all generated data")
      ->check(whole_number(std::uint64_t{0}, std::numeric_limits<std::uint64_t>::max()))
      ->capture_default_str();
}

void add_verify_option(CLI::App& command, CommonOptions* options) {
  command.add_flag("--verify", options->verify,
                   "Rows carry checksums on every hop, and a wrong row ends the run with an error that names the hop "
                   "(GroupOptions::verify)");
}

LaunchRequest CommonOptions::launch_request() const {
  return {launch, num_ranks, num_nodes, kDefaultNumRanks, timeout_ns()};
}

Result<std::string> resolve_backend(const CommonOptions& options, int num_nodes) {
  // GPU ranks on several nodes require an explicit choice, because they are hardly tested.
  constexpr std::string_view kBestOverNodes = "cpu";
  std::string names;
  std::string reasons;
  auto infos = probe_backends();
  if (!infos) return infos.status();
  for (const BackendInfo& backend : *infos) {
    names += (names.empty() ? "" : ", ") + backend.name;
    const bool wanted = options.backend == "auto" || options.backend == backend.name;
    if (!wanted || (options.backend == "auto" && num_nodes > 1 && backend.name != kBestOverNodes)) continue;
    if (backend.available) return backend.name;
    reasons += fmt::format("{}{}: {}", reasons.empty() ? "" : "; ", backend.name, backend.reason);
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

Status check_transport(const CommonOptions& options, int num_nodes) {
  if (num_nodes == 1) return {};
  // Memory of one process cannot join several processes.
  const bool may_loop_back = options.launch == LaunchMode::kThreads;
  if (options.transport == "loopback" && !may_loop_back) {
    return {ErrorCode::kInvalidArgument, "--transport loopback joins threads only; give --launch threads, too"};
  }
  auto infos = probe_transports();
  if (!infos) return infos.status();
  std::string reasons;
  for (const TransportInfo& transport : *infos) {
    // loopback requires an explicit choice.
    const bool wanted =
        options.transport == "auto" ? transport.name != "loopback" : transport.name == options.transport;
    if (!wanted) continue;
    if (transport.available) return {};
    reasons += fmt::format("; {}: {}", transport.name, transport.reason);
  }
  return {ErrorCode::kUnsupported, fmt::format("--transport {}: no network between {} nodes works here{}",
                                               options.transport, num_nodes, reasons)};
}

Status check_output(const std::string& path, const LaunchPlan& launch, std::string_view what) {
  return launch.num_hosts == 1 || launch.reports_here() ? check_writable(path, what) : Status();
}

}  // namespace ferry::tools
