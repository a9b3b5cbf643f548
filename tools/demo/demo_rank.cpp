#include "demo/demo_rank.hpp"

#include <algorithm>
#include <numeric>
#include <utility>
#include <vector>

#include "common/bfloat16.hpp"
#include "common/timing.hpp"
#include "device/rank_device.hpp"
#include "ferry/fp8.hpp"
#include "ferry/group.hpp"
#include "report/progress.hpp"

namespace ferry::tools {

namespace {

std::int64_t num_scales(const LayerShape& shape) { return (shape.hidden + kFp8BlockSize - 1) / kFp8BlockSize; }

template <typename T>
std::size_t bytes_of(std::int64_t rows, std::int64_t columns) {
  return static_cast<std::size_t>(rows * columns) * sizeof(T);
}

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
    GroupOptions options;
    options.backend = plan_.backend;
    options.timeout_ns = plan_.timeout_ns;
    options.arena_bytes = plan_.arena_bytes;
    options.device = device_.ordinal();
    options.ranks_per_node = plan_.ranks_per_node();
    options.transport = plan_.transport;
    options.net_devices = plan_.net_devices;
    auto group = Group::create(context_.bootstrap(), options);
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
    note_formulas();
    progress_.clear();
    spoil();
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
    record_routing();
    return {};
  }

  /// What dispatch and combine have to send between nodes, by the ids alone.
  void note_formulas() {
    const std::int64_t num_rows = count_rows_to_other_nodes(
        choice_.topk_idx, {plan_.num_ranks, plan_.ranks_per_node(), plan_.shape.num_experts, plan_.shape.num_topk()},
        context_.rank());
    auto& wire = area_.figures().wire;
    wire[static_cast<std::size_t>(Phase::kDispatch)].formula_bytes = num_rows * plan_.dispatch_wire_row_bytes();
    wire[static_cast<std::size_t>(Phase::kCombine)].formula_bytes = num_rows * plan_.combine_wire_row_bytes();
  }

  void record_routing() {
    const auto rank = static_cast<std::size_t>(context_.rank());
    const auto sent = routing_.num_rows_to_rank();
    const auto received = routing_.num_rows_from_rank();
    RankFigures& figures = area_.figures();
    figures.num_sent_rows = std::accumulate(sent.begin(), sent.end(), std::int64_t{0});
    figures.num_received_rows = std::accumulate(received.begin(), received.end(), std::int64_t{0});
    figures.num_own_rows = sent[rank];
    std::copy(sent.begin(), sent.end(), area_.rows_to_rank().begin());
    figures.num_experts = routing_.num_local_experts();
    const auto expert_ids = routing_.local_expert_ids();
    const auto counts = routing_.num_rows_per_local_expert();
    for (std::size_t i = 0; i < expert_ids.size(); ++i) {
      area_.expert_rows()[static_cast<std::size_t>(expert_ids[i])] = counts[i];
    }
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
    const auto hidden = static_cast<std::size_t>(hidden_);
    Status status = y_.allocate(device_, *group_, bytes_of<std::uint16_t>(routing_.num_recv_rows(), hidden_));
    if (!status) return status;
    const auto* x = reinterpret_cast<const std::uint16_t*>(recv_x_.host());
    auto* y = reinterpret_cast<std::uint16_t*>(y_.host());
    std::vector<float> x_rows(Expert::kChunkRows * hidden);
    std::vector<float> y_rows(Expert::kChunkRows * hidden);
    const auto ids = routing_.local_expert_ids();
    const auto counts = routing_.num_rows_per_local_expert();
    const auto offsets = routing_.expert_row_offsets();
    Expert expert(plan_.shape);
    for (std::size_t i = 0; i < ids.size(); ++i) {
      if (counts[i] == 0) continue;
      expert.load(LayerSeeds(plan_.seed).experts, ids[i]);
      const auto end = static_cast<std::size_t>(offsets[i] + counts[i]);
      for (auto first = static_cast<std::size_t>(offsets[i]); first < end; first += Expert::kChunkRows) {
        const std::size_t num_rows = std::min(Expert::kChunkRows, end - first);
        std::transform(x + first * hidden, x + (first + num_rows) * hidden, x_rows.begin(), float_from_bfloat16);
        expert.forward(x_rows.data(), num_rows, y_rows.data());
        std::transform(y_rows.data(), y_rows.data() + num_rows * hidden, y + first * hidden, bfloat16_from_float);
      }
    }
    return {};
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

  /// So that a user can see the comparison fail.
  void spoil() {
    const std::int64_t token = plan_.spoiled_token - plan_.first_token(context_.rank());
    if (plan_.spoiled_token < 0 || token < 0 || token >= num_tokens_) return;
    constexpr float kSpoil = 100.0F;  // far outside any bound: results are of the order of 1
    std::uint16_t& value = area_.output()[static_cast<std::size_t>(token * hidden_)];
    value = bfloat16_from_float(float_from_bfloat16(value) + kSpoil);
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

Status run_demo_rank(const DemoPlan& plan, RankContext& context) { return DemoRank(plan, context).run(); }

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
