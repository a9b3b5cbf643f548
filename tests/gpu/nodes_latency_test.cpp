/// Latency mode of GPU ranks on several nodes: what travels between them, and the memory for it.

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <functional>
#include <set>
#include <vector>

#include "ferry/launches.hpp"
#include "gpu/gpu_group.hpp"
#include "plan/to_size.hpp"
#include "support/latency_check.hpp"

namespace ferry::test {
namespace {

constexpr int kTwoRanks = 2;
constexpr std::int64_t kSentChannels = 1024;

/// Tokens with many experts on each of two ranks, combined in both orders. `own_weights`, `dtype`: of the combines.
PreparedCase case_of_two_nodes(bool own_weights, DType dtype = DType::kBfloat16) {
  ExchangeCase spec;
  spec.name = "two nodes";
  spec.world = {.num_ranks = kTwoRanks, .ranks_per_node = 1, .num_topk = 6, .num_experts = 8, .max_tokens = 7};
  spec.world.layout = Layout::kSlab;
  spec.dispatches = {{.hidden = kSentChannels}};
  for (const CombineOrder order : {CombineOrder::kExact, CombineOrder::kRankSums}) {
    spec.combines.push_back(
        {.dtype = dtype, .hidden = kSentChannels, .weighted = true, .order = order, .own_weights = own_weights});
  }
  return prepare(spec);
}

/// Rows that `rank` returns to the other rank: one for each distinct expert of a token, or one for each token.
std::int64_t num_rows_back(const PreparedCase& prepared, int rank, CombineOrder order) {
  const oracle::RankTokens& tokens = prepared.world.ranks[to_size(1 - rank)];
  const std::int64_t experts_per_rank = prepared.world.options.num_experts / kTwoRanks;
  std::int64_t num_rows = 0;
  for (std::int64_t token = 0; token < tokens.num_tokens; ++token) {
    std::set<std::int64_t> experts;
    for (int k = 0; k < prepared.world.num_topk; ++k) {
      const std::int64_t expert = tokens.topk_idx[to_size(token * prepared.world.num_topk + k)];
      if (expert >= 0 && expert / experts_per_rank == rank) experts.insert(expert);
    }
    const auto num_experts = static_cast<std::int64_t>(experts.size());
    num_rows += order == CombineOrder::kExact ? num_experts : std::min<std::int64_t>(num_experts, 1);
  }
  return num_rows;
}

void run_on_two_nodes(std::size_t latency_bytes, const std::function<void(RankContext&, Group&)>& body) {
  run_gpu_ranks({RankKind::kThreads, kTwoRanks}, [&](RankContext& context) {
    GroupOptions options = gpu_group_options();
    options.ranks_per_node = 1;
    options.transport = "loopback";
    options.latency_bytes = latency_bytes;
    auto group = Group::create(context.bootstrap(), options);
    if (!context.expect_ok(group.status(), "Group::create")) return;
    body(context, **group);
    context.expect_ok((*group)->destroy(), "destroy");
  });
}

std::int64_t sent_bytes(const Group& group) {
  std::int64_t sent = 0;
  for (const RailUsage& rail : group.network_usage().rails) sent += static_cast<std::int64_t>(rail.sent_bytes);
  return sent;
}

TEST(NodesLatency, ASumTravelsOnceForEachTokenAndRank) {
  for (const bool own_weights : {false, true}) {
    const PreparedCase prepared = case_of_two_nodes(own_weights);
    run_on_two_nodes(latency_bytes_of("cuda", {prepared}), [&](RankContext& context, Group& group) {
      LatencyExchange exchange(context, group, prepared);
      if (!exchange.dispatch()) return;
      std::int64_t before = sent_bytes(group);
      std::vector<std::int64_t> spent;
      for (std::size_t i = 0; i < prepared.spec.combines.size(); ++i) {
        if (!exchange.combine(i)) return;
        spent.push_back(sent_bytes(group) - before);
        before += spent.back();
      }
      const std::int64_t exact = num_rows_back(prepared, context.rank(), CombineOrder::kExact);
      const std::int64_t sums = num_rows_back(prepared, context.rank(), CombineOrder::kRankSums);
      context.expect(exact > sums, "tokens have several experts on a rank");
      // Weights have a message of their own, three in each word of 16 bytes.
      const std::int64_t weights_bytes = own_weights ? prepared.num_tokens(context.rank()) * 6 / 3 * 16 : 0;
      context.expect(spent[0] - spent[1] == (exact - sums) * kSentChannels * 2 - weights_bytes,
                     fmt::format("{} and {} bytes for {} and {} rows", spent[0], spent[1], exact, sums));
    });
  }
}

TEST(NodesLatency, SumsNeedNoMoreMemoryThanOnOneNode) {
  ExchangeCase spec = case_of_two_nodes(true).spec;
  spec.combines.erase(spec.combines.begin());
  const PreparedCase sums = prepare(spec);
  LatencyShape shape{.backend = "cuda",
                     .num_ranks = kTwoRanks,
                     .max_tokens = latency_max_tokens(sums),
                     .num_topk = spec.world.num_topk,
                     .dispatch_row_bytes = kSentChannels * 2,
                     .combine_row_bytes = kSentChannels * 2,
                     .order = CombineOrder::kRankSums};
  const std::size_t latency_bytes = latency_bytes_required(shape).value();
  shape.order = CombineOrder::kExact;
  ASSERT_LT(latency_bytes, latency_bytes_required(shape).value());
  run_on_two_nodes(latency_bytes, [&](RankContext& context, Group& group) {
    check_latency_case(context, group, sums, Halves::kTogether);
    check_latency_case(context, group, sums, Halves::kSplit);
  });
}

/// All that is held is what bytes_required says for rows of `row_bytes`.
void expect_required(RankContext& context, const Group& group, const PreparedCase& prepared, std::int64_t row_bytes) {
  MemoryShape shape;
  shape.backend = "cuda";
  shape.num_ranks = kTwoRanks;
  shape.ranks_per_node = 1;
  shape.num_experts = prepared.world.options.num_experts;
  shape.num_tokens = prepared.num_tokens(context.rank());
  shape.num_topk = prepared.world.num_topk;
  shape.num_recv_rows = prepared.routings[to_size(context.rank())].num_recv_rows;
  shape.row_bytes = row_bytes;
  shape.layout = Layout::kSlab;
  shape.weights = true;
  shape.max_tokens = latency_max_tokens(prepared);
  shape.latency_bytes = latency_bytes_of("cuda", {prepared});
  shape.symmetric = false;
  const Result<std::size_t> required = bytes_required(shape);
  if (!context.expect_ok(required.status(), "bytes_required")) return;
  const MemoryUsage usage = group.memory_usage();
  context.expect(usage.total_bytes() - usage.allocated_bytes == *required,
                 fmt::format("{} control, {} network, {} staging bytes are held, {} required", usage.control_bytes,
                             usage.network_bytes, usage.staging_bytes, *required));
}

TEST(NodesLatency, CombinesTakeNoMemory) {
  const PreparedCase prepared = case_of_two_nodes(true);
  run_on_two_nodes(latency_bytes_of("cuda", {prepared}), [&](RankContext& context, Group& group) {
    LatencyExchange exchange(context, group, prepared);
    if (!exchange.dispatch()) return;
    const std::size_t dispatched = group.memory_usage().network_bytes;
    for (std::size_t i = 0; i < prepared.spec.combines.size(); ++i) {
      if (!exchange.combine(i)) return;
      context.expect(group.memory_usage().network_bytes == dispatched, "a combine takes memory");
    }
    expect_required(context, group, prepared, kSentChannels * 2);
  });
}

TEST(NodesLatency, CombinesOfLongerRowsTakeMemoryInPlaceOfThatOfTheDispatch) {
  const PreparedCase prepared = case_of_two_nodes(true, DType::kFloat32);
  run_on_two_nodes(latency_bytes_of("cuda", {prepared}), [&](RankContext& context, Group& group) {
    check_latency_case(context, group, prepared, Halves::kSplit);
    LatencyExchange exchange(context, group, prepared);
    if (!exchange.dispatch() || !exchange.combine(0) || !exchange.combine(1)) return;
    expect_required(context, group, prepared, kSentChannels * 4);
  });
}

/// Launches of a rank's thread.
thread_local int launches_of_thread = 0;

TEST(NodesLatency, EachHalfOfACallIsOneKernel) {
  const PreparedCase prepared = case_of_two_nodes(true);
  observe_launches([](const KernelLaunch& /*launch*/) { ++launches_of_thread; });
  run_on_two_nodes(latency_bytes_of("cuda", {prepared}), [&](RankContext& context, Group& group) {
    LatencyExchange exchange(context, group, prepared);
    const auto num_launches = [](const auto& call) {
      const int before = launches_of_thread;
      return call() ? launches_of_thread - before : 0;
    };
    context.expect(num_launches([&] { return exchange.send_dispatch(); }) == 1, "kernels that send a dispatch");
    context.expect(num_launches([&] { return exchange.receive(); }) == 1, "kernels that receive a dispatch");
    for (std::size_t i = 0; i < prepared.spec.combines.size(); ++i) {
      context.expect(num_launches([&] { return exchange.send_combine(i); }) == 1, "kernels that send a combine");
      context.expect(num_launches([&] { return exchange.receive(); }) == 1, "kernels that receive a combine");
    }
  });
  observe_launches(nullptr);
}

/// The first rank of one node refuses a combine, for whose weights the other node waits.
TEST(NodesLatency, ARankThatRefusesACombineKeepsNoRankWaitingForItsWeights) {
  const PreparedCase prepared = case_of_two_nodes(true);
  run_on_two_nodes(latency_bytes_of("cuda", {prepared}), [&](RankContext& context, Group& group) {
    LatencyExchange exchange(context, group, prepared);
    if (!exchange.dispatch()) return;
    for (int repeat = 0; repeat < 4; ++repeat) {  // more than there are sets
      LatencyCombineTensors tensors(context, group, prepared, 1);
      if (context.rank() == 0) tensors.out.x.dtype = DType::kFloat32;
      const Status refused =
          group.latency_combine(exchange.routing(), tensors.in, tensors.out, stream_of(group), tensors.options);
      const Status seen = refused.ok() ? group.wait(stream_of(group)) : refused;
      context.expect(seen.code() == ErrorCode::kInvalidArgument, seen.message());
      if (!refused.ok()) context.expect_ok(group.wait(stream_of(group)), "after a refusal");
      if (!exchange.combine(1)) return;
    }
  });
}

}  // namespace
}  // namespace ferry::test
