/// Throughput mode of the first generation: layouts, cached dispatches and combines.

#include <array>
#include <cstdint>
#include <span>
#include <string>
#include <utility>

#include "deep_ep/buffer_calls.hpp"
#include "errors.hpp"
#include "ferry/dispatch_layout.hpp"

namespace nb = nanobind;

namespace ferry::python::deep_ep {
namespace {

/// Refuses ids in host memory that the dispatch with this layout would refuse. Ids on a GPU cost a wait to read.
void check_ids(const Checks& checks, const TensorView& ids, std::int64_t num_experts) {
  const bool wide = ids.dtype == DType::kInt64;
  const std::int64_t num_topk = ids.extent(1);
  for (std::int64_t i = 0; i < ids.num_elements(); ++i) {
    const std::int64_t id =
        wide ? static_cast<const std::int64_t*>(ids.data)[i] : static_cast<const std::int32_t*>(ids.data)[i];
    if (id >= -1 && id < num_experts) continue;
    checks.refuse("topk_idx[" + std::to_string(i / num_topk) + ", " + std::to_string(i % num_topk) + "] is " +
                  std::to_string(id) + ", expected -1 (no expert) or an expert from 0 to " +
                  std::to_string(num_experts - 1));
  }
}

}  // namespace

nb::object BufferCalls::layout(nb::handle problem, nb::handle topk_idx, nb::handle num_experts,
                               int ranks_per_node) const {
  const Calls& calls = *calls_;
  const Place place = calls.place();
  const std::int64_t num_ranks = calls.group().num_ranks();
  Turn::raise_if_given(problem);
  const Checks checks(calls, "get_dispatch_layout");
  const TensorView ids = checks.table(topk_idx, "topk_idx", ids_, {"T", "K"});
  const std::int64_t experts = checks.num_experts(num_experts);
  if (!place.on_gpu) check_ids(checks, ids, experts);
  const TableTypes& types = calls.allocator().types();
  const std::int64_t num_nodes = (num_ranks + ranks_per_node - 1) / ranks_per_node;
  const std::array wanted = {Wanted{types.i32, {num_ranks}, 1}, Wanted{types.i32, {experts}, 1},
                             Wanted{types.boolean, {ids.extent(0), num_ranks}}, Wanted{types.i32, {num_nodes}, 1}};
  const bool several = num_nodes > 1;
  std::array<nb::object, wanted.size()> made;
  calls.allocator().make_all(std::span(wanted).first(several ? wanted.size() : wanted.size() - 1), made);
  DispatchLayout out;
  out.num_tokens_per_rank = read_tensor(made[0], place);
  out.num_tokens_per_expert = read_tensor(made[1], place);
  out.is_token_in_rank = read_tensor(made[2], place);
  if (several) out.num_tokens_per_node = read_tensor(made[3], place);
  DispatchLayoutOptions options;
  options.num_experts = experts;
  options.num_ranks = static_cast<int>(num_ranks);
  options.ranks_per_node = ranks_per_node;
  options.backend = place.on_gpu ? "cuda" : "cpu";
  options.device = place.on_gpu ? place.device : -1;
  const KnownMemory known;
  raise_if_error(dispatch_layout(ids, options, out, calls.allocator().any_stream()));
  raise_known_errors();
  return nb::make_tuple(made[0], several ? made[3] : nb::none(), made[1], made[2], new_event());
}

nb::object BufferCalls::dispatch_again(nb::handle problem, nb::handle x, nb::handle handle, nb::handle topk_idx,
                                       nb::handle topk_weights, nb::handle chunk_tokens, nb::handle num_sms) const {
  using enum Collective;
  const Stream stream = calls_->allocator().any_stream();
  Plan plan = plan_of(handle);
  Turn turn = plan.routes ? Turn(*calls_, stream, {kRoute, kDispatch}, false) : Turn(*calls_, stream, {kDispatch});
  return turn.run(problem, [&]() -> nb::object {
    const Checks checks(*calls_, "dispatch");
    const int bound = bound_of(num_sms, "dispatch");
    for (const auto& [name, tensor] : {std::pair{"topk_idx", topk_idx}, std::pair{"topk_weights", topk_weights}}) {
      if (tensor.is_none()) continue;
      checks.refuse(std::string(name) + " is given together with a handle, expected one of the two");
    }
    const Payload payload = checks.payload(x);
    const HandleTensors tensors = tensors_of(checks, handle);
    if (payload.rows_view.extent(0) != tensors.num_tokens) {
      checks.refuse("x has " + std::to_string(payload.rows_view.extent(0)) + " tokens, expected the " +
                    std::to_string(tensors.num_tokens) + " of the handle");
    }
    const Routing& routing = routing_of(turn, plan, checks, handle, tensors, bound);
    ReadDispatch call{payload.rows, payload.scales};
    call.in.x = payload.rows_view;
    call.in.scales = payload.scales_view;
    call.options.kernel.num_sms = bound;
    call.options.kernel.chunk_tokens = chunk_of(chunk_tokens);
    Received received = dispatch_rows(turn, routing, call);
    if (payload.scales_have_one_dim) received.scales = received.scales.attr("squeeze")(1);
    // A bounded route of no rows has one.
    if (tensors.num_rows < routing.num_recv_rows()) {
      received.x = received.x.attr("narrow")(0, 0, tensors.num_rows);
      if (payload.has_scales) received.scales = received.scales.attr("narrow")(0, 0, tensors.num_rows);
    }
    raise_known_errors();
    return nb::make_tuple(payload_of(received, payload), nb::none(), nb::none(), nb::none(), nb::none(), new_event());
  });
}

nb::object BufferCalls::combine(nb::handle problem, nb::handle x, nb::handle handle, nb::handle topk_weights,
                                nb::handle bias, nb::handle chunk_tokens, nb::handle num_sms) const {
  using enum Collective;
  const Stream stream = calls_->allocator().any_stream();
  Plan plan = plan_of(handle);
  // Weights are sent as rows where the routing does not have their K.
  const bool as_rows = !topk_weights.is_none() && !plan.knows_topk;
  Turn turn(*calls_, stream, {kCombine}, false);
  if (as_rows) turn.add(kCombine);
  if (plan.routes) turn.add(kRoute);
  return turn.run(problem, [&]() -> nb::object {
    const Checks checks(*calls_, "combine");
    ReadCombine call{x};
    call.options.kernel.num_sms = bound_of(num_sms, "combine");
    call.options.kernel.chunk_tokens = chunk_of(chunk_tokens);
    const TensorView rows = checks.rows(x, "x", DType::kBfloat16);
    const HandleTensors tensors = tensors_of(checks, handle);
    if (rows.extent(0) != tensors.num_rows) {
      checks.refuse("x has " + std::to_string(rows.extent(0)) + " rows, expected the " +
                    std::to_string(tensors.num_rows) + " that were received");
    }
    TensorView weights;
    if (!topk_weights.is_none()) {
      const Extent num_topk = as_rows || !plan.routing.is_valid()
                                  ? Extent("K")
                                  : Extent(std::int64_t{Calls::native_of(plan.routing).num_topk()});
      weights = checks.table(topk_weights, "topk_weights", DType::kFloat32, {tensors.num_rows, num_topk});
    }
    const nb::list biases = read_biases(checks, bias, tensors.num_tokens, rows.extent(1), call.in);
    const Routing& routing = routing_of(turn, plan, checks, handle, tensors, call.options.kernel.num_sms);
    call.in.x = rows;
    nb::object sent_weights = nb::borrow(topk_weights);
    nb::object zeros;
    if (tensors.num_rows < routing.num_recv_rows()) {  // a bounded route of no rows has one
      zeros = steps_.attr("zero_rows")(x, routing.num_recv_rows());
      call.in.x = read_tensor(zeros, calls_->place());
      if (weights.present()) sent_weights = steps_.attr("zero_rows")(topk_weights, routing.num_recv_rows());
      if (weights.present()) weights = read_tensor(sent_weights, calls_->place());
    }
    if (!as_rows) call.in.weights = weights;
    Combined combined = combine_rows(turn, routing, call);
    if (as_rows) {
      const nb::object padded = steps_.attr("padded_weights")(sent_weights);
      ReadCombine second{padded};
      second.in.x = read_tensor(padded, calls_->place());
      second.options = call.options;
      const Combined sums = combine_rows(turn, routing, second);
      combined.weights = steps_.attr("first_columns")(sums.x, weights.extent(1));
    }
    raise_known_errors();
    return nb::make_tuple(combined.x, combined.weights, new_event());
  });
}

}  // namespace ferry::python::deep_ep
