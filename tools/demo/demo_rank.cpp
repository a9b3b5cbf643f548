#include "demo/demo_rank.hpp"

#include <algorithm>
#include <cstring>
#include <optional>
#include <span>
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

/// State that the phases of one rank share.
class DemoRank {
 public:
  DemoRank(const DemoPlan& plan, RankContext& context)
      : plan_(plan),
        context_(context),
        area_(plan, context.result()),
        progress_("demo", context.rank() == 0),
        hidden_(plan.shape.hidden) {
    if (plan.balances()) homes_.emplace(plan, context.rank());
  }

  Status run() {
    auto device = RankDevice::open(plan_.backend, context_.rank());
    if (!device) return device.status();
    device_ = std::move(*device);
    auto group = create_group(plan_, context_, device_);
    if (!group) return group.status();
    group_ = std::move(*group);

    area_.figures().num_tokens = plan_.num_tokens_of(context_.rank());
    area_.figures().wire_names = wire_names(*group_);
    for (int step = 0; step < plan_.num_steps; ++step) {
      if (step > 0) {
        if (Status status = move_experts(); !status) return status;
      }
      if (Status status = run_step(step); !status) return status;
    }
    progress_.clear();
    keep_waits(*group_, &area_);
    spoil(plan_, context_.rank(), &area_);
    return group_->destroy();
  }

 private:
  /// Runs one layer over the tokens of a step.
  Status run_step(int step) {
    first_ = plan_.first_of_step(context_.rank(), step);
    num_tokens_ = plan_.first_of_step(context_.rank(), step + 1) - first_;
    x_ = embed_run_tokens(plan_, plan_.first_token(context_.rank()) + first_, num_tokens_);
    const RankFigures before = area_.figures();
    const std::pair<Phase, Status (DemoRank::*)()> phases[] = {{Phase::kGate, &DemoRank::gate},
                                                               {Phase::kRoute, &DemoRank::route},
                                                               {Phase::kDispatch, &DemoRank::dispatch},
                                                               {Phase::kExperts, &DemoRank::experts},
                                                               {Phase::kCombine, &DemoRank::combine}};
    for (const auto& [phase, body] : phases) {
      const WireMeter meter(*group_);
      // Ranks start each phase together, so that no phase includes the wait for the previous one.
      if (Status status = context_.barrier(); !status) return status;
      const auto phase_idx = static_cast<std::size_t>(phase);
      progress_.step(kPhaseNames[phase_idx]);
      const std::int64_t start_ns = now_ns();
      if (Status status = (this->*body)(); !status) return status;
      area_.figures().phase_ns[phase_idx] += now_ns() - start_ns;
      area_.figures().wire[phase_idx] += meter.sent();
    }
    if (homes_) return note_half(before, &area_.figures().halves[static_cast<std::size_t>(step)]);
    add_formulas(plan_, count_wire_rows(plan_, context_.rank(), choice_.topk_idx, plan_.shape.num_experts), &area_);
    return {};
  }

  /// Records the contribution of this half of the tokens.
  Status note_half(const RankFigures& before, HalfFigures* half) {
    auto places = homes_->places_of(choice_.topk_idx, homes_->placement());
    if (!places) return places.status();
    auto first_places = homes_->places_of(choice_.topk_idx, homes_->first_placement());
    if (!first_places) return first_places.status();
    const std::int64_t num_wire_rows = count_wire_rows(plan_, context_.rank(), *places, plan_.num_places);
    add_formulas(plan_, num_wire_rows, &area_);
    const RankFigures& now = area_.figures();
    half->num_received_rows = now.num_received_rows - before.num_received_rows;
    for (const Phase phase : {Phase::kDispatch, Phase::kCombine}) {
      const auto idx = static_cast<std::size_t>(phase);
      half->wire_bytes += now.wire[idx].sent_bytes - before.wire[idx].sent_bytes;
    }
    const std::int64_t row_bytes = plan_.dispatch_wire_row_bytes() + plan_.combine_wire_row_bytes();
    half->formula_bytes = num_wire_rows * row_bytes;
    half->stayed_formula_bytes = count_wire_rows(plan_, context_.rank(), *first_places, plan_.num_places) * row_bytes;
    return {};
  }

  /// Moves experts according to the load of all ranks' tokens so far.
  Status move_experts() {
    progress_.step("moving experts");
    std::vector<std::int64_t> load(static_cast<std::size_t>(plan_.shape.num_experts), 0);
    for (const std::int64_t expert : choice_.topk_idx) {
      if (expert >= 0) ++load[static_cast<std::size_t>(expert)];
    }
    auto loads = context_.bootstrap()->all_gather(std::as_bytes(std::span(load)), plan_.timeout_ns);
    if (!loads) return loads.status();
    std::fill(load.begin(), load.end(), 0);
    for (const std::vector<std::byte>& bytes : *loads) {
      std::vector<std::int64_t> of_rank(load.size());
      if (bytes.size() != load.size() * sizeof(std::int64_t)) {
        return {ErrorCode::kInternal,
                "a rank sent the loads of a different number of experts; start every rank with the same arguments"};
      }
      std::memcpy(of_rank.data(), bytes.data(), bytes.size());
      for (std::size_t expert = 0; expert < load.size(); ++expert) load[expert] += of_rank[expert];
    }
    Status status = homes_->move(load, *group_, device_, &area_.figures().moves);
    const std::vector<std::int32_t>& placement = homes_->placement().physical_to_logical;
    if (status) std::copy(placement.begin(), placement.end(), area_.placement().begin());
    return status;
  }

  Status gate() {
    auto choice = choose_run_experts(plan_, x_, plan_.first_token(context_.rank()) + first_, num_tokens_);
    if (!choice) return choice.status();
    choice_ = std::move(*choice);
    return {};
  }

  const ExpertHomes* homes() const { return homes_ ? &*homes_ : nullptr; }

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
    if (homes_) options.placement = homes_->placement();
    options.layout = Layout::kExperts;
    auto routing = group_->route(in, options, device_.stream());
    if (!routing) return routing.status();
    routing_ = std::move(*routing);
    add_routing(routing_, context_.rank(), homes(), &area_);
    return {};
  }

  /// Dispatches and waits, because dispatch may only put work on a stream.
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

  /// The group moves FP8 rows and scales; the host quantises and dequantises.
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
    if (status) status = run_experts(plan_, routing_, homes(), as_bfloat16(recv_x_), as_bfloat16(y_));
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
    if (status) std::copy(sums.begin(), sums.end(), area_.output().begin() + first_ * hidden_);
    return status;
  }

  const DemoPlan& plan_;
  RankContext& context_;
  MutableRankArea area_;
  Progress progress_;
  std::int64_t first_ = 0;  ///< first token of the step, among this rank's tokens
  std::int64_t num_tokens_ = 0;
  std::int64_t hidden_;
  RankDevice device_;
  std::shared_ptr<Group> group_;
  std::vector<std::uint16_t> x_;
  Choice choice_;
  std::optional<ExpertHomes> homes_;  ///< if experts move
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
