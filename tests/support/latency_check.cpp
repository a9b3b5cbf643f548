#include "support/latency_check.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <array>

namespace ferry::test {
namespace {

TensorImage untouched(const TensorImage& image) { return TensorImage(image.spec()); }

std::int64_t most_tokens(const oracle::World& world) {
  std::int64_t most = 0;
  for (const oracle::RankTokens& tokens : world.ranks) most = std::max(most, tokens.num_tokens);
  return most;
}

/// View of a slab's rows on this rank. A rank without experts has no slabs in its images.
template <typename View>
View slab_view(const RankContext& context, const PreparedCase& prepared, const View& rows) {
  const auto& routing = prepared.routings[static_cast<std::size_t>(context.rank())];
  if (!prepared.spec.slab_view || !routing.local_expert_ids.empty()) return rows;
  return View(nullptr, rows.dtype, {0, prepared.world.options.slab_capacity, rows.extent(1)});
}

/// Views available without waiting for the GPU.
std::vector<ConstTensorView> views_of(const Routing& routing, bool on_device) {
  return {on_device ? ConstTensorView() : routing.source(),
          routing.num_recv_rows_view(),
          routing.num_rows_per_local_expert_view(),
          routing.expert_row_offsets_view(),
          routing.slots(),
          routing.source_ranges(),
          routing.topk_idx(),
          routing.topk_weights()};
}

bool same_view(const ConstTensorView& a, const ConstTensorView& b) {
  return a.data == b.data && a.dtype == b.dtype && a.num_dims == b.num_dims && a.shape == b.shape &&
         a.strides == b.strides;
}

}  // namespace

std::int64_t latency_max_tokens(const PreparedCase& prepared) {
  return std::max<std::int64_t>(most_tokens(prepared.world), 1) + prepared.spec.spare_max_tokens;
}

LatencyDispatchTensors::LatencyDispatchTensors(RankContext& context, Group& group, const PreparedCase& prepared,
                                               std::size_t dispatch_idx)
    : on_device_(uses_device(group)),
      route_(context, group, prepared, prepared.spec.world.idle_tail),
      count_(on_device_, sizeof(std::int32_t)),
      data_(&prepared.dispatches[dispatch_idx][static_cast<std::size_t>(context.rank())]),
      x_(context, group, prepared.spec.memory, data_->x),
      out_x_(context, group, prepared.spec.memory, untouched(data_->out_x)),
      in_scales_(context, group, prepared.spec.memory, data_->scales, prepared.sends_scales(dispatch_idx)),
      out_scales_(context, group, prepared.spec.memory, untouched(data_->out_scales),
                  prepared.receives_scales(dispatch_idx)) {
  in = {x_.view(), in_scales_.view(), route_.input().topk_idx, route_.input().topk_weights, {}};
  write_count(context, prepared);
  if (prepared.spec.world.idle_tail) in.num_tokens_view = ConstTensorView(count_.data(), DType::kInt32, {1});
  out = {slab_view(context, prepared, out_x_.view()), out_scales_.view()};
  options.num_experts = route_.options().num_experts;
  options.max_tokens = latency_max_tokens(prepared);
  options.slab_capacity = route_.options().slab_capacity;
  options.expert_to_rank = route_.options().expert_to_rank;
  options.placement = route_.options().placement;
  options.quantize = prepared.spec.dispatches[dispatch_idx].quantize;
  options.zero_padding = prepared.spec.dispatches[dispatch_idx].zero_padding;
}

void LatencyDispatchTensors::write_count(const RankContext& context, const PreparedCase& prepared) {
  const auto& tokens = prepared.world.ranks[static_cast<std::size_t>(context.rank())];
  const auto count = static_cast<std::int32_t>(num_counted_tokens(tokens, prepared.world.num_topk));
  write_memory(on_device_, count_.data(), &count, sizeof(count));
}

void LatencyDispatchTensors::refill(const RankContext& context, const PreparedCase& prepared,
                                    std::size_t dispatch_idx) {
  data_ = &prepared.dispatches[dispatch_idx][static_cast<std::size_t>(context.rank())];
  route_.refill(context, prepared);
  write_count(context, prepared);
  x_.refill(data_->x);
  in_scales_.refill(data_->scales);
  out_x_.refill(untouched(data_->out_x));
  out_scales_.refill(untouched(data_->out_scales));
}

void LatencyDispatchTensors::expect_received(RankContext& context, const std::string& where) const {
  out_x_.expect_equal(context, data_->out_x, where + "x");
  out_scales_.expect_equal(context, data_->out_scales, where + "scales");
  x_.expect_equal(context, data_->x, where + "input x was changed");
  in_scales_.expect_equal(context, data_->scales, where + "input scales were changed");
}

void LatencyDispatchTensors::expect_untouched(RankContext& context, const std::string& where) const {
  out_x_.expect_equal(context, untouched(data_->out_x), where + "x was written");
  out_scales_.expect_equal(context, untouched(data_->out_scales), where + "scales were written");
}

LatencyCombineTensors::LatencyCombineTensors(RankContext& context, Group& group, const PreparedCase& prepared,
                                             std::size_t combine_idx)
    : data_(&prepared.combines[combine_idx][static_cast<std::size_t>(context.rank())]),
      x_(context, group, prepared.spec.memory, data_->x),
      out_x_(context, group, prepared.spec.memory, untouched(data_->out_x)),
      topk_weights_(context, group, prepared.spec.memory, data_->topk_weights,
                    prepared.spec.combines[combine_idx].own_weights) {
  in = {slab_view<ConstTensorView>(context, prepared, x_.view()), topk_weights_.view()};
  out = {out_x_.view()};
  options.order = prepared.spec.combines[combine_idx].order;
  options.wire_format = prepared.spec.combines[combine_idx].wire_format;
}

void LatencyCombineTensors::refill(const RankContext& context, const PreparedCase& prepared, std::size_t combine_idx) {
  data_ = &prepared.combines[combine_idx][static_cast<std::size_t>(context.rank())];
  x_.refill(data_->x);
  topk_weights_.refill(data_->topk_weights);
  out_x_.refill(untouched(data_->out_x));
}

void LatencyCombineTensors::expect_received(RankContext& context, const std::string& where) const {
  out_x_.expect_equal(context, data_->out_x, where + "x");
  x_.expect_equal(context, data_->x, where + "input x was changed");
}

void LatencyCombineTensors::expect_untouched(RankContext& context, const std::string& where) const {
  out_x_.expect_equal(context, untouched(data_->out_x), where + "x was written");
}

std::size_t latency_bytes_of(const char* backend, const std::vector<PreparedCase>& cases) {
  LatencyShape shape;
  shape.backend = backend;
  bool sums = !cases.empty();
  for (const PreparedCase& one : cases) {
    shape.num_ranks = std::max(shape.num_ranks, one.world.num_ranks);
    shape.max_tokens = std::max(shape.max_tokens, most_tokens(one.world) + one.spec.spare_max_tokens);
    shape.num_topk = std::max(shape.num_topk, one.world.num_topk);
    for (const DispatchSpec& dispatch : one.spec.dispatches) {
      const auto element_bytes =
          static_cast<std::int64_t>(dispatch.quantize == Quantization::kNone ? size_bytes(dispatch.dtype) : 1);
      const std::int64_t scale_bytes =
          dispatch.num_scales * static_cast<std::int64_t>(size_bytes(dispatch.scale_dtype));
      shape.dispatch_row_bytes = std::max(shape.dispatch_row_bytes, dispatch.hidden * element_bytes + scale_bytes);
    }
    for (const CombineSpec& combine : one.spec.combines) {
      shape.combine_row_bytes =
          std::max(shape.combine_row_bytes, combine.hidden * static_cast<std::int64_t>(size_bytes(combine.dtype)));
      sums = sums && combine.order == CombineOrder::kRankSums;
    }
  }
  if (sums) shape.order = CombineOrder::kRankSums;
  const Result<std::size_t> required = latency_bytes_required(shape);
  return required.ok() ? *required : 0;
}

LatencyExchange::LatencyExchange(RankContext& context, Group& group, const PreparedCase& prepared,
                                 std::size_t dispatch_idx, const KernelOptions& kernel)
    : context_(&context), group_(&group), prepared_(&prepared), dispatch_idx_(dispatch_idx), kernel_(kernel) {}

std::string LatencyExchange::where(const char* call, std::size_t idx) const {
  return fmt::format("{}: {} {}: ", prepared_->spec.name, call, idx);
}

bool LatencyExchange::dispatch() { return call_dispatch(false); }
bool LatencyExchange::send_dispatch() { return call_dispatch(true); }
bool LatencyExchange::combine(std::size_t combine_idx) { return call_combine(combine_idx, false); }
bool LatencyExchange::send_combine(std::size_t combine_idx) { return call_combine(combine_idx, true); }

bool LatencyExchange::call_dispatch(bool split) {
  dispatch_.emplace(*context_, *group_, *prepared_, dispatch_idx_);
  dispatch_->options.split = split;
  dispatch_->options.kernel = kernel_;
  Result<Routing> sent =
      group_->latency_dispatch(dispatch_->in, dispatch_->out, dispatch_->options, stream_of(*group_));
  if (!split) {
    const Status status = finish(*group_, sent.status());
    if (sent.ok()) routing_ = *sent;
    return finish_dispatch(status);
  }
  if (!context_->expect_ok(sent.status(), where("latency_dispatch, send half", dispatch_idx_))) return false;
  routing_ = *sent;
  note_views();
  return true;
}

bool LatencyExchange::call_combine(std::size_t combine_idx, bool split) {
  combine_idx_ = combine_idx;
  combine_.emplace(*context_, *group_, *prepared_, combine_idx);
  combine_->options.split = split;
  combine_->options.kernel = kernel_;
  const Status status =
      group_->latency_combine(routing_, combine_->in, combine_->out, stream_of(*group_), combine_->options);
  if (!split) return finish_combine(finish(*group_, status));
  return context_->expect_ok(status, where("latency_combine, send half", combine_idx));
}

bool LatencyExchange::receive() {
  const Status status = finish(*group_, group_->latency_receive(routing_, stream_of(*group_)));
  return combine_ ? finish_combine(status) : finish_dispatch(status);
}

bool LatencyExchange::finish_dispatch(const Status& status) {
  const std::string call = where("latency_dispatch", dispatch_idx_);
  if (!context_->expect_ok(status, call)) return false;
  dispatch_->expect_received(*context_, call);
  expect_routing(*context_, *group_, routing_, *prepared_);
  expect_source_ranges(*context_, *group_, routing_, *prepared_);
  expect_same_views();
  // After a mismatch the call may still be running and use the tensors.
  if (context_->failures().empty()) dispatch_.reset();
  return true;
}

bool LatencyExchange::finish_combine(const Status& status) {
  const std::string call = where("latency_combine", combine_idx_);
  if (!context_->expect_ok(status, call)) return false;
  combine_->expect_received(*context_, call);
  combine_.reset();
  return true;
}

/// Checks the values that the send half already knows, and keeps the views.
void LatencyExchange::note_views() {
  const auto& expected = prepared_->routings[static_cast<std::size_t>(context_->rank())];
  const std::string call = where("latency_dispatch, send half", dispatch_idx_);
  context_->expect(routing_.num_tokens() == prepared_->num_tokens(context_->rank()), call + "num_tokens");
  context_->expect(routing_.num_topk() == prepared_->world.num_topk, call + "num_topk");
  context_->expect(routing_.layout() == Layout::kSlab, call + "layout");
  context_->expect(routing_.num_recv_rows() == expected.num_recv_rows, call + "num_recv_rows");
  context_->expect(std::ranges::equal(routing_.local_expert_ids(), expected.local_expert_ids),
                   call + "local_expert_ids");
  views_ = views_of(routing_, uses_device(*group_));
}

void LatencyExchange::expect_same_views() const {
  if (views_.empty()) return;
  const std::vector<ConstTensorView> now = views_of(routing_, uses_device(*group_));
  for (std::size_t i = 0; i < now.size(); ++i) {
    context_->expect(same_view(views_[i], now[i]), fmt::format("{}view {} of the Routing changed when it was received",
                                                               where("latency_dispatch", dispatch_idx_), i));
  }
}

void check_latency_case(RankContext& context, Group& group, const PreparedCase& prepared, Halves halves,
                        const KernelOptions& kernel) {
  const bool split = halves == Halves::kSplit;
  for (std::size_t i = 0; i < prepared.dispatches.size(); ++i) {
    LatencyExchange exchange(context, group, prepared, i, kernel);
    // After an error every rank returns here, so that all ranks make the same call next.
    if (split ? !(exchange.send_dispatch() && exchange.receive()) : !exchange.dispatch()) return;
    for (std::size_t j = 0; j < prepared.combines.size(); ++j) {
      if (split ? !(exchange.send_combine(j) && exchange.receive()) : !exchange.combine(j)) return;
    }
  }
}

ExchangeCase draw_latency_case(std::mt19937_64& random, int num_ranks, bool fp8_sums) {
  constexpr std::array<Quantization, 5> kModes = {Quantization::kNone, Quantization::kFp8, Quantization::kFp8PowerOfTwo,
                                                  Quantization::kFp8Ue8m0, Quantization::kInt8};
  ExchangeCase spec = draw_case(random, num_ranks);
  // The other fields of the world stay as drawn; the capacity follows from them.
  spec.world.layout = Layout::kSlab;
  spec.slab_view = random() % 2 == 0;
  spec.world.idle_tail = random() % 3 == 0;
  spec.spare_max_tokens = random() % 2 == 0 ? 0 : static_cast<std::int64_t>(random() % 9);
  if (random() % 3 == 0) spec.spare_max_tokens += 64;  // no sums of GPU ranks travel as words
  for (DispatchSpec& dispatch : spec.dispatches) {
    dispatch.own_weights = false;
    dispatch.scale_strides = static_cast<ScaleStrides>(random() % 6);
    if (random() % 2 == 0) continue;
    dispatch.quantize = kModes[random() % kModes.size()];
    if (dispatch.quantize == Quantization::kNone) continue;
    dispatch.dtype = DType::kBfloat16;
    dispatch.hidden = 16 * static_cast<std::int64_t>(1 + random() % 40);
    dispatch.scale_dtype = DType::kFloat32;
    if (dispatch.quantize == Quantization::kFp8Ue8m0) {
      dispatch.scale_dtype = random() % 2 == 0 ? DType::kUint8 : DType::kInt32;
    }
  }
  for (CombineSpec& combine : spec.combines) {
    combine.weighted = true;
    combine.order = random() % 2 == 0 ? CombineOrder::kRankSums : CombineOrder::kExact;
    combine.num_biases = 0;
    combine.return_weights = false;
    if (!fp8_sums || combine.order != CombineOrder::kRankSums || random() % 2 == 0) continue;
    combine.dtype = DType::kBfloat16;
    combine.hidden = 128 * static_cast<std::int64_t>(1 + random() % 5);
    combine.wire_format = WireFormat::kFp8;
  }
  return spec;
}

}  // namespace ferry::test
