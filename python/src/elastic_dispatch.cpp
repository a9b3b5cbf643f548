/// A new dispatch of the second generation.

#include <algorithm>
#include <array>
#include <cstddef>
#include <exception>
#include <limits>
#include <memory>
#include <optional>
#include <span>
#include <utility>

#include "buffer_calls.hpp"
#include "errors.hpp"
#include "expansion.hpp"
#include "handle_tables.hpp"
#include "objects.hpp"

namespace nb = nanobind;

namespace ferry::python {
namespace {

constexpr std::int64_t kMaxCount = std::numeric_limits<std::int32_t>::max();

struct ElasticRoute {
  TensorView ids{}, weights{}, stats{};
  std::int64_t num_experts = 0;
  std::int64_t num_local = 0;
  std::int64_t max_tokens = 0;
  std::int64_t alignment = 1;
};

struct ElasticRouteArguments {
  nb::handle topk_idx{}, topk_weights{}, expert_stats{}, num_experts{}, num_max_tokens{}, most_tokens{}, alignment{};
};

std::optional<ElasticRoute> find_route(const Calls& calls, std::int64_t num_tokens,
                                       const ElasticRouteArguments& given) {
  const Place place = calls.place();
  const std::int64_t num_ranks = calls.group().num_ranks();
  const std::optional<TensorView> ids = find_table(given.topk_idx, place, DType::kInt64, {num_tokens, kAny});
  if (!ids || ids->extent(1) < 1 || ids->extent(1) > kMaxTopk) return std::nullopt;
  const std::optional<std::int64_t> experts = find_integer(given.num_experts);
  const std::optional<std::int64_t> tokens = find_integer(given.num_max_tokens);
  const std::optional<std::int64_t> most = find_integer(given.most_tokens);
  const std::optional<std::int64_t> alignment = find_integer(given.alignment);
  if (!experts || *experts < 1 || *experts % num_ranks != 0 || !alignment || *alignment < 1 ||
      *alignment > kMaxCount / (*experts / num_ranks) || !tokens || *tokens < 1 || *tokens < num_tokens ||
      *tokens > kMaxCount / num_ranks || !most || (*most > 0 && *tokens > *most)) {
    return std::nullopt;
  }
  ElasticRoute route{.ids = *ids,
                     .num_experts = *experts,
                     .num_local = *experts / num_ranks,
                     .max_tokens = *tokens,
                     .alignment = *alignment};
  if (!given.topk_weights.is_none()) {
    const std::optional<TensorView> weights =
        find_table(given.topk_weights, place, DType::kFloat32, {num_tokens, ids->extent(1)});
    if (!weights) return std::nullopt;
    route.weights = *weights;
  }
  if (!given.expert_stats.is_none()) {
    const std::optional<TensorView> stats = find_table(given.expert_stats, place, DType::kInt32, {route.num_local});
    if (!stats) return std::nullopt;
    route.stats = *stats;
  }
  return route;
}

nb::object or_none(nb::object value) { return value.is_valid() ? std::move(value) : nb::none(); }

/// Of counts that are rounded up.
std::int64_t sum_of(std::span<const std::int32_t> counts, std::int64_t alignment) {
  std::int64_t sum = 0;
  for (const std::int64_t count : counts) sum += (count + alignment - 1) / alignment * alignment;
  return sum;
}

/// Rows of an expanded output that is as long as it could have to be; more than numbers of rows count if there are too
/// many.
std::int64_t most_expanded(std::int64_t num_rows, std::int64_t num_topk, const ElasticRoute& route) {
  const std::int64_t most = num_rows * std::min(num_topk, route.num_local) + (route.alignment - 1) * route.num_local;
  return (most + route.alignment - 1) / route.alignment * route.alignment;
}

/// What can be done for a dispatch while route waits. What fails here fails again, and is reported, when it is needed.
/// Takes the GIL.
EarlyTables make_early(HandleTables& tables, EarlyOutputs& outputs) noexcept {
  const nb::gil_scoped_acquire held;
  try {
    outputs.make();
    tables.make();
  } catch (const std::exception&) {
    // As if it had not been tried.
  }
  return {};
}

}  // namespace

nb::object BufferCalls::elastic_dispatch(nb::handle x, nb::handle topk_idx, nb::handle topk_weights,
                                         nb::handle expert_stats, nb::handle num_experts, nb::handle num_max_tokens,
                                         nb::handle most_tokens, nb::handle alignment, const ElasticForm& form,
                                         nb::handle num_sms) const {
  const Calls& calls = *calls_;
  const std::optional<Stream> stream = calls.allocator().stream();
  const std::optional<int> bound = find_bound(num_sms);
  const std::optional<Payload> payload = find_payload(x, calls.place());
  if (!stream || !bound || !payload) return nb::none();
  const std::optional<ElasticRoute> route =
      find_route(calls, payload->rows_view.extent(0),
                 {topk_idx, topk_weights, expert_stats, num_experts, num_max_tokens, most_tokens, alignment});
  if (!route) return nb::none();
  const std::int64_t num_topk = route->ids.extent(1);
  const std::int64_t most_rows = route->max_tokens * calls.group().num_ranks();
  if (form.expand && most_expanded(most_rows, num_topk, *route) > kMaxCount) return nb::none();
  RouteOptions options;
  options.num_experts = route->num_experts;
  options.counters.received = route->stats;
  options.num_sms = *bound;
  if (!form.exact) {
    options.max_tokens = route->max_tokens;
    options.max_recv_rows = most_rows;
  }
  ReadDispatch call{payload->rows, payload->scales};
  call.in = {payload->rows_view, payload->scales_view, route->weights};
  call.tables = true;
  call.weights = route->weights.present();
  call.bounded = !form.exact;
  call.column_major_scales = form.column_major_scales && !form.expand;
  call.options.zero_padding = form.zero_padding && !form.expand;
  call.options.kernel.num_sms = *bound;
  EarlyOutputs outputs(calls, call, static_cast<int>(num_topk));
  const std::int64_t num_rows = form.exact ? route->ids.extent(0) * calls.group().num_ranks() : options.max_recv_rows;
  // An exact route's own table of sources has no other rows than those that come.
  HandleTables tables(calls,
                      {.num_rows = num_rows,
                       .num_topk = num_topk,
                       .num_local = route->num_local,
                       .max_tokens = route->max_tokens,
                       .alignment = route->alignment,
                       .expands = form.expand},
                      form.copy_ids ? ConstTensorView(route->ids) : ConstTensorView(), !form.exact);
  Result<Routing> routed = [&] {
    const CallScope scope;
    return calls.group().route({route->ids, {}}, options, *stream, [&] { return make_early(tables, outputs); });
  }();
  const PlacedRouting placed{value_or_raise(std::move(routed)), calls.place()};
  const Routing& routing = placed.routing;
  try {
    if (!tables.is_made()) tables.make(routing.num_recv_rows());
    if (call.bounded) call.out.source = tables.source();
  } catch (...) {
    calls.refuse_dispatch(routing, *stream);
    throw;
  }
  Received received = calls.dispatch(routing, call, *stream, outputs.get(routing.num_recv_rows()));
  tables.fill({.source = form.exact ? routing.source() : ConstTensorView(tables.source()),
               .topk_idx = read_tensor(received.topk_idx, calls.place()),
               .rows_per_expert = routing.num_rows_per_local_expert_view()},
              *stream);
  const nb::list counts = form.exact ? aligned_counts(routing, route->alignment) : nb::list();
  std::int64_t num_expanded = 0;
  if (form.expand) {
    num_expanded = form.exact ? sum_of(routing.num_rows_per_local_expert(), route->alignment)
                              : most_expanded(routing.num_recv_rows(), num_topk, *route);
    received =
        expand(calls, received,
               slots_of(read_tensor(tables.origin(), calls.place()), read_tensor(tables.last_equal(), calls.place())),
               {num_expanded, form.zero_padding, form.column_major_scales}, *stream);
  }
  const nb::object slots =
      tensor_on(routing.slots(), calls.place(), std::make_shared<Routing>(routing), calls.allocator().tensor_type());
  raise_known_errors(calls);

  nb::object handle = bare_object(elastic_handle_);
  static const std::array names{Name("do_expand"),
                                Name("num_experts"),
                                Name("expert_alignment"),
                                Name("num_max_tokens_per_rank"),
                                Name("num_sms"),
                                Name("topk_idx"),
                                Name("num_recv_tokens"),
                                Name("num_expanded_tokens"),
                                Name("num_recv_tokens_per_expert_list"),
                                Name("psum_num_recv_tokens_per_scaleup_rank"),
                                Name("psum_num_recv_tokens_per_expert"),
                                Name("num_unaligned_recv_tokens_per_expert"),
                                Name("recv_src_metadata"),
                                Name("dst_buffer_slot_idx"),
                                Name("_routing"),
                                Name("_last_equal")};
  const std::array<nb::object, names.size()> values{nb::bool_(form.expand),
                                                    nb::borrow(num_experts),
                                                    nb::borrow(alignment),
                                                    nb::borrow(num_max_tokens),
                                                    nb::borrow(num_sms),
                                                    tables.ids().is_valid() ? tables.ids() : nb::borrow(topk_idx),
                                                    nb::int_(routing.num_recv_rows()),
                                                    nb::int_(num_expanded),
                                                    counts,
                                                    tables.rows_through_rank(),
                                                    tables.expert_ends(),
                                                    or_none(tables.rows_of_expert()),
                                                    tables.origin(),
                                                    slots,
                                                    new_routing(placed, !form.exact),
                                                    or_none(tables.last_equal())};
  for (std::size_t i = 0; i < names.size(); ++i) set_attribute(handle, names[i], values[i]);
  return nb::make_tuple(payload_of(received), or_none(received.topk_idx), or_none(received.topk_weights), handle,
                        new_event());
}

}  // namespace ferry::python
