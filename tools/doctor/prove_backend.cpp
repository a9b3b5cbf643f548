#include <fmt/format.h>
#include <unistd.h>

#include <array>
#include <cstdint>
#include <memory>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "common/bfloat16.hpp"
#include "device/rank_device.hpp"
#include "doctor/finding.hpp"
#include "ferry/ferry.hpp"
#include "launch/listening_sockets.hpp"

namespace ferry::tools {

namespace {

constexpr int kNumRanks = 2;
constexpr std::int64_t kNumTokens = 3;
constexpr std::int64_t kHidden = 8;  // one 16-byte granule of bf16
constexpr std::int64_t kTimeoutNs = 10 * kNsPerSecond;

template <typename T>
Status mirror(const RankDevice& device, std::vector<T>& host, MirroredBlock* block) {
  return block->mirror(device, host.data(), host.size() * sizeof(T));
}

/// Network that the ranks used.
struct SeenNetwork {
  NetworkUsage usage;
  std::vector<launch::ListeningSocket> sockets;  ///< sockets of this process
};

/// Each rank sends each token to both ranks, whose experts return their input: every sum is twice the token, which no
/// rounding changes.
Status run_rank(GroupOptions options, const std::shared_ptr<Bootstrap>& bootstrap, SeenNetwork* seen) {
  auto device = RankDevice::open(options.backend, bootstrap->rank());
  if (!device) return device.status();
  options.timeout_ns = kTimeoutNs;
  options.device = device->ordinal();
  auto group = Group::create(bootstrap, options);
  if (!group) return group.status();
  if (seen != nullptr) *seen = {(*group)->network_usage(), launch::listening_sockets(getpid())};

  std::vector<std::int64_t> ids(kNumTokens * kNumRanks);
  for (std::size_t i = 0; i < ids.size(); ++i) ids[i] = static_cast<std::int64_t>(i) % kNumRanks;
  MirroredBlock ids_block;
  if (Status status = mirror(*device, ids, &ids_block); !status) return status;
  RouteOptions route_options;
  route_options.num_experts = kNumRanks;
  auto routing = (*group)->route({{ids_block.data(), DType::kInt64, {kNumTokens, kNumRanks}}, {}}, route_options,
                                 device->stream());
  if (!routing) return routing.status();

  std::vector<std::uint16_t> x(kNumTokens * kHidden);
  for (std::size_t i = 0; i < x.size(); ++i) {
    x[i] = bfloat16_from_float(static_cast<float>(i + 1) * (bootstrap->rank() == 0 ? 1.0F : -1.0F));
  }
  const std::int64_t num_rows = routing->num_recv_rows();
  std::vector<std::uint16_t> rows(static_cast<std::size_t>(num_rows * kHidden));
  std::vector<std::uint16_t> sums(x.size());
  MirroredBlock x_block;
  MirroredBlock rows_block;
  MirroredBlock sums_block;
  Status status = mirror(*device, x, &x_block);
  if (status) status = mirror(*device, rows, &rows_block);
  if (status) status = mirror(*device, sums, &sums_block);
  if (!status) return status;
  const TensorView rows_view(rows_block.data(), DType::kBfloat16, {num_rows, kHidden});
  DispatchInput in;
  in.x = {x_block.data(), DType::kBfloat16, {kNumTokens, kHidden}};
  DispatchOutput out;
  out.x = rows_view;
  if (status = (*group)->dispatch(*routing, in, out, device->stream()); !status) return status;
  CombineInput combine_in;
  combine_in.x = rows_view;
  CombineOutput combine_out;
  combine_out.x = {sums_block.data(), DType::kBfloat16, {kNumTokens, kHidden}};
  if (status = (*group)->combine(*routing, combine_in, combine_out, device->stream()); !status) return status;
  if (status = (*group)->wait(device->stream()); !status) return status;
  if (status = sums_block.to_host(*device); !status) return status;
  for (std::size_t i = 0; i < x.size(); ++i) {
    if (float_from_bfloat16(sums[i]) != kNumRanks * float_from_bfloat16(x[i])) {
      return {ErrorCode::kInternal, fmt::format("element {} came back as {}, expected {}", i,
                                                float_from_bfloat16(sums[i]), kNumRanks * float_from_bfloat16(x[i]))};
    }
  }
  return (*group)->destroy();
}

/// Runs both ranks, each in a thread; returns the first failure.
Status run_both(const GroupOptions& options, SeenNetwork* seen) {
  auto bootstraps = create_in_process_bootstraps(kNumRanks);
  if (!bootstraps) return bootstraps.status();
  std::array<Status, kNumRanks> statuses;
  {
    std::vector<std::jthread> threads;
    for (std::size_t rank = 0; rank < statuses.size(); ++rank) {
      threads.emplace_back(
          [&, rank] { statuses[rank] = run_rank(options, (*bootstraps)[rank], rank == 0 ? seen : nullptr); });
    }
  }
  for (const Status& status : statuses) {
    if (!status) return status;
  }
  return {};
}

std::string where(const std::string& backend) {
  if (backend != "cuda") return "";
  auto num_devices = count_devices();
  return num_devices && *num_devices > 1 ? " on GPUs 0 and 1" : " on GPU 0";
}

/// "; tcp/eth0" if the engine describes in one line how the ranks reach each other.
std::string route_of(const NetworkUsage& network) {
  const std::string route = network.rails.empty() ? "" : network.rails.front().route;
  return route.empty() || route.find('\n') != std::string::npos ? "" : "; path: " + route;
}

/// "; listens on 127.0.0.1", with every address once.
std::string listening_at(const std::vector<launch::ListeningSocket>& sockets) {
  std::set<std::string> addresses;
  for (const launch::ListeningSocket& socket : sockets) addresses.insert(socket.address);
  return addresses.empty() ? "" : fmt::format("; listening on {}", fmt::join(addresses, ", "));
}

}  // namespace

Finding prove_backend(const std::string& backend) {
  Finding finding{Health::kOk, backend == "cpu" ? "proof" : fmt::format("proof {}", backend),
                  fmt::format("{} ranks{} routed, dispatched and combined {} tokens each, sums are right", kNumRanks,
                              where(backend), kNumTokens),
                  ""};
  GroupOptions options;
  options.backend = backend;
  if (Status status = run_both(options, nullptr); !status) {
    finding.health = Health::kMissing;
    finding.observed = status.to_string();
    finding.advice = "see the lines above; if all of them are ok, please report this";
  }
  return finding;
}

Finding prove_nodes() {
  GroupOptions options;
  options.backend = "cpu";
  options.ranks_per_node = 1;
  SeenNetwork seen;
  Finding finding{Health::kOk, "proof nodes", "", ""};
  if (Status status = run_both(options, &seen); !status) {
    finding.health = Health::kMissing;
    finding.observed = status.to_string();
    finding.advice = "keep all ranks on one node, or see the lines on networks above (UCX_LOG_LEVEL=info logs more)";
    return finding;
  }
  finding.observed = fmt::format("{} ranks as {} nodes over {} did the same, sums are right{}{}", kNumRanks, kNumRanks,
                                 seen.usage.transport, route_of(seen.usage), listening_at(seen.sockets));
  return finding;
}

}  // namespace ferry::tools
