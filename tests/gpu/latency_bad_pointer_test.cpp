/// Tensors of latency mode that are not in GPU memory, or whose dtype or strides are wrong. The rank's own call refuses
/// them and names the tensor and its fault, before it launches a kernel for which the others would wait. The other
/// ranks learn of it, and the group remains usable.

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <functional>
#include <string>
#include <string_view>
#include <vector>

#include "gpu/gpu_group.hpp"
#include "gpu/latency_group.hpp"

namespace ferry::test {
namespace {

constexpr int kNumRanks = 2;
constexpr int kBadRank = 1;

template <typename Tensors>
struct Mistake {
  std::string words;  ///< part of the message
  std::function<void(Tensors&)> make;
};
using DispatchMistake = Mistake<LatencyDispatchTensors>;
using CombineMistake = Mistake<LatencyCombineTensors>;

void* host_memory() {
  alignas(64) static std::byte memory[1 << 16];
  return memory;
}

/// A CPU tensor, which programs pass by mistake.
template <typename Tensors, typename Select>
Mistake<Tensors> on_host(std::string_view name, Select select) {
  return {fmt::format("{} is at {} in host memory, expected memory of GPU", name, host_memory()),
          [select](Tensors& tensors) { select(tensors).data = host_memory(); }};
}

std::vector<DispatchMistake> dispatch_mistakes() {
  using Tensors = LatencyDispatchTensors;
  return {
      on_host<Tensors>("input x", [](Tensors& t) -> ConstTensorView& { return t.in.x; }),
      on_host<Tensors>("input scales", [](Tensors& t) -> ConstTensorView& { return t.in.scales; }),
      on_host<Tensors>("topk_idx", [](Tensors& t) -> ConstTensorView& { return t.in.topk_idx; }),
      on_host<Tensors>("topk_weights", [](Tensors& t) -> ConstTensorView& { return t.in.topk_weights; }),
      on_host<Tensors>("num_tokens_view", [](Tensors& t) -> ConstTensorView& { return t.in.num_tokens_view; }),
      on_host<Tensors>("output x", [](Tensors& t) -> TensorView& { return t.out.x; }),
      on_host<Tensors>("output scales", [](Tensors& t) -> TensorView& { return t.out.scales; }),
      {fmt::format("wait_times_ns is at {} in host memory", host_memory()),
       [](Tensors& t) { t.options.wait_times_ns = TensorView(host_memory(), DType::kInt64, {kNumRanks}); }},
      {fmt::format("counters.received is at {} in host memory", host_memory()),
       [](Tensors& t) {
         t.options.counters.received =
             TensorView(host_memory(), DType::kInt64, {t.out.x.extent(0) / t.options.slab_capacity});
       }},
      {"topk_idx has dtype f32", [](Tensors& t) { t.in.topk_idx.dtype = DType::kFloat32; }},
      {"topk_weights has dtype f16", [](Tensors& t) { t.in.topk_weights.dtype = DType::kFloat16; }},
      {"wait_times_ns has dtype i32",
       [](Tensors& t) { t.options.wait_times_ns = TensorView(t.out.x.data, DType::kInt32, {kNumRanks}); }},
      {"input x has stride 2 in its last dimension", [](Tensors& t) { t.in.x.strides[1] = 2; }},
      {"topk_idx has stride 3 in dimension 0, expected 2", [](Tensors& t) { t.in.topk_idx.strides[0] = 3; }},
      {"wait_times_ns has stride 2 in dimension 0, expected 1",
       [](Tensors& t) { t.options.wait_times_ns = TensorView(t.out.x.data, DType::kInt64, {kNumRanks}, {2}); }},
      {"input x is at address", [](Tensors& t) { t.in.x.data = static_cast<const std::byte*>(t.in.x.data) + 2; }},
      {"output x is at address", [](Tensors& t) { t.out.x.data = static_cast<std::byte*>(t.out.x.data) + 2; }},
      {"topk_idx is at address",
       [](Tensors& t) { t.in.topk_idx.data = static_cast<const std::byte*>(t.in.topk_idx.data) + 4; }},
  };
}

std::vector<CombineMistake> combine_mistakes() {
  using Tensors = LatencyCombineTensors;
  return {
      on_host<Tensors>("input x", [](Tensors& t) -> ConstTensorView& { return t.in.x; }),
      on_host<Tensors>("input topk_weights", [](Tensors& t) -> ConstTensorView& { return t.in.topk_weights; }),
      on_host<Tensors>("output x", [](Tensors& t) -> TensorView& { return t.out.x; }),
      {fmt::format("wait_times_ns is at {} in host memory", host_memory()),
       [](Tensors& t) { t.options.wait_times_ns = TensorView(host_memory(), DType::kInt64, {kNumRanks}); }},
      {"input x has dtype f16", [](Tensors& t) { t.in.x.dtype = DType::kFloat16; }},
      {"output x is [4, 16] f32 but input x is [6, 16] bf16", [](Tensors& t) { t.out.x.dtype = DType::kFloat32; }},
      {"topk_weights has stride 3 in dimension 0, expected 2", [](Tensors& t) { t.in.topk_weights.strides[0] = 3; }},
      {"input x is at address", [](Tensors& t) { t.in.x.data = static_cast<const std::byte*>(t.in.x.data) + 2; }},
      {"output x has stride 2 in its last dimension", [](Tensors& t) { t.out.x.strides[1] = 2; }},
  };
}

/// A case with separate ids and weights for each combine, scales, and a count in memory.
PreparedCase good_case() {
  ExchangeCase one;
  one.name = "good case";
  one.world = {.num_ranks = kNumRanks, .num_topk = 2, .num_experts = 6, .max_tokens = 4, .layout = Layout::kSlab};
  one.world.idle_tail = true;
  one.dispatches = {{.dtype = DType::kBfloat16, .hidden = 16, .num_scales = 3}};
  one.combines = {{.hidden = 16, .weighted = true, .own_weights = true}};
  return prepare(one);
}

class LatencyBadPointer : public testing::TestWithParam<bool> {
 protected:
  /// The bad rank gets the error from the call, the other when it waits.
  static void expect_refusal(RankContext& context, Group& group, const Status& sent, const Routing* received,
                             const std::string& words) {
    const bool bad = context.rank() == kBadRank;
    const auto where = [&words](const Status& status) {
      return fmt::format("expected \"{}\" in \"{}\"", words, status.to_string());
    };
    if (bad) {
      context.expect_code(sent, ErrorCode::kInvalidArgument, words);
      context.expect(sent.to_string().find(words) != std::string::npos, "at once: " + where(sent));
    }
    Status told = sent;
    if (!bad && received != nullptr && sent.ok()) told = group.latency_receive(*received, stream_of(group));
    told = finish(group, told);
    context.expect_code(told, ErrorCode::kInvalidArgument, words);
    context.expect(told.to_string().find(words) != std::string::npos, where(told));
  }
};

TEST_P(LatencyBadPointer, IsRefusedAndTheGroupGoesOn) {
  const bool split = GetParam();
  const std::vector<PreparedCase> cases = {good_case()};
  run_latency_group({.num_ranks = kNumRanks}, cases, [&](RankContext& context, Group& group) {
    const bool bad = context.rank() == kBadRank;
    const Stream stream = stream_of(group);
    for (const DispatchMistake& mistake : dispatch_mistakes()) {
      LatencyDispatchTensors tensors(context, group, cases.front(), 0);
      tensors.options.split = split;
      if (bad) mistake.make(tensors);
      const Result<Routing> sent = group.latency_dispatch(tensors.in, tensors.out, tensors.options, stream);
      expect_refusal(context, group, sent.status(), sent.ok() && split ? &*sent : nullptr, mistake.words);
      tensors.expect_untouched(context, mistake.words + ": ");
    }
    LatencyExchange exchange(context, group, cases.front());
    if (!exchange.dispatch()) return;
    for (const CombineMistake& mistake : combine_mistakes()) {
      LatencyCombineTensors tensors(context, group, cases.front(), 0);
      tensors.options.split = split;
      if (bad) mistake.make(tensors);
      const Status sent = group.latency_combine(exchange.routing(), tensors.in, tensors.out, stream, tensors.options);
      expect_refusal(context, group, sent, split ? &exchange.routing() : nullptr, mistake.words);
      tensors.expect_untouched(context, mistake.words + ": ");
    }
    exchange.combine(0);
    check_latency_case(context, group, cases.front(), Halves::kSplit);
  });
}

INSTANTIATE_TEST_SUITE_P(Halves, LatencyBadPointer, testing::Bool(),
                         [](const auto& test) { return test.param ? "apart" : "together"; });

}  // namespace
}  // namespace ferry::test
