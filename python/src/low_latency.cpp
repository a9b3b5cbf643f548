#include "low_latency.hpp"

#include <cstddef>
#include <cstdint>
#include <optional>
#include <utility>

#include "deep_ep_arguments.hpp"
#include "latency.hpp"
#include "views.hpp"

namespace nb = nanobind;
using namespace nb::literals;

namespace ferry::python {
namespace {

constexpr std::size_t kHandleSize = 5;
constexpr std::size_t kHiddenOfHandle = 3;
/// Far more than any batch, far less than would overflow the product with the number of ranks.
constexpr std::int64_t kMaxTokens = std::int64_t{1} << 31;

/// None, or a table of this dtype and shape.
bool is_table_or_none(nb::handle tensor, Place place, DType dtype, std::int64_t size) {
  return tensor.is_none() || find_table(tensor, place, dtype, {size}).has_value();
}

/// stats: of experts, of waits. -> payload, counts, src_info, layout_range, routing
nb::object dispatch(const Calls& calls, nb::handle x, nb::handle topk_idx, nb::handle max_tokens,
                    nb::handle num_experts, const nb::tuple& stats, int quantize, nb::handle kept, int num_sms) {
  const Place place = calls.place();
  const std::int64_t num_ranks = calls.group().num_ranks();
  const std::optional<Stream> stream = calls.allocator().stream();
  const std::optional<std::int64_t> most = find_integer(max_tokens);
  const std::optional<std::int64_t> experts = find_integer(num_experts);
  const std::optional<TensorView> rows = find_rows(x, place);
  if (!stream || !most || *most < 1 || *most > kMaxTokens || !experts || *experts < 1 || *experts % num_ranks != 0 ||
      !rows || rows->dtype != DType::kBfloat16) {
    return nb::none();
  }
  const std::optional<TensorView> ids = find_table(topk_idx, place, DType::kInt64, {rows->extent(0), kAny});
  if (!ids || ids->extent(1) < 1 || ids->extent(1) > kMaxTopk ||
      !is_table_or_none(nb::object(stats[0]), place, DType::kInt32, *experts / num_ranks) ||
      !is_table_or_none(nb::object(stats[1]), place, DType::kInt64, num_ranks)) {
    return nb::none();
  }
  ReadLatencyDispatch call{x};
  call.in.x = *rows;
  call.in.topk_idx = *ids;
  call.options.num_experts = *experts;
  call.options.max_tokens = *most;
  call.options.slab_capacity = num_ranks * *most;
  call.options.quantize = static_cast<Quantization>(quantize);
  const bool split = keep_for_split(call, kept);
  call.options.kernel.num_sms = num_sms;
  call.options.counters.received = view_of(nb::object(stats[0]), place);
  call.column_major_scales = true;
  // Before a split call: what is raised after it takes away the Routing that it is to be received by.
  if (split) raise_known_errors(calls);
  LatencyReceived received = latency_dispatch(calls, call, *stream);
  const SlabTables tables = slab_tables(calls, received.routing);
  if (!split) raise_known_errors(calls);
  const nb::object payload =
      received.scales.is_valid() ? nb::object(nb::make_tuple(received.x, received.scales)) : received.x;
  return nb::make_tuple(payload, tables.counts, tables.tokens, tables.ranges, nb::cast(std::move(received.routing)));
}

/// -> sums
nb::object combine(const Calls& calls, nb::handle group, nb::handle x, nb::handle topk_idx, nb::handle topk_weights,
                   nb::handle handle, nb::handle out, nb::handle wait_stats, nb::handle kept, int num_sms) {
  const Place place = calls.place();
  const std::int64_t num_ranks = calls.group().num_ranks();
  const std::optional<Stream> stream = calls.allocator().stream();
  if (!stream || !nb::isinstance<nb::tuple>(handle) || nb::len(handle) != kHandleSize) return nb::none();
  static const Name link_name("_ferry_latency");
  static const Name routing_name("routing");
  const nb::object link = find_link(nb::object(handle[0]), link_name);
  if (!link.is_valid()) return nb::none();
  const nb::object owner = find_attribute(link, routing_name);
  if (!owner.is_valid()) return nb::none();
  const PlacedRouting* placed = find_routing(owner, group);
  const std::optional<std::int64_t> hidden = find_integer(nb::object(handle[kHiddenOfHandle]));
  if (placed == nullptr || !hidden) return nb::none();
  const Routing& routing = placed->routing;
  const std::int64_t num_tokens = routing.num_tokens();
  const std::int64_t num_topk = routing.num_topk();
  const std::int64_t num_local = routing.num_experts() / num_ranks;
  if (num_local < 1) return nb::none();
  const std::optional<TensorView> rows =
      find_table(x, place, DType::kBfloat16, {num_local, routing.num_recv_rows() / num_local, *hidden});
  const std::optional<TensorView> weights = find_table(topk_weights, place, DType::kFloat32, {num_tokens, num_topk});
  if (!rows || !weights || !find_table(topk_idx, place, DType::kInt64, {num_tokens, num_topk}) ||
      !is_table_or_none(wait_stats, place, DType::kInt64, num_ranks)) {
    return nb::none();
  }
  ReadLatencyCombine call{x, {*rows, *weights}};
  if (!out.is_none()) {
    const std::optional<TensorView> given = find_table(out, place, DType::kBfloat16, {num_tokens, *hidden});
    if (!given) return nb::none();
    call.out = *given;
  }
  call.options.order = CombineOrder::kRankSums;
  const bool split = keep_for_split(call, kept);
  call.options.kernel.num_sms = num_sms;
  if (split) raise_known_errors(calls);
  nb::object sums = latency_combine(calls, routing, call, *stream);
  if (!split) raise_known_errors(calls);
  return sums.is_valid() ? nb::make_tuple(sums, owner) : nb::make_tuple(nb::borrow(out), owner);
}

}  // namespace

void define_low_latency(nb::module_& module) {
  module.def("low_latency_dispatch", &dispatch, "calls"_a, "x"_a.none(), "topk_idx"_a.none(), "max_tokens"_a.none(),
             "num_experts"_a.none(), "stats"_a, "quantize"_a, "kept"_a.none(), "num_sms"_a);
  module.def("low_latency_combine", &combine, "calls"_a, "group"_a, "x"_a.none(), "topk_idx"_a.none(),
             "topk_weights"_a.none(), "handle"_a.none(), "out"_a.none(), "wait_stats"_a.none(), "kept"_a.none(),
             "num_sms"_a);
}

}  // namespace ferry::python
