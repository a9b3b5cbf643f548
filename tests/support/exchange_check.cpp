#include "support/exchange_check.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cstring>
#include <functional>
#include <optional>
#include <span>

#include "support/channel_check.hpp"
#include "support/load_check.hpp"

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

/// Compares the memory that a Routing's views point to.
class ViewCheck {
 public:
  ViewCheck(RankContext& context, bool on_device) : context_(context), on_device_(on_device) {}

  /// Compares a contiguous table with packed values of the same type. The table may have `num_rows` rows, more than
  /// `expected`; the values of the extra rows are not checked.
  void table(const std::string& what, const ConstTensorView& seen, const TensorSpec& expected, const void* values,
             std::int64_t num_rows) const {
    if (seen.num_dims != 2 || seen.dtype != expected.dtype || seen.extent(0) != num_rows ||
        seen.extent(1) != expected.cols) {
      context_.fail(
          fmt::format("{} does not have shape [{}, {}] {}", what, num_rows, expected.cols, to_string(expected.dtype)));
      return;
    }
    if (expected.rows == 0) return;
    if (seen.stride(0) != seen.extent(1) || seen.stride(1) != 1) context_.fail(what + " is not contiguous");
    values_at(what, seen.data, static_cast<std::size_t>(expected.rows * expected.cols), seen.dtype, values);
  }
  void table(const std::string& what, const ConstTensorView& seen, const TensorSpec& expected,
             const void* values) const {
    table(what, seen, expected, values, expected.rows);
  }

  void list(const std::string& what, const ConstTensorView& seen, DType dtype, std::size_t size,
            const void* values) const {
    if (seen.num_dims != 1 || seen.dtype != dtype || seen.extent(0) != static_cast<std::int64_t>(size))
      context_.fail(fmt::format("{} does not have shape [{}] {}", what, size, to_string(dtype)));
    else
      values_at(what, seen.data, size, dtype, values);
  }

 private:
  void values_at(const std::string& what, const void* data, std::size_t count, DType dtype, const void* values) const {
    if (count == 0) return;
    const Bytes seen = read_memory(on_device_, data, count * size_bytes(dtype));
    if (std::memcmp(seen.data(), values, seen.size()) != 0) context_.fail(what + " has wrong values");
  }

  RankContext& context_;
  bool on_device_;
};

bool has_bounded_rows(const oracle::World& world) {
  if (world.options.layout == Layout::kSlab) return true;
  return !world.max_recv_rows.empty() && std::ranges::none_of(world.max_recv_rows, [](auto rows) { return rows == 0; });
}

/// Returns 0, which means no bound, if there are no tokens.
std::int64_t most_tokens(const oracle::World& world) {
  std::int64_t most = 0;
  for (const oracle::RankTokens& tokens : world.ranks) most = std::max(most, tokens.num_tokens);
  return most;
}

TensorImage untouched(const TensorImage& image) { return TensorImage(image.spec()); }

/// [P] rows of each expert on all ranks.
std::vector<std::int64_t> expert_rows(const oracle::World& world, const std::vector<int>& masked) {
  const oracle::World left = oracle::without_ranks(world, masked);
  std::vector<std::int64_t> rows(static_cast<std::size_t>(world.options.num_experts), 0);
  for (std::size_t rank = 0; rank < left.ranks.size(); ++rank) {
    const std::vector<std::int64_t> counts = oracle::count_rows(left, rank);
    for (std::size_t expert = 0; expert < rows.size(); ++expert) rows[expert] += counts[expert];
  }
  return rows;
}

}  // namespace

RouteArguments::RouteArguments(const RankContext& context, const Group& group, const PreparedCase& prepared,
                               bool counted)
    : on_device_(uses_device(group)), counted_(counted) {
  const oracle::World& world = prepared.world;
  const auto rank = static_cast<std::size_t>(context.rank());
  const std::int64_t num_tokens = world.ranks[rank].num_tokens;
  const std::size_t num_entries = world.ranks[rank].topk_idx.size();
  ids_ = PlainMemory(on_device_, num_entries * size_bytes(prepared.spec.id_dtype));
  weights_ = PlainMemory(on_device_, num_entries * sizeof(float));
  if (has_table(prepared))
    table_ =
        PlainMemory(on_device_, static_cast<std::size_t>(prepared.world.options.num_experts) * sizeof(std::int32_t));
  refill(context, prepared);
  input_.topk_idx = ConstTensorView(ids_.data(), prepared.spec.id_dtype, {num_tokens, world.num_topk});
  if (prepared.spec.world.weights)
    input_.topk_weights = ConstTensorView(weights_.data(), DType::kFloat32, {num_tokens, world.num_topk});
  options_ = world.options;
  if (prepared.given.options.placement.present()) {
    options_.num_experts = prepared.given.options.num_experts;
    options_.expert_to_rank.clear();
    options_.placement = prepared.given.options.placement;
    if (has_table(prepared)) {
      const auto num_physical = static_cast<std::int64_t>(options_.placement.physical_to_logical.size());
      options_.placement.physical_to_logical.clear();
      options_.placement.physical_to_logical_view = ConstTensorView(table_.data(), DType::kInt32, {num_physical});
    }
  }
  options_.max_recv_rows = world.max_recv_rows.empty() ? 0 : world.max_recv_rows[rank];
  // Every other world that allows it also bounds tokens, which changes how some backends route.
  if (prepared.spec.world.seed % 2 == 1 && has_bounded_rows(world)) options_.max_tokens = most_tokens(world);
}

void RouteArguments::refill(const RankContext& context, const PreparedCase& prepared) {
  const oracle::RankTokens& tokens = prepared.given.ranks[static_cast<std::size_t>(context.rank())];
  std::vector<std::int64_t> ids = tokens.topk_idx;
  if (counted_) {
    const std::int64_t num_topk = prepared.world.num_topk;
    std::fill(ids.begin() + num_counted_tokens(tokens, prepared.world.num_topk) * num_topk, ids.end(),
              prepared.given.options.num_experts);
  }
  if (prepared.spec.id_dtype == DType::kInt64) {
    write_memory(on_device_, ids_.data(), ids.data(), ids.size() * sizeof(std::int64_t));
  } else {
    const std::vector<std::int32_t> narrow(ids.begin(), ids.end());
    write_memory(on_device_, ids_.data(), narrow.data(), narrow.size() * sizeof(std::int32_t));
  }
  write_memory(on_device_, weights_.data(), tokens.topk_weights.data(), tokens.topk_weights.size() * sizeof(float));
  const std::vector<std::int32_t>& homes = prepared.given.options.placement.physical_to_logical;
  if (has_table(prepared)) write_memory(on_device_, table_.data(), homes.data(), homes.size() * sizeof(std::int32_t));
}

void expect_routing(RankContext& context, const Group& group, const Routing& routing, const PreparedCase& prepared,
                    Counts counts) {
  const std::string where = prepared.spec.name + ": route: ";
  const oracle::World& world = prepared.world;
  const oracle::RankTokens& tokens = world.ranks[static_cast<std::size_t>(context.rank())];
  const oracle::RankRouting& expected = prepared.routings[static_cast<std::size_t>(context.rank())];
  const std::size_t num_local = expected.local_expert_ids.size();

  expect_number(context, where + "num_tokens", routing.num_tokens(), tokens.num_tokens);
  expect_number(context, where + "num_topk", routing.num_topk(), world.num_topk);
  expect_number(context, where + "num_experts", routing.num_experts(), prepared.given.options.num_experts);
  expect_number(context, where + "num_physical_experts", routing.num_physical_experts(), world.options.num_experts);
  expect_number(context, where + "num_local_experts", routing.num_local_experts(),
                static_cast<std::int64_t>(num_local));
  context.expect(routing.layout() == world.options.layout, where + "layout");
  expect_number(context, where + "num_recv_rows", routing.num_recv_rows(), expected.num_recv_rows);
  expect_list(context, where + "local_expert_ids", routing.local_expert_ids(), expected.local_expert_ids);
  if (counts == Counts::kOnHost) {
    expect_number(context, where + "num_used_rows", routing.num_used_rows(), expected.num_used_rows);
    expect_list(context, where + "num_rows_per_local_expert", routing.num_rows_per_local_expert(),
                expected.num_rows_per_local_expert);
    expect_list(context, where + "expert_row_offsets", routing.expert_row_offsets(), expected.expert_row_offsets);
    expect_list(context, where + "num_rows_from_rank", routing.num_rows_from_rank(), expected.num_rows_from_rank);
    expect_list(context, where + "num_rows_to_rank", routing.num_rows_to_rank(), expected.num_rows_to_rank);
  } else {
    expect_number(context, where + "num_used_rows", routing.num_used_rows(), expected.num_recv_rows);
    context.expect(routing.num_rows_per_local_expert().empty() && routing.expert_row_offsets().empty() &&
                       routing.num_rows_from_rank().empty() && routing.num_rows_to_rank().empty(),
                   where + "counts that the host cannot know");
  }

  const ViewCheck views(context, uses_device(group));
  const auto used = static_cast<std::int32_t>(expected.num_used_rows);
  views.list(where + "num_recv_rows_view", routing.num_recv_rows_view(), DType::kInt32, 1, &used);
  views.list(where + "num_rows_per_local_expert_view", routing.num_rows_per_local_expert_view(), DType::kInt32,
             num_local, expected.num_rows_per_local_expert.data());
  if (world.options.layout == Layout::kTokens)
    context.expect(!routing.expert_row_offsets_view().present(), where + "expert_row_offsets_view with kTokens");
  else
    views.list(where + "expert_row_offsets_view", routing.expert_row_offsets_view(), DType::kInt64, num_local + 1,
               expected.expert_row_offsets.data());

  const bool of_latency = routing.source_ranges().present();
  const bool may_lack = uses_device(group) && (of_latency || group.topology().num_nodes() > 1);
  if (!may_lack || routing.num_rows_per_expert_view().present()) {
    const std::vector<std::int64_t> rows = expert_rows(world, prepared.spec.masked);
    views.list(where + "num_rows_per_expert_view", routing.num_rows_per_expert_view(), DType::kInt64, rows.size(),
               rows.data());
  }

  const TensorSpec table = dense(DType::kInt32, tokens.num_tokens, world.num_topk);
  views.table(where + "slots", routing.slots(), table, expected.slots.data());
  views.table(where + "source", routing.source(), dense(DType::kInt32, expected.num_used_rows, 2),
              expected.source.data(), counts == Counts::kOnHost ? expected.num_used_rows : expected.num_recv_rows);
  views.table(where + "topk_idx", routing.topk_idx(), dense(DType::kInt64, tokens.num_tokens, world.num_topk),
              tokens.topk_idx.data());
  if (prepared.spec.world.weights) {
    views.table(where + "topk_weights", routing.topk_weights(),
                dense(DType::kFloat32, tokens.num_tokens, world.num_topk), tokens.topk_weights.data());
  } else {
    context.expect(!routing.topk_weights().present(), where + "topk_weights are present, none were given");
  }
}

void expect_source_ranges(RankContext& context, const Group& group, const Routing& routing,
                          const PreparedCase& prepared) {
  const std::string where = prepared.spec.name + ": latency_dispatch: source_ranges";
  const oracle::RankRouting& expected = prepared.routings[static_cast<std::size_t>(context.rank())];
  const std::vector<oracle::SourceRange> ranges = oracle::source_ranges(prepared.world, expected);
  const auto num_local = static_cast<std::int64_t>(expected.local_expert_ids.size());
  const std::int64_t num_ranks = prepared.world.num_ranks;
  ConstTensorView seen = routing.source_ranges();
  if (!context.expect(seen.num_dims == 3 && seen.extent(1) == num_ranks && seen.extent(2) == 2 &&
                          (num_local <= 1 || seen.stride(0) == 2 * num_ranks),
                      where + " does not have shape [L, R, 2], contiguous")) {
    return;
  }
  // View as a table of L rows.
  seen = ConstTensorView(seen.data, seen.dtype, {seen.extent(0), 2 * num_ranks},
                         {2 * num_ranks, num_ranks > 1 && seen.stride(1) != 2 ? 0 : seen.stride(2)});
  ViewCheck(context, uses_device(group))
      .table(where, seen, dense(DType::kInt32, num_local, 2 * num_ranks), ranges.data());
}

Routing check_route(RankContext& context, Group& group, const PreparedCase& prepared) {
  Status status;
  const bool by_token = prepared.world.options.layout == Layout::kTokens;
  const int num_channels = static_cast<int>(prepared.spec.world.seed % 13) + 1;
  const CounterTensors counters(context, group, prepared);
  std::optional<EarlyChannelTables> early;
  if (by_token) early.emplace(group, prepared, context.rank(), num_channels);
  Result<Routing> result = [&] {
    // The arguments are destroyed before the checks: the Routing must have copied all it needs.
    const RouteArguments arguments(context, group, prepared);
    RouteOptions options = arguments.options();
    options.counters = counters.views();
    Result<Routing> routed = group.route(arguments.input(), options, stream_of(group),
                                         early ? early->while_waiting() : std::function<EarlyTables()>());
    status = finish(group, routed.status());
    return routed;
  }();
  if (!context.expect_ok(status, prepared.spec.name + ": route: ")) return {};
  expect_routing(context, group, *result, prepared);
  counters.expect_counted(context, prepared.spec.name + ": route: ", 1);
  context.expect(!result->source_ranges().present(), prepared.spec.name + ": route: source_ranges are present");
  if (by_token) {
    early->check(context);
    check_channel_tables(context, group, *result, prepared, num_channels);
  }
  return *result;
}

OptionalTensor::OptionalTensor(RankContext& context, Group& group, MemoryKind kind, const TensorImage& image,
                               bool used) {
  if (used) tensor_.emplace(context, group, kind, image);
}

void OptionalTensor::refill(const TensorImage& image) {
  if (tensor_) tensor_->refill(image);
}

void OptionalTensor::expect_equal(RankContext& context, const TensorImage& expected, const std::string& what) const {
  if (tensor_) tensor_->expect_equal(context, expected, what);
}

DispatchTensors::DispatchTensors(RankContext& context, Group& group, const PreparedCase& prepared,
                                 std::size_t dispatch_idx)
    : data_(&prepared.dispatches[dispatch_idx][static_cast<std::size_t>(context.rank())]),
      x_(context, group, prepared.spec.memory, data_->x),
      out_x_(context, group, prepared.spec.memory, untouched(data_->out_x)),
      in_scales_(context, group, prepared.spec.memory, data_->scales, prepared.sends_scales(dispatch_idx)),
      out_scales_(context, group, prepared.spec.memory, untouched(data_->out_scales),
                  prepared.receives_scales(dispatch_idx)),
      in_weights_(context, group, prepared.spec.memory, data_->topk_weights,
                  prepared.spec.dispatches[dispatch_idx].own_weights),
      out_weights_(context, group, prepared.spec.memory, untouched(data_->out_topk_weights),
                   prepared.receives_weights(dispatch_idx)),
      out_ids_(context, group, prepared.spec.memory, untouched(data_->out_topk_idx),
               prepared.receives_ids(dispatch_idx)),
      out_source_(context, group, prepared.spec.memory, untouched(data_->out_source),
                  prepared.spec.dispatches[dispatch_idx].ask_tables) {
  in = {x_.view(), in_scales_.view(), in_weights_.view()};
  out = {out_x_.view(), out_scales_.view(), out_ids_.view(), out_weights_.view(), out_source_.view()};
  options.zero_padding = prepared.spec.dispatches[dispatch_idx].zero_padding;
  options.quantize = prepared.spec.dispatches[dispatch_idx].quantize;
}

void DispatchTensors::refill(const RankContext& context, const PreparedCase& prepared, std::size_t dispatch_idx) {
  data_ = &prepared.dispatches[dispatch_idx][static_cast<std::size_t>(context.rank())];
  x_.refill(data_->x);
  in_scales_.refill(data_->scales);
  in_weights_.refill(data_->topk_weights);
  out_x_.refill(untouched(data_->out_x));
  out_scales_.refill(untouched(data_->out_scales));
  out_ids_.refill(untouched(data_->out_topk_idx));
  out_weights_.refill(untouched(data_->out_topk_weights));
  out_source_.refill(untouched(data_->out_source));
}

void DispatchTensors::expect_received(RankContext& context, const std::string& where) const {
  out_x_.expect_equal(context, data_->out_x, where + "x");
  out_scales_.expect_equal(context, data_->out_scales, where + "scales");
  out_ids_.expect_equal(context, data_->out_topk_idx, where + "topk_idx");
  out_weights_.expect_equal(context, data_->out_topk_weights, where + "topk_weights");
  out_source_.expect_equal(context, data_->out_source, where + "source");
  x_.expect_equal(context, data_->x, where + "input x was changed");
}

void DispatchTensors::expect_untouched(RankContext& context, const std::string& where) const {
  out_x_.expect_equal(context, untouched(data_->out_x), where + "x was written");
  out_scales_.expect_equal(context, untouched(data_->out_scales), where + "scales were written");
  out_ids_.expect_equal(context, untouched(data_->out_topk_idx), where + "topk_idx was written");
  out_weights_.expect_equal(context, untouched(data_->out_topk_weights), where + "topk_weights were written");
  out_source_.expect_equal(context, untouched(data_->out_source), where + "source was written");
}

CombineTensors::CombineTensors(RankContext& context, Group& group, const PreparedCase& prepared,
                               std::size_t combine_idx)
    : data_(&prepared.combines[combine_idx][static_cast<std::size_t>(context.rank())]),
      x_(context, group, prepared.spec.memory, data_->x),
      out_x_(context, group, prepared.spec.memory, untouched(data_->out_x)),
      weights_(context, group, prepared.spec.memory, data_->weights,
               prepared.spec.combines[combine_idx].return_weights),
      out_weights_(context, group, prepared.spec.memory, untouched(data_->out_weights),
                   prepared.spec.combines[combine_idx].return_weights),
      topk_weights_(context, group, prepared.spec.memory, data_->topk_weights,
                    prepared.spec.combines[combine_idx].own_weights),
      bias0_(context, group, prepared.spec.memory, data_->bias[0], prepared.spec.combines[combine_idx].num_biases >= 1),
      bias1_(context, group, prepared.spec.memory, data_->bias[1],
             prepared.spec.combines[combine_idx].num_biases >= 2) {
  in = {x_.view(), weights_.view(), {bias0_.view(), bias1_.view()}, topk_weights_.view()};
  out = {out_x_.view(), out_weights_.view()};
  options.weighted = prepared.spec.combines[combine_idx].weighted;
  options.wire_format = prepared.spec.combines[combine_idx].wire_format;
}

void CombineTensors::refill(const RankContext& context, const PreparedCase& prepared, std::size_t combine_idx) {
  data_ = &prepared.combines[combine_idx][static_cast<std::size_t>(context.rank())];
  x_.refill(data_->x);
  weights_.refill(data_->weights);
  topk_weights_.refill(data_->topk_weights);
  bias0_.refill(data_->bias[0]);
  bias1_.refill(data_->bias[1]);
  out_x_.refill(untouched(data_->out_x));
  out_weights_.refill(untouched(data_->out_weights));
}

void CombineTensors::expect_received(RankContext& context, const std::string& where) const {
  out_x_.expect_equal(context, data_->out_x, where + "x");
  out_weights_.expect_equal(context, data_->out_weights, where + "weights");
  x_.expect_equal(context, data_->x, where + "input x was changed");
}

void CombineTensors::expect_untouched(RankContext& context, const std::string& where) const {
  out_x_.expect_equal(context, untouched(data_->out_x), where + "x was written");
  out_weights_.expect_equal(context, untouched(data_->out_weights), where + "weights were written");
}

void check_dispatch(RankContext& context, Group& group, const Routing& routing, const PreparedCase& prepared,
                    std::size_t dispatch_idx, const KernelOptions& kernel) {
  DispatchTensors tensors(context, group, prepared, dispatch_idx);
  tensors.options.kernel = kernel;
  const std::string where = fmt::format("{}: dispatch {}: ", prepared.spec.name, dispatch_idx);
  const Status status = group.dispatch(routing, tensors.in, tensors.out, stream_of(group), tensors.options);
  if (context.expect_ok(finish(group, status), where)) tensors.expect_received(context, where);
}

void check_combine(RankContext& context, Group& group, const Routing& routing, const PreparedCase& prepared,
                   std::size_t combine_idx, const KernelOptions& kernel) {
  CombineTensors tensors(context, group, prepared, combine_idx);
  tensors.options.kernel = kernel;
  const std::string where = fmt::format("{}: combine {}: ", prepared.spec.name, combine_idx);
  const Status status = group.combine(routing, tensors.in, tensors.out, stream_of(group), tensors.options);
  if (context.expect_ok(finish(group, status), where)) tensors.expect_received(context, where);
}

void check_case(RankContext& context, Group& group, const PreparedCase& prepared, const KernelOptions& kernel) {
  const Routing routing = check_route(context, group, prepared);
  // Without a Routing the other calls would fail; all ranks got the same error, so all skip them.
  if (!routing.present()) return;
  for (std::size_t i = 0; i < prepared.dispatches.size(); ++i)
    check_dispatch(context, group, routing, prepared, i, kernel);
  for (std::size_t i = 0; i < prepared.combines.size(); ++i)
    check_combine(context, group, routing, prepared, i, kernel);
}

}  // namespace ferry::test
