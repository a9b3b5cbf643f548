#include <fmt/format.h>

#include <array>
#include <string_view>

#include "conformance/latency_conformance.hpp"

/// Options of kernels that no kernel could follow. Every call refuses them on every backend, so that a program that has
/// run on CPU ranks does not meet the error on GPUs.

namespace ferry::test {
namespace {

constexpr int kNumRanks = 2;
constexpr int kBadRank = 1;

struct WrongKernel {
  std::string_view words;
  KernelOptions kernel;
};

constexpr std::array<WrongKernel, 5> kWrongKernels = {{
    {"num_sms is -1, expected a positive number, or 0", {.num_sms = -1}},
    {"num_copy_sms is -2, expected a positive number, or 0", {.num_copy_sms = -2}},
    {"chunk_tokens is -3, expected a positive number, or 0", {.chunk_tokens = -3}},
    {"copy_path is -1, expected kAuto, kBulk or kLoadStore", {.copy_path = static_cast<CopyPath>(-1)}},
    {"copy_path is 3, expected kAuto, kBulk or kLoadStore", {.copy_path = static_cast<CopyPath>(3)}},
}};

void expect_refused(RankContext& context, const Status& status, std::string_view call, std::string_view words) {
  if (!context.expect_code(status, ErrorCode::kInvalidArgument, fmt::format("{}: {}", call, words))) return;
  const std::string expected = fmt::format("rank {}: {}: {}", kBadRank, call, words);
  context.expect(status.message().find(expected) != std::string_view::npos,
                 fmt::format("expected \"{}\" in \"{}\"", expected, status.message()));
}

class KernelOptionsConformance : public LatencyConformance {};

TEST_P(KernelOptionsConformance, WrongOnesAreRefusedByEveryCall) {
  const PreparedCase good = prepare_latency(small_latency_case(kNumRanks));
  run_with_group(kNumRanks, [&](RankContext& context, Group& group) {
    const bool bad = context.rank() == kBadRank;
    const RouteArguments arguments(context, group, good);
    RouteOptions options = arguments.options();
    if (bad) options.num_sms = -1;
    const Status unrouted = group.route(arguments.input(), options, stream_of(group)).status();
    expect_refused(context, finish(group, unrouted), "route", kWrongKernels[0].words);

    const Routing routing = check_route(context, group, good);
    LatencyExchange exchange(context, group, good);
    if (!routing.present() || !exchange.dispatch()) return;
    for (const WrongKernel& wrong : kWrongKernels) {
      const KernelOptions kernel = bad ? wrong.kernel : KernelOptions();
      DispatchTensors sent(context, group, good, 0);
      sent.options.kernel = kernel;
      Status status = group.dispatch(routing, sent.in, sent.out, stream_of(group), sent.options);
      expect_refused(context, finish(group, status), "dispatch", wrong.words);
      sent.expect_untouched(context, "dispatch: ");

      CombineTensors returned(context, group, good, 0);
      returned.options.kernel = kernel;
      status = group.combine(routing, returned.in, returned.out, stream_of(group), returned.options);
      expect_refused(context, finish(group, status), "combine", wrong.words);
      returned.expect_untouched(context, "combine: ");

      LatencyDispatchTensors few_sent(context, group, good, 0);
      few_sent.options.kernel = kernel;
      expect_refused(context, call_dispatch(group, few_sent), "latency_dispatch", wrong.words);
      few_sent.expect_untouched(context, "latency_dispatch: ");

      LatencyCombineTensors few_returned(context, group, good, 0);
      few_returned.options.kernel = kernel;
      const Status unsummed = call_combine(group, exchange.routing(), few_returned);
      expect_refused(context, unsummed, "latency_combine", wrong.words);
      few_returned.expect_untouched(context, "latency_combine: ");
    }
    check_case(context, group, good);
    check_latency_case(context, group, good, Halves::kSplit);
  });
}

INSTANTIATE_TEST_SUITE_P(Backends, KernelOptionsConformance, ::testing::ValuesIn(backend_configs()), config_name);

}  // namespace
}  // namespace ferry::test
