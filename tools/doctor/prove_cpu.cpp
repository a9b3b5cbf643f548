#include <fmt/format.h>

#include <array>
#include <cstdint>
#include <memory>
#include <thread>
#include <vector>

#include "common/bfloat16.hpp"
#include "doctor/finding.hpp"
#include "ferry/ferry.hpp"

namespace ferry::tools {

namespace {

constexpr int kNumRanks = 2;
constexpr std::int64_t kNumTokens = 3;
constexpr std::int64_t kHidden = 8;  // one 16-byte granule of bf16
constexpr std::int64_t kTimeoutNs = 10 * kNsPerSecond;

/// Each rank sends each token to both ranks, whose experts give back what they got: every sum is twice the token.
Status run_rank(const std::shared_ptr<Bootstrap>& bootstrap) {
  GroupOptions options;
  options.backend = "cpu";
  options.timeout_ns = kTimeoutNs;
  auto group = Group::create(bootstrap, options);
  if (!group) return group.status();

  std::array<std::int64_t, kNumTokens * kNumRanks> ids{};
  for (std::size_t i = 0; i < ids.size(); ++i) ids[i] = static_cast<std::int64_t>(i) % kNumRanks;
  RouteOptions route_options;
  route_options.num_experts = kNumRanks;
  auto routing = (*group)->route({{ids.data(), DType::kInt64, {kNumTokens, kNumRanks}}, {}}, route_options);
  if (!routing) return routing.status();

  std::vector<std::uint16_t> x(kNumTokens * kHidden);
  for (std::size_t i = 0; i < x.size(); ++i) {
    x[i] = bfloat16_from_float(static_cast<float>(i + 1) * (bootstrap->rank() == 0 ? 1.0F : -1.0F));
  }
  const std::int64_t num_rows = routing->num_recv_rows();
  std::vector<std::uint16_t> rows(static_cast<std::size_t>(num_rows * kHidden));
  std::vector<std::uint16_t> sums(x.size());
  const TensorView rows_view(rows.data(), DType::kBfloat16, {num_rows, kHidden});
  DispatchInput in;
  in.x = {x.data(), DType::kBfloat16, {kNumTokens, kHidden}};
  DispatchOutput out;
  out.x = rows_view;
  if (Status status = (*group)->dispatch(*routing, in, out); !status) return status;
  CombineInput combine_in;
  combine_in.x = rows_view;
  CombineOutput combine_out;
  combine_out.x = {sums.data(), DType::kBfloat16, {kNumTokens, kHidden}};
  if (Status status = (*group)->combine(*routing, combine_in, combine_out); !status) return status;
  for (std::size_t i = 0; i < x.size(); ++i) {
    if (float_from_bfloat16(sums[i]) != kNumRanks * float_from_bfloat16(x[i])) {
      return {ErrorCode::kInternal, fmt::format("element {} came back as {}, expected {}", i,
                                                float_from_bfloat16(sums[i]), kNumRanks * float_from_bfloat16(x[i]))};
    }
  }
  return (*group)->destroy();
}

}  // namespace

Finding prove_cpu_backend() {
  Finding finding{
      Health::kOk, "proof",
      fmt::format("{} ranks routed, dispatched and combined {} tokens each, sums are right", kNumRanks, kNumTokens),
      ""};
  const auto fail = [&](const Status& status) {
    finding.health = Health::kMissing;
    finding.observed = status.to_string();
    finding.advice = "see the lines above; if all of them are ok, please report this";
    return finding;
  };
  auto bootstraps = create_in_process_bootstraps(kNumRanks);
  if (!bootstraps) return fail(bootstraps.status());
  std::array<Status, kNumRanks> statuses;
  {
    std::vector<std::jthread> threads;
    for (std::size_t rank = 0; rank < statuses.size(); ++rank) {
      threads.emplace_back([&, rank] { statuses[rank] = run_rank((*bootstraps)[rank]); });
    }
  }
  for (const Status& status : statuses) {
    if (!status) return fail(status);
  }
  return finding;
}

}  // namespace ferry::tools
