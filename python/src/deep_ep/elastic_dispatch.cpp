/// A new dispatch of the second generation.

#include <algorithm>
#include <array>
#include <cstddef>
#include <exception>
#include <limits>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <utility>

#include "arguments.hpp"
#include "deep_ep/buffer_calls.hpp"
#include "deep_ep/expansion.hpp"
#include "deep_ep/handle_tables.hpp"
#include "objects.hpp"

namespace nb = nanobind;

namespace ferry::python::deep_ep {
namespace {

constexpr std::int64_t kMaxCount = std::numeric_limits<std::int32_t>::max();

/// Checked arguments of a new dispatch that give the destinations of tokens.
struct ElasticRoute {
  TensorView ids{}, weights{}, stats{};
  std::int64_t num_experts = 0;
  std::int64_t num_local = 0;
  std::int64_t max_tokens = 0;
  std::int64_t alignment = 1;
};

ElasticRoute read_elastic_route(const Calls& calls, const Checks& checks, std::int64_t num_tokens,
                                const ElasticRouteArguments& given, DType ids) {
  if (given.topk_idx.is_none()) checks.refuse("topk_idx and handle are None, expected one of them");
  if (given.num_experts.is_none()) {
    checks.refuse("num_experts is None, expected the number of experts of all ranks");
  }
  ElasticRoute route;
  route.num_experts = checks.num_experts(given.num_experts);
  route.num_local = route.num_experts / calls.group().num_ranks();
  const Choice choice = checks.choice(given.topk_idx, given.topk_weights, num_tokens, ids);
  route.ids = choice.ids;
  route.weights = choice.weights;
  route.alignment = checks.size(given.alignment, "expert_alignment");
  route.max_tokens = index_of(given.num_max_tokens);
  const std::int64_t most = index_of(given.most_tokens);
  if (route.max_tokens < 1 || (most > 0 && route.max_tokens > most)) {
    checks.refuse("num_max_tokens_per_rank is " + repr_of(given.num_max_tokens) + ", expected " +
                  (most > 0 ? "1 to " + std::to_string(most) + ", the buffer's"
                            : std::string("at least 1, here or from the buffer")));
  }
  if (num_tokens > route.max_tokens) {
    checks.refuse("x has " + std::to_string(num_tokens) + " tokens, expected at most " +
                  std::to_string(route.max_tokens) + " (num_max_tokens_per_rank)");
  }
  route.stats = checks.expert_stats(given.expert_stats, route.num_local);
  // Bounds that keep the sums below within 64 bits.
  if (route.alignment > kMaxCount) {
    checks.refuse("expert_alignment is " + repr_of(given.alignment) + ", expected 1 to " + std::to_string(kMaxCount));
  }
  if (route.max_tokens > kMaxCount / calls.group().num_ranks()) {
    checks.refuse("num_max_tokens_per_rank is " + repr_of(given.num_max_tokens) + ", expected at most " +
                  std::to_string(kMaxCount / calls.group().num_ranks()) + " for " +
                  std::to_string(calls.group().num_ranks()) + " ranks");
  }
  return route;
}

/// Sum of counts, each rounded up.
std::int64_t sum_of_aligned(std::span<const std::int32_t> counts, std::int64_t alignment) {
  std::int64_t sum = 0;
  for (const std::int64_t count : counts) sum += (count + alignment - 1) / alignment * alignment;
  return sum;
}

/// Most rows that an expanded output can need. May exceed 31 bits, which the allocation or the library then refuses.
std::int64_t most_expanded(std::int64_t num_rows, std::int64_t num_topk, const ElasticRoute& route) {
  const std::int64_t most = num_rows * std::min(num_topk, route.num_local) + (route.alignment - 1) * route.num_local;
  return (most + route.alignment - 1) / route.alignment * route.alignment;
}

/// Makes the tensors that a dispatch needs while route waits. A failure is left to the later attempt, which reports it.
/// Takes the GIL.
EarlyTables make_early(HandleTables& tables, EarlyOutputs& outputs) noexcept {
  const nb::gil_scoped_acquire held;
  try {
    outputs.make();
    tables.make();
  } catch (const std::exception&) {
    // The later attempt reports the failure.
  }
  return {};
}

}  // namespace

/// Rows of a new dispatch by token, and what the last part of the call makes of them.
struct BufferCalls::ElasticArrival {
  Payload payload{};
  ElasticRoute to{};
  ElasticForm form{};
  HandleTables tables;
  PlacedRouting placed{};
  Received received{};
  nb::object epilogue_event{};
  nb::object topk_idx{}, num_experts{}, num_max_tokens{}, alignment{}, num_sms{};  ///< of the handle
};

nb::object BufferCalls::elastic_dispatch(nb::handle problem, nb::handle x, const ElasticRouteArguments& given,
                                         const ElasticForm& form, bool deferred, nb::handle epilogue,
                                         nb::handle num_sms) const {
  using enum Collective;
  const Calls& calls = *calls_;
  Turn turn(calls, calls.allocator().any_stream(), {kRoute, kDispatch}, form.exact);
  return turn.run(problem, [&]() -> nb::object {
    const Checks checks(calls, "dispatch");
    const int bound = bound_of(num_sms, "dispatch");
    const Payload payload = checks.payload(x);
    const ElasticRoute to = read_elastic_route(calls, checks, payload.rows_view.extent(0), given, ids_);
    const nb::object event = epilogue_event(epilogue, "dispatch");
    const std::int64_t num_topk = to.ids.extent(1);
    const std::int64_t most_rows = to.max_tokens * calls.group().num_ranks();
    RouteOptions options;
    options.num_experts = to.num_experts;
    options.counters.received = to.stats;
    options.num_sms = bound;
    if (!form.exact) {
      options.max_tokens = to.max_tokens;
      options.max_recv_rows = most_rows;
    }
    ReadDispatch call{payload.rows, payload.scales};
    call.in = {payload.rows_view, payload.scales_view, to.weights};
    call.tables = true;
    call.weights = to.weights.present();
    call.narrow_ids = has_narrow_ids();
    call.bounded = !form.exact;
    call.column_major_scales = form.column_major_scales && !form.expand;
    call.options.zero_padding = form.zero_padding && !form.expand;
    call.options.kernel.num_sms = bound;
    EarlyOutputs outputs(calls, call, static_cast<int>(num_topk));
    const std::int64_t num_rows = form.exact ? to.ids.extent(0) * calls.group().num_ranks() : options.max_recv_rows;
    // The tables copy ids of 64 bits only.
    const bool copies_ids = form.copy_ids && !has_narrow_ids();
    const nb::object kept_ids =
        form.copy_ids && !copies_ids ? nb::object(steps_.attr("copy_of")(given.topk_idx)) : nb::borrow(given.topk_idx);
    // The table of sources of an exact route has exactly the rows that arrive.
    HandleTables tables(calls,
                        {.num_rows = num_rows,
                         .num_topk = num_topk,
                         .num_local = to.num_local,
                         .max_tokens = to.max_tokens,
                         .alignment = to.alignment,
                         .expands = form.expand},
                        copies_ids ? ConstTensorView(to.ids) : ConstTensorView(), !form.exact);
    const PlacedRouting placed = route(turn, kRoute, to.ids, options, [&] { return make_early(tables, outputs); });
    const Routing& routing = placed.routing;
    if (!tables.is_made()) tables.make(routing.num_recv_rows());
    if (call.bounded) call.out.source = tables.source();
    if (!form.expand) wait_for(event);
    Received received = dispatch_rows(turn, routing, call, outputs.get(routing.num_recv_rows()));
    ElasticArrival arrived{.payload = payload,
                           .to = to,
                           .form = form,
                           .tables = std::move(tables),
                           .placed = placed,
                           .received = std::move(received),
                           .epilogue_event = event,
                           .topk_idx = kept_ids,
                           .num_experts = nb::borrow(given.num_experts),
                           .num_max_tokens = nb::borrow(given.num_max_tokens),
                           .alignment = nb::borrow(given.alignment),
                           .num_sms = nb::borrow(num_sms)};
    if (!deferred) return finish_elastic(arrived, turn.stream(), new_event());
    const auto kept = std::make_shared<ElasticArrival>(std::move(arrived));
    return defer({kept->received.x, kept->received.scales, kept->received.topk_idx, kept->received.topk_weights,
                  kept->tables.origin(), kept->tables.source_table(), kept->tables.rows_through_rank(),
                  kept->tables.expert_ends(), kept->tables.rows_of_expert(), kept->tables.last_equal()},
                 [this, kept](Stream stream) { return finish_elastic(*kept, stream, {}); });
  });
}

nb::object BufferCalls::finish_elastic(ElasticArrival& arrived, Stream stream, const nb::object& event) const {
  const Calls& calls = *calls_;
  const Routing& routing = arrived.placed.routing;
  const ElasticForm& form = arrived.form;
  const ElasticRoute& to = arrived.to;
  HandleTables& tables = arrived.tables;
  Received& received = arrived.received;
  const std::int64_t num_topk = to.ids.extent(1);
  if (form.expand) wait_for(arrived.epilogue_event);
  tables.fill({.source = form.exact ? routing.source() : ConstTensorView(tables.source()),
               .topk_idx = read_tensor(received.topk_idx, calls.place()),
               .rows_per_expert = routing.num_rows_per_local_expert_view()},
              stream);
  const nb::list counts = form.exact ? aligned_counts(routing.num_rows_per_local_expert(), to.alignment) : nb::list();
  std::int64_t num_expanded = 0;
  if (form.expand) {
    num_expanded = form.exact ? sum_of_aligned(routing.num_rows_per_local_expert(), to.alignment)
                              : most_expanded(routing.num_recv_rows(), num_topk, to);
    received =
        expand(calls, received,
               slots_of(read_tensor(tables.origin(), calls.place()), read_tensor(tables.last_equal(), calls.place())),
               {num_expanded, form.zero_padding, form.column_major_scales}, stream);
  }
  const nb::object slots =
      tensor_on(routing.slots(), calls.place(), std::make_shared<Routing>(routing), calls.allocator().tensor_type());
  raise_known_errors();

  nb::object handle = bare_object(types_.elastic_handle);
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
                                                    arrived.num_experts,
                                                    arrived.alignment,
                                                    arrived.num_max_tokens,
                                                    arrived.num_sms,
                                                    tables.ids().is_valid() ? tables.ids() : arrived.topk_idx,
                                                    nb::int_(routing.num_recv_rows()),
                                                    nb::int_(num_expanded),
                                                    counts,
                                                    tables.rows_through_rank(),
                                                    tables.expert_ends(),
                                                    or_none(tables.rows_of_expert()),
                                                    tables.origin(),
                                                    slots,
                                                    new_routing(arrived.placed, !form.exact),
                                                    or_none(tables.last_equal())};
  for (std::size_t i = 0; i < names.size(); ++i) set_attribute(handle, names[i], values[i]);
  const nb::object rows = payload_of(received, arrived.payload);
  const nb::object ids = or_none(received.topk_idx);
  const nb::object weights = or_none(received.topk_weights);
  return event.is_valid() ? nb::make_tuple(rows, ids, weights, handle, event)
                          : nb::make_tuple(rows, ids, weights, handle);
}

}  // namespace ferry::python::deep_ep
