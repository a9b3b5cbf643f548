#include "conformance/backend_config.hpp"

#include "support/exchange_check.hpp"
#include "support/gpu_ranks.hpp"

namespace ferry::test {
namespace {

/// A rank that waits longer than this on these small inputs has lost its peer. Long enough for a busy machine.
constexpr std::int64_t kTimeoutNs = 40 * kNsPerSecond;
/// Deadline of a whole test run: processes that share one GPU take turns thousands of times.
constexpr std::chrono::seconds kGpuDeadline{300};
/// Ample for these inputs, and small enough that sixteen ranks fit any address space limit.
constexpr std::size_t kArenaBytes = std::size_t{1} << 30;

}  // namespace

void PrintTo(const BackendConfig& config, std::ostream* out) { *out << config.name; }

std::string config_name(const ::testing::TestParamInfo<BackendConfig>& info) { return info.param.name; }

int Conformance::ranks_per_node(int num_ranks) const {
  if (!GetParam().several_nodes) return num_ranks;
  int largest = 1;
  for (int divisor = 1; divisor < num_ranks; ++divisor) {
    if (num_ranks % divisor == 0) largest = divisor;
  }
  return largest;
}

PreparedCase Conformance::prepare(ExchangeCase spec) const {
  spec.world.ranks_per_node = ranks_per_node(spec.world.num_ranks);
  return test::prepare(spec);
}

GroupOptions Conformance::group_options(const RankContext& context) const {
  return {.backend = GetParam().backend,
          .ranks_per_node = ranks_per_node(context.num_ranks()),
          .arena_bytes = kArenaBytes,
          .timeout_ns = kTimeoutNs,
          .device = on_gpus() ? device_of_rank(context.rank()) : kCurrentDevice,
          .transport = GetParam().transport,
          .latency_bytes = latency_bytes_,
          .verify = GetParam().verify};
}

void Conformance::run_on_ranks(int num_ranks, const RankBody& body) const {
  const RankBody on_host = [&](RankContext& context) {
    if (GetParam().enter_host != nullptr) GetParam().enter_host(context.rank() / ranks_per_node(num_ranks));
    body(context);
  };
  if (on_gpus())
    run_gpu_ranks({GetParam().kind, num_ranks, kGpuDeadline}, on_host);
  else
    run_ranks({GetParam().kind, num_ranks}, on_host);
}

void Conformance::run_with_group(int num_ranks, const GroupBody& body) const {
  run_on_ranks(num_ranks, [&](RankContext& context) {
    auto group = Group::create(context.bootstrap(), group_options(context));
    if (!context.expect_ok(group.status(), "Group::create")) return;
    context.expect((*group)->backend() == GetParam().backend, "the group runs on another backend than requested");
    body(context, **group);
    context.expect_ok((*group)->destroy(), "destroy");
  });
}

void Conformance::run_cases(int num_ranks, const std::vector<ExchangeCase>& cases, const KernelOptions& kernel) const {
  std::vector<PreparedCase> prepared;
  for (const ExchangeCase& spec : cases) prepared.push_back(prepare(spec));
  run_with_group(num_ranks, [&](RankContext& context, Group& group) {
    for (const PreparedCase& one : prepared) check_case(context, group, one, kernel);
  });
}

}  // namespace ferry::test
