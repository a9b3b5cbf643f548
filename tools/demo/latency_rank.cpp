#include "demo/latency_rank.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <functional>
#include <memory>
#include <utility>
#include <vector>

#include "common/timing.hpp"
#include "demo/rank_steps.hpp"
#include "ferry/fp8.hpp"
#include "report/progress.hpp"

namespace ferry::tools {

namespace {

/// Tokens of a step and their state. Its memory is read until the step is over.
struct Step {
  std::int64_t first = 0;  ///< first of this rank's tokens
  std::int64_t num_tokens = 0;
  Choice choice;
  MirroredBlock x;
  MirroredBlock ids;
  MirroredBlock weights;
  std::vector<std::uint16_t> sums;
  MirroredBlock sums_block;
  Routing routing;
};

class LatencyDemoRank {
 public:
  LatencyDemoRank(const DemoPlan& plan, RankContext& context)
      : plan_(plan),
        context_(context),
        area_(plan, context.result()),
        progress_("demo", context.rank() == 0),
        hidden_(plan.shape.hidden),
        capacity_(plan.num_ranks * plan.max_tokens_per_step()) {}

  Status run() {
    auto device = RankDevice::open(plan_.backend, context_.rank());
    if (!device) return device.status();
    device_ = std::move(*device);
    auto group = create_group(plan_, context_, device_);
    if (!group) return group.status();
    group_ = std::move(*group);
    const std::int64_t num_tokens = plan_.num_tokens_of(context_.rank());
    area_.figures().num_tokens = num_tokens;
    area_.figures().wire_names = wire_names(*group_);
    x_ = embed_run_tokens(plan_, plan_.first_token(context_.rank()), num_tokens);
    if (Status status = allocate_slab(); !status) return status;

    auto next = std::make_unique<Step>();
    if (Status status = lined_up(Phase::kGate, [&] { return choose(0, next.get()); }); !status) return status;
    for (int step_idx = 0; step_idx < plan_.num_steps; ++step_idx) {
      progress_.step(fmt::format("step {} of {}", step_idx + 1, plan_.num_steps));
      const std::unique_ptr<Step> step = std::exchange(next, std::make_unique<Step>());
      if (Status status = run_step(step_idx, *step, next.get()); !status) return status;
    }
    progress_.clear();
    keep_waits(*group_, &area_);
    spoil(plan_, context_.rank(), &area_);
    return group_->destroy();
  }

 private:
  /// Ranks start together, so that no phase includes the wait for the previous one.
  Status lined_up(Phase phase, const std::function<Status()>& body) {
    Status status = context_.barrier();
    return status ? timed(phase, body) : status;
  }

  /// Between the halves of a call only the call may wait for other ranks: a rank whose arguments are refused waits in
  /// its send half for the others' receive halves, to notify them.
  Status timed(Phase phase, const std::function<Status()>& body) {
    const WireMeter meter(*group_);
    const std::int64_t start_ns = now_ns();
    if (Status status = body(); !status) return status;
    const auto phase_idx = static_cast<std::size_t>(phase);
    area_.figures().phase_ns[phase_idx] += now_ns() - start_ns;
    const WireFigures sent = meter.sent();
    WireFigures& all = area_.figures().wire[phase_idx];
    all.sent_bytes += sent.sent_bytes;
    all.max_rail_bytes += sent.max_rail_bytes;
    all.num_messages += sent.num_messages;
    return {};
  }

  Status run_step(int step_idx, Step& step, Step* next) {
    Status status = lined_up(Phase::kDispatch, [&] { return send_dispatch(step); });
    if (status && step_idx + 1 < plan_.num_steps) {
      status = timed(Phase::kGate, [&] { return choose(step_idx + 1, next); });
    }
    if (status) status = timed(Phase::kDispatch, [&] { return receive_rows(step); });
    if (status) status = lined_up(Phase::kExperts, [&] { return experts(step); });
    if (status) status = lined_up(Phase::kCombine, [&] { return send_combine(step); });
    if (!status) return status;
    add_routing(step.routing, context_.rank(), nullptr, &area_);
    add_formulas(plan_, count_wire_rows(plan_, context_.rank(), step.choice.topk_idx, plan_.shape.num_experts), &area_);
    return timed(Phase::kCombine, [&] { return receive_sums(step); });
  }

  std::int64_t num_rows() const { return num_local_experts_ * capacity_; }

  /// Allocates slabs for all steps. R * M rows for each expert are always enough.
  Status allocate_slab() {
    for (std::int64_t expert = 0; expert < plan_.shape.num_experts; ++expert) {
      if (owner_of(expert, plan_.shape.num_experts, plan_.num_ranks) == context_.rank()) ++num_local_experts_;
    }
    Status status = rows_.allocate(device_, *group_, bytes_of<std::uint16_t>(num_rows(), hidden_));
    if (status) status = y_.allocate(device_, *group_, bytes_of<std::uint16_t>(num_rows(), hidden_));
    if (!status || plan_.payload == PayloadType::kBfloat16) return status;
    status = quantised_.allocate(device_, *group_, bytes_of<std::uint8_t>(num_rows(), hidden_));
    return status ? scales_.allocate(device_, *group_, bytes_of<float>(num_rows(), num_scales(plan_.shape))) : status;
  }

  /// Takes the tokens of a step and computes the router's choice.
  Status choose(int step_idx, Step* step) const {
    const int rank = context_.rank();
    step->first = plan_.first_of_step(rank, step_idx);
    step->num_tokens = plan_.first_of_step(rank, step_idx + 1) - step->first;
    const std::span<const std::uint16_t> x = std::span(x_).subspan(
        static_cast<std::size_t>(step->first * hidden_), static_cast<std::size_t>(step->num_tokens * hidden_));
    auto choice = choose_run_experts(plan_, x, plan_.first_token(rank) + step->first, step->num_tokens);
    if (!choice) return choice.status();
    step->choice = std::move(*choice);
    return {};
  }

  Status send_dispatch(Step& step) {
    const std::int64_t num_topk = plan_.shape.num_topk();
    std::uint16_t* const x = x_.data() + step.first * hidden_;
    Status status = step.x.mirror(device_, x, bytes_of<std::uint16_t>(step.num_tokens, hidden_));
    if (status) {
      status = step.ids.mirror(device_, step.choice.topk_idx.data(), bytes_of<std::int64_t>(step.num_tokens, num_topk));
    }
    if (status) {
      status =
          step.weights.mirror(device_, step.choice.topk_weights.data(), bytes_of<float>(step.num_tokens, num_topk));
    }
    if (!status) return status;
    LatencyDispatchInput in;
    LatencyDispatchOutput out;
    in.x = {step.x.data(), DType::kBfloat16, {step.num_tokens, hidden_}};
    in.topk_idx = {step.ids.data(), DType::kInt64, {step.num_tokens, num_topk}};
    in.topk_weights = {step.weights.data(), DType::kFloat32, {step.num_tokens, num_topk}};
    LatencyDispatchOptions options;
    options.num_experts = plan_.shape.num_experts;
    options.max_tokens = std::max<std::int64_t>(plan_.max_tokens_per_step(), 1);
    options.slab_capacity = capacity_;
    options.split = true;
    if (plan_.payload == PayloadType::kFp8) {
      options.quantize = Quantization::kFp8;
      out.x = {quantised_.data(), DType::kFloat8E4M3, {num_local_experts_, capacity_, hidden_}};
      out.scales = {scales_.data(), DType::kFloat32, {num_local_experts_, capacity_, num_scales(plan_.shape)}};
    } else {
      out.x = {rows_.data(), DType::kBfloat16, {num_local_experts_, capacity_, hidden_}};
    }
    auto routing = group_->latency_dispatch(in, out, options, device_.stream());
    if (!routing) return routing.status();
    step.routing = std::move(*routing);
    return {};
  }

  Status receive_rows(const Step& step) {
    Status status = group_->latency_receive(step.routing, device_.stream());
    if (status) status = group_->wait(device_.stream());
    if (!status) return status;
    if (plan_.payload == PayloadType::kBfloat16) return rows_.to_host(device_);
    status = quantised_.to_host(device_);
    if (status) status = scales_.to_host(device_);
    return status ? dequantise(step.routing) : status;
  }

  /// Dequantises the rows that hold tokens, for the experts on the host.
  Status dequantise(const Routing& routing) {
    const auto counts = routing.num_rows_per_local_expert();
    for (std::size_t local = 0; local < counts.size(); ++local) {
      const std::int64_t first = static_cast<std::int64_t>(local) * capacity_;
      const std::int64_t count = counts[local];
      const std::int64_t scales_per_row = num_scales(plan_.shape);
      Status status = dequantize_fp8(
          {quantised_.host() + first * hidden_, DType::kFloat8E4M3, {count, hidden_}},
          {scales_.host() + bytes_of<float>(first, scales_per_row), DType::kFloat32, {count, scales_per_row}},
          {rows_.host() + bytes_of<std::uint16_t>(first, hidden_), DType::kBfloat16, {count, hidden_}});
      if (!status) return status;
    }
    return {};
  }

  Status experts(const Step& step) {
    Status status = run_experts(plan_, step.routing, nullptr, as_bfloat16(rows_), as_bfloat16(y_));
    return status ? y_.to_group(device_) : status;
  }

  Status send_combine(Step& step) {
    step.sums.resize(static_cast<std::size_t>(step.num_tokens * hidden_));
    Status status = step.sums_block.mirror(device_, step.sums.data(), step.sums.size() * sizeof(std::uint16_t));
    if (!status) return status;
    LatencyCombineInput in;
    LatencyCombineOutput out;
    in.x = {y_.data(), DType::kBfloat16, {num_local_experts_, capacity_, hidden_}};
    out.x = {step.sums_block.data(), DType::kBfloat16, {step.num_tokens, hidden_}};
    LatencyCombineOptions options;
    options.split = true;
    return group_->latency_combine(step.routing, in, out, device_.stream(), options);
  }

  Status receive_sums(const Step& step) {
    Status status = group_->latency_receive(step.routing, device_.stream());
    if (status) status = group_->wait(device_.stream());
    if (status) status = step.sums_block.to_host(device_);
    if (status) std::copy(step.sums.begin(), step.sums.end(), area_.output().begin() + step.first * hidden_);
    return status;
  }

  const DemoPlan& plan_;
  RankContext& context_;
  MutableRankArea area_;
  Progress progress_;
  std::int64_t hidden_;
  std::int64_t capacity_;               ///< C
  std::int64_t num_local_experts_ = 0;  ///< L
  RankDevice device_;
  std::shared_ptr<Group> group_;
  std::vector<std::uint16_t> x_;  ///< all tokens of this rank
  MirroredBlock rows_;            ///< [L, C, H] bf16, input of the experts
  MirroredBlock y_;               ///< [L, C, H] bf16
  MirroredBlock quantised_;       ///< fp8: [L, C, H] as received
  MirroredBlock scales_;          ///< fp8: [L, C, S]
};

}  // namespace

Status run_latency_demo_rank(const DemoPlan& plan, RankContext& context) {
  return LatencyDemoRank(plan, context).run();
}

}  // namespace ferry::tools
