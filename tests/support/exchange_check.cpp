#include "support/exchange_check.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cstring>
#include <span>

namespace ferry::test {
namespace {

template <typename T>
void expect_list(RankContext& context, std::string_view what, std::span<const T> seen, const std::vector<T>& expected) {
  if (std::equal(seen.begin(), seen.end(), expected.begin(), expected.end())) return;
  context.fail(fmt::format("{} is [{}], expected [{}]", what, fmt::join(seen, " "), fmt::join(expected, " ")));
}

template <typename T>
void expect_number(RankContext& context, std::string_view what, T seen, T expected) {
  if (seen != expected) context.fail(fmt::format("{} is {}, expected {}", what, seen, expected));
}

/// A contiguous table of the Routing against packed values of the same type.
void expect_table(RankContext& context, const std::string& what, const ConstTensorView& seen,
                  const TensorSpec& expected, const void* values) {
  if (seen.num_dims != 2 || seen.dtype != expected.dtype || seen.extent(0) != expected.rows ||
      seen.extent(1) != expected.cols) {
    context.fail(
        fmt::format("{} has not shape [{}, {}] {}", what, expected.rows, expected.cols, to_string(expected.dtype)));
    return;
  }
  const std::size_t num_bytes = static_cast<std::size_t>(seen.num_elements()) * size_bytes(seen.dtype);
  if (num_bytes == 0) return;
  if (seen.stride(0) != seen.extent(1) || seen.stride(1) != 1) context.fail(what + " is not contiguous");
  if (std::memcmp(seen.data, values, num_bytes) != 0) context.fail(what + " has wrong values");
}

TensorImage untouched(const TensorImage& image) { return TensorImage(image.spec()); }

}  // namespace

RouteArguments::RouteArguments(const PreparedCase& prepared, int rank) {
  const reference::World& world = prepared.world;
  const reference::RankTokens& tokens = world.ranks[static_cast<std::size_t>(rank)];
  ids_ = tokens.topk_idx;
  narrow_ids_.assign(ids_.begin(), ids_.end());
  weights_ = tokens.topk_weights;
  const bool wide = prepared.spec.id_dtype == DType::kInt64;
  const void* ids = wide ? static_cast<const void*>(ids_.data()) : narrow_ids_.data();
  input_.topk_idx = ConstTensorView(ids, prepared.spec.id_dtype, {tokens.num_tokens, world.num_topk});
  if (prepared.spec.world.weights)
    input_.topk_weights = ConstTensorView(weights_.data(), DType::kFloat32, {tokens.num_tokens, world.num_topk});
  options_ = world.options;
  options_.max_recv_rows = world.max_recv_rows.empty() ? 0 : world.max_recv_rows[static_cast<std::size_t>(rank)];
}

Routing check_route(RankContext& context, Group& group, const PreparedCase& prepared) {
  const std::string where = prepared.spec.name + ": route: ";
  Result<Routing> result = [&] {
    // The arguments die before the Routing is looked at: it must have copied what it needs.
    const RouteArguments arguments(prepared, context.rank());
    return group.route(arguments.input(), arguments.options());
  }();
  if (!context.expect_ok(result.status(), where)) return {};
  const Routing& routing = *result;
  const reference::World& world = prepared.world;
  const reference::RankTokens& tokens = world.ranks[static_cast<std::size_t>(context.rank())];
  const reference::RankRouting& expected = prepared.routings[static_cast<std::size_t>(context.rank())];

  expect_number(context, where + "num_tokens", routing.num_tokens(), tokens.num_tokens);
  expect_number(context, where + "num_topk", routing.num_topk(), world.num_topk);
  expect_number(context, where + "num_experts", routing.num_experts(), world.options.num_experts);
  expect_number(context, where + "num_local_experts", routing.num_local_experts(),
                static_cast<std::int64_t>(expected.local_expert_ids.size()));
  context.expect(routing.layout() == world.options.layout, where + "layout");
  expect_number(context, where + "num_recv_rows", routing.num_recv_rows(), expected.num_recv_rows);
  expect_number(context, where + "num_used_rows", routing.num_used_rows(), expected.num_used_rows);
  const ConstTensorView used = routing.num_recv_rows_view();
  if (context.expect(used.num_elements() == 1 && used.dtype == DType::kInt32, where + "num_recv_rows_view shape"))
    expect_number<std::int64_t>(context, where + "num_recv_rows_view", *static_cast<const std::int32_t*>(used.data),
                                expected.num_used_rows);
  expect_list(context, where + "num_rows_per_local_expert", routing.num_rows_per_local_expert(),
              expected.num_rows_per_local_expert);
  expect_list(context, where + "expert_row_offsets", routing.expert_row_offsets(), expected.expert_row_offsets);
  expect_list(context, where + "num_rows_from_rank", routing.num_rows_from_rank(), expected.num_rows_from_rank);
  expect_list(context, where + "num_rows_to_rank", routing.num_rows_to_rank(), expected.num_rows_to_rank);
  expect_list(context, where + "local_expert_ids", routing.local_expert_ids(), expected.local_expert_ids);

  const TensorSpec table = dense(DType::kInt32, tokens.num_tokens, world.num_topk);
  expect_table(context, where + "slots", routing.slots(), table, expected.slots.data());
  expect_table(context, where + "source", routing.source(), dense(DType::kInt32, expected.num_used_rows, 2),
               expected.source.data());
  expect_table(context, where + "topk_idx", routing.topk_idx(), dense(DType::kInt64, tokens.num_tokens, world.num_topk),
               tokens.topk_idx.data());
  if (prepared.spec.world.weights) {
    expect_table(context, where + "topk_weights", routing.topk_weights(),
                 dense(DType::kFloat32, tokens.num_tokens, world.num_topk), tokens.topk_weights.data());
  } else {
    context.expect(!routing.topk_weights().present(), where + "topk_weights are present, none were given");
  }
  return routing;
}

OptionalTensor::OptionalTensor(RankContext& context, Group& group, MemoryKind kind, const TensorImage& image,
                               bool used) {
  if (used) tensor_.emplace(context, group, kind, image);
}

void OptionalTensor::expect_equal(RankContext& context, const TensorImage& expected, const std::string& what) const {
  if (tensor_) tensor_->expect_equal(context, expected, what);
}

DispatchTensors::DispatchTensors(RankContext& context, Group& group, const PreparedCase& prepared,
                                 std::size_t dispatch_idx)
    : data_(prepared.dispatches[dispatch_idx][static_cast<std::size_t>(context.rank())]),
      x_(context, group, prepared.spec.memory, data_.x),
      out_x_(context, group, prepared.spec.memory, untouched(data_.out_x)),
      in_scales_(context, group, prepared.spec.memory, data_.scales, prepared.sends_scales(dispatch_idx)),
      out_scales_(context, group, prepared.spec.memory, untouched(data_.out_scales),
                  prepared.sends_scales(dispatch_idx)),
      in_weights_(context, group, prepared.spec.memory, data_.topk_weights,
                  prepared.spec.dispatches[dispatch_idx].own_weights),
      out_weights_(context, group, prepared.spec.memory, untouched(data_.out_topk_weights),
                   prepared.receives_weights(dispatch_idx)),
      out_ids_(context, group, prepared.spec.memory, untouched(data_.out_topk_idx),
               prepared.receives_ids(dispatch_idx)),
      out_source_(context, group, prepared.spec.memory, untouched(data_.out_source),
                  prepared.spec.dispatches[dispatch_idx].ask_tables) {
  in = {x_.view(), in_scales_.view(), in_weights_.view()};
  out = {out_x_.view(), out_scales_.view(), out_ids_.view(), out_weights_.view(), out_source_.view()};
  options.zero_padding = prepared.spec.dispatches[dispatch_idx].zero_padding;
}

void DispatchTensors::expect_received(RankContext& context, const std::string& where) const {
  out_x_.expect_equal(context, data_.out_x, where + "x");
  out_scales_.expect_equal(context, data_.out_scales, where + "scales");
  out_ids_.expect_equal(context, data_.out_topk_idx, where + "topk_idx");
  out_weights_.expect_equal(context, data_.out_topk_weights, where + "topk_weights");
  out_source_.expect_equal(context, data_.out_source, where + "source");
  x_.expect_equal(context, data_.x, where + "input x was changed");
}

void DispatchTensors::expect_untouched(RankContext& context, const std::string& where) const {
  out_x_.expect_equal(context, untouched(data_.out_x), where + "x was written");
  out_scales_.expect_equal(context, untouched(data_.out_scales), where + "scales were written");
  out_ids_.expect_equal(context, untouched(data_.out_topk_idx), where + "topk_idx was written");
  out_weights_.expect_equal(context, untouched(data_.out_topk_weights), where + "topk_weights were written");
  out_source_.expect_equal(context, untouched(data_.out_source), where + "source was written");
}

CombineTensors::CombineTensors(RankContext& context, Group& group, const PreparedCase& prepared,
                               std::size_t combine_idx)
    : data_(prepared.combines[combine_idx][static_cast<std::size_t>(context.rank())]),
      x_(context, group, prepared.spec.memory, data_.x),
      out_x_(context, group, prepared.spec.memory, untouched(data_.out_x)),
      weights_(context, group, prepared.spec.memory, data_.weights, prepared.spec.combines[combine_idx].return_weights),
      out_weights_(context, group, prepared.spec.memory, untouched(data_.out_weights),
                   prepared.spec.combines[combine_idx].return_weights),
      topk_weights_(context, group, prepared.spec.memory, data_.topk_weights,
                    prepared.spec.combines[combine_idx].own_weights),
      bias0_(context, group, prepared.spec.memory, data_.bias[0], prepared.spec.combines[combine_idx].num_biases >= 1),
      bias1_(context, group, prepared.spec.memory, data_.bias[1], prepared.spec.combines[combine_idx].num_biases >= 2) {
  in = {x_.view(), weights_.view(), {bias0_.view(), bias1_.view()}, topk_weights_.view()};
  out = {out_x_.view(), out_weights_.view()};
  options.weighted = prepared.spec.combines[combine_idx].weighted;
}

void CombineTensors::expect_received(RankContext& context, const std::string& where) const {
  out_x_.expect_equal(context, data_.out_x, where + "x");
  out_weights_.expect_equal(context, data_.out_weights, where + "weights");
  x_.expect_equal(context, data_.x, where + "input x was changed");
}

void CombineTensors::expect_untouched(RankContext& context, const std::string& where) const {
  out_x_.expect_equal(context, untouched(data_.out_x), where + "x was written");
  out_weights_.expect_equal(context, untouched(data_.out_weights), where + "weights were written");
}

void check_dispatch(RankContext& context, Group& group, const Routing& routing, const PreparedCase& prepared,
                    std::size_t dispatch_idx) {
  const DispatchTensors tensors(context, group, prepared, dispatch_idx);
  const std::string where = fmt::format("{}: dispatch {}: ", prepared.spec.name, dispatch_idx);
  const Status status = group.dispatch(routing, tensors.in, tensors.out, {}, tensors.options);
  if (context.expect_ok(status, where)) tensors.expect_received(context, where);
}

void check_combine(RankContext& context, Group& group, const Routing& routing, const PreparedCase& prepared,
                   std::size_t combine_idx) {
  const CombineTensors tensors(context, group, prepared, combine_idx);
  const std::string where = fmt::format("{}: combine {}: ", prepared.spec.name, combine_idx);
  const Status status = group.combine(routing, tensors.in, tensors.out, {}, tensors.options);
  if (context.expect_ok(status, where)) tensors.expect_received(context, where);
}

void check_case(RankContext& context, Group& group, const PreparedCase& prepared) {
  const Routing routing = check_route(context, group, prepared);
  // Without a Routing the other calls could only fail; all ranks got the same error, so all skip them.
  if (!routing.present()) return;
  for (std::size_t i = 0; i < prepared.dispatches.size(); ++i) check_dispatch(context, group, routing, prepared, i);
  for (std::size_t i = 0; i < prepared.combines.size(); ++i) check_combine(context, group, routing, prepared, i);
}

}  // namespace ferry::test
