#include "demo/demo_rank.hpp"

#include <algorithm>
#include <utility>
#include <vector>

#include "common/timing.hpp"
#include "demo/latency_rank.hpp"
#include "demo/rank_steps.hpp"
#include "device/rank_device.hpp"
#include "ferry/fp8.hpp"
#include "ferry/group.hpp"
#include "report/progress.hpp"

namespace ferry::tools {

namespace {

/// Everything that the phases of one rank share.
class DemoRank {
 public:
  DemoRank(const DemoPlan& plan, RankContext& context)
      : plan_(plan),
        context_(context),
        area_(plan, context.result()),
        progress_("demo", context.rank() == 0),
        num_tokens_(plan.num_tokens_of(context.rank())),
        hidden_(plan.shape.hidden) {}

  Status run() {
    auto device = RankDevice::open(plan_.backend, context_.rank());
    if (!device) return device.status();
    device_ = std::move(*device);
    auto group = create_group(plan_, context_, device_);
    if (!group) return group.status();
    group_ = std::move(*group);

    area_.figures().num_tokens = num_tokens_;
    area_.figures().wire_names = wire_names(*group_);
    const std::int64_t first = plan_.first_token(context_.rank());
    x_ = embed_run_tokens(plan_, first, num_tokens_);
    const std::pair<Phase, Status (DemoRank::*)()> phases[] = {{Phase::kGate, &DemoRank::gate},
                                                               {Phase::kRoute, &DemoRank::route},
                                                               {Phase::kDispatch, &DemoRank::dispatch},
                                                               {Phase::kExperts, &DemoRank::experts},
                                                               {Phase::kCombine, &DemoRank::combine}};
    for (const auto& [phase, body] : phases) {
      const WireMeter meter(*group_);
      // Ranks start each phase together, so that no phase is charged with the wait for the one before.
      if (Status status = context_.barrier(); !status) return status;
      const auto phase_idx = static_cast<std::size_t>(phase);
      progress_.step(kPhaseNames[phase_idx]);
      const std::int64_t start_ns = now_ns();
      if (Status status = (this->*body)(); !status) return status;
      area_.figures().phase_ns[phase_idx] = now_ns() - start_ns;
      area_.figures().wire[phase_idx] = meter.sent();
    }
    add_formulas(plan_, context_.rank(), choice_, &area_);
    progress_.clear();
    spoil(plan_, context_.rank(), &area_);
    return group_->destroy();
  }

 private:
  Status gate() {
    auto choice = choose_run_experts(plan_, x_, plan_.first_token(context_.rank()), num_tokens_);
    if (!choice) return choice.status();
    choice_ = std::move(*choice);
    return {};
  }

  Status route() {
    const std::int64_t num_topk = plan_.shape.num_topk();
    Status status = ids_.mirror(device_, choice_.topk_idx.data(), bytes_of<std::int64_t>(num_tokens_, num_topk));
    if (!status) return status;
    status = weights_.mirror(device_, choice_.topk_weights.data(), bytes_of<float>(num_tokens_, num_topk));
    if (!status) return status;
    RouteInput in;
    in.topk_idx = {ids_.data(), DType::kInt64, {num_tokens_, num_topk}};
    in.topk_weights = {weights_.data(), DType::kFloat32, {num_tokens_, num_topk}};
    RouteOptions options;
    options.num_experts = plan_.shape.num_experts;
    options.layout = Layout::kExperts;
    auto routing = group_->route(in, options, device_.stream());
    if (!routing) return routing.status();
    routing_ = std::move(*routing);
    add_routing(routing_, context_.rank(), &area_);
    return {};
  }

  /// Dispatch, and the wait for it where it only puts work on a stream.
  Status dispatch_and_wait(const DispatchInput& in, const DispatchOutput& out) {
    if (Status status = group_->dispatch(routing_, in, out, device_.stream()); !status) return status;
    return group_->wait(device_.stream());
  }

  Status dispatch() {
    const std::int64_t num_rows = routing_.num_recv_rows();
    Status status = recv_x_.allocate(device_, *group_, bytes_of<std::uint16_t>(num_rows, hidden_));
    if (!status) return status;
    DispatchInput in;
    DispatchOutput out;
    if (plan_.payload == PayloadType::kBfloat16) {
      MirroredBlock x;
      if (status = x.mirror(device_, x_.data(), bytes_of<std::uint16_t>(num_tokens_, hidden_)); !status) return status;
      in.x = {x.data(), DType::kBfloat16, {num_tokens_, hidden_}};
      out.x = {recv_x_.data(), DType::kBfloat16, {num_rows, hidden_}};
      if (status = dispatch_and_wait(in, out); !status) return status;
      return recv_x_.to_host(device_);
    }
    return dispatch_quantised();
  }

  /// The group moves FP8 rows and scales; quantising and its reverse are the host's.
  Status dispatch_quantised() {
    const std::int64_t num_rows = routing_.num_recv_rows();
    const std::int64_t scales_per_row = num_scales(plan_.shape);
    std::vector<std::uint8_t> quantised(bytes_of<std::uint8_t>(num_tokens_, hidden_));
    std::vector<float> scales(static_cast<std::size_t>(num_tokens_ * scales_per_row));
    Status status = quantize_fp8({x_.data(), DType::kBfloat16, {num_tokens_, hidden_}},
                                 {quantised.data(), DType::kFloat8E4M3, {num_tokens_, hidden_}},
                                 {scales.data(), DType::kFloat32, {num_tokens_, scales_per_row}});
    if (!status) return status;
    MirroredBlock sent;
    MirroredBlock sent_scales;
    MirroredBlock received;
    MirroredBlock received_scales;
    status = sent.mirror(device_, quantised.data(), quantised.size());
    if (status) status = sent_scales.mirror(device_, scales.data(), scales.size() * sizeof(float));
    if (status) status = received.allocate(device_, *group_, bytes_of<std::uint8_t>(num_rows, hidden_));
    if (status) status = received_scales.allocate(device_, *group_, bytes_of<float>(num_rows, scales_per_row));
    if (!status) return status;
    DispatchInput in;
    DispatchOutput out;
    in.x = {sent.data(), DType::kFloat8E4M3, {num_tokens_, hidden_}};
    in.scales = {sent_scales.data(), DType::kFloat32, {num_tokens_, scales_per_row}};
    out.x = {received.data(), DType::kFloat8E4M3, {num_rows, hidden_}};
    out.scales = {received_scales.data(), DType::kFloat32, {num_rows, scales_per_row}};
    status = dispatch_and_wait(in, out);
    if (status) status = received.to_host(device_);
    if (status) status = received_scales.to_host(device_);
    if (!status) return status;
    return dequantize_fp8({received.host(), DType::kFloat8E4M3, {num_rows, hidden_}},
                          {received_scales.host(), DType::kFloat32, {num_rows, scales_per_row}},
                          {recv_x_.host(), DType::kBfloat16, {num_rows, hidden_}});
  }

  Status experts() {
    Status status = y_.allocate(device_, *group_, bytes_of<std::uint16_t>(routing_.num_recv_rows(), hidden_));
    if (status) run_experts(plan_, routing_, as_bfloat16(recv_x_), as_bfloat16(y_));
    return status;
  }

  Status combine() {
    Status status = y_.to_group(device_);
    if (!status) return status;
    CombineInput in;
    in.x = {y_.data(), DType::kBfloat16, {routing_.num_recv_rows(), hidden_}};
    CombineOutput out;
    std::vector<std::uint16_t> sums(static_cast<std::size_t>(num_tokens_ * hidden_));
    MirroredBlock sums_block;
    if (status = sums_block.mirror(device_, sums.data(), sums.size() * sizeof(std::uint16_t)); !status) return status;
    out.x = {sums_block.data(), DType::kBfloat16, {num_tokens_, hidden_}};
    CombineOptions options;
    options.weighted = true;
    status = group_->combine(routing_, in, out, device_.stream(), options);
    if (status) status = group_->wait(device_.stream());
    if (status) status = sums_block.to_host(device_);
    if (status) std::copy(sums.begin(), sums.end(), area_.output().begin());
    return status;
  }

  const DemoPlan& plan_;
  RankContext& context_;
  MutableRankArea area_;
  Progress progress_;
  std::int64_t num_tokens_;
  std::int64_t hidden_;
  RankDevice device_;
  std::shared_ptr<Group> group_;
  std::vector<std::uint16_t> x_;
  Choice choice_;
  MirroredBlock ids_;
  MirroredBlock weights_;
  Routing routing_;
  MirroredBlock recv_x_;
  MirroredBlock y_;
};

}  // namespace

Status run_demo_rank(const DemoPlan& plan, RankContext& context) {
  return plan.latency() ? run_latency_demo_rank(plan, context) : DemoRank(plan, context).run();
}

Result<std::vector<std::uint16_t>> round_as_payload(const DemoPlan& plan, std::vector<std::uint16_t> x) {
  if (plan.payload == PayloadType::kBfloat16) return x;
  const std::int64_t hidden = plan.shape.hidden;
  const std::int64_t num_rows = static_cast<std::int64_t>(x.size()) / hidden;
  std::vector<std::uint8_t> quantised(x.size());
  std::vector<float> scales(static_cast<std::size_t>(num_rows * num_scales(plan.shape)));
  const TensorView view(x.data(), DType::kBfloat16, {num_rows, hidden});
  const TensorView quantised_view(quantised.data(), DType::kFloat8E4M3, {num_rows, hidden});
  const TensorView scales_view(scales.data(), DType::kFloat32, {num_rows, num_scales(plan.shape)});
  if (Status status = quantize_fp8(view, quantised_view, scales_view); !status) return status;
  if (Status status = dequantize_fp8(quantised_view, scales_view, view); !status) return status;
  return x;
}

}  // namespace ferry::tools
