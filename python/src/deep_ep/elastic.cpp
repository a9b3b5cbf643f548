/// Cached dispatches and combines of the second generation.

#include <nanobind/stl/string.h>

#include <cstdint>
#include <limits>
#include <optional>
#include <string>
#include <tuple>
#include <utility>

#include "arguments.hpp"
#include "deep_ep/buffer_calls.hpp"
#include "objects.hpp"

namespace nb = nanobind;

namespace ferry::python::deep_ep {
namespace {

/// Columns of a handle's metadata before the slots.
constexpr std::int64_t kFirstSlot = 2;

bool is_aligned(const ConstTensorView& rows) {
  constexpr std::uintptr_t kGranuleBytes = 16;
  return reinterpret_cast<std::uintptr_t>(rows.data) % kGranuleBytes == 0;
}

const Name& routing_name() {
  static const Name name("_routing");
  return name;
}

std::int64_t number_of(nb::handle handle, const Name& name) {
  return whole(get_attribute(handle, name), "handle", "a number of the handle");
}

/// T and K of a handle's ids, of any dtype: calls read the ids themselves only where they route again.
std::pair<std::int64_t, std::int64_t> shape_of_ids(const Checks& checks, nb::handle ids, Place place) {
  const std::optional<ReadTensor> read = find_tensor(ids, place);
  if (read && read->view.num_dims == 2) return {read->view.extent(0), read->view.extent(1)};
  checks.tensor(ids, "handle.topk_idx");
  const nb::object shape = ids.attr("shape");
  if (nb::len(shape) < 2) {
    checks.refuse("handle.topk_idx has shape " + repr_of(nb::steal(PySequence_List(shape.ptr()))) +
                  ", expected [T, K]");
  }
  return {nb::cast<std::int64_t>(shape[0]), nb::cast<std::int64_t>(shape[1])};
}

/// Whether the handle's dispatch waited for the counts. The same on all ranks.
bool knows_counts(nb::handle handle) {
  static const Name counts_name("num_recv_tokens_per_expert_list");
  const nb::object counts = find_attribute(handle, counts_name);
  return counts.is_valid() && nb::len(counts) > 0;
}

}  // namespace

bool BufferCalls::needs_route(nb::handle handle) const {
  if (!nb::isinstance(handle, types_.elastic_handle)) return false;
  const nb::object routing = find_attribute(handle, routing_name());
  return !routing.is_valid() || routing.is_none() || !is_of_group(routing, group_);
}

BufferCalls::ElasticHandle BufferCalls::elastic_handle_of(const Checks& checks, nb::handle handle) const {
  static const Name ids_name("topk_idx");
  static const Name metadata_name("recv_src_metadata");
  static const Name expands_name("do_expand");
  static const Name last_equal_name("_last_equal");
  static const Name num_rows_name("num_recv_tokens");
  if (!nb::isinstance(handle, types_.elastic_handle)) {
    checks.refuse("handle is a " + class_name(handle) + ", expected the EPHandle that dispatch returned");
  }
  const Place place = calls_->place();
  ElasticHandle found;
  found.expands = get_attribute(handle, expands_name).is(nb::handle(Py_True));
  found.topk_idx = get_attribute(handle, ids_name);
  std::tie(found.num_tokens, found.num_topk) = shape_of_ids(checks, found.topk_idx, place);
  found.num_rows = number_of(handle, num_rows_name);
  found.metadata = get_attribute(handle, metadata_name);
  std::optional<ReadTensor> metadata = find_tensor(found.metadata, place);
  const std::int64_t num_columns = kFirstSlot + found.num_topk;
  if (!metadata || metadata->view.dtype != DType::kInt32 || metadata->view.num_dims != 2 ||
      metadata->view.extent(0) != found.num_rows || metadata->view.extent(1) != num_columns) {
    checks.tensor(found.metadata, "handle.recv_src_metadata");
    const nb::object shape = nb::steal(PySequence_List(found.metadata.attr("shape").ptr()));
    checks.refuse("handle.recv_src_metadata is " + repr_of(shape) + " " +
                  nb::cast<std::string>(nb::str(dtype_of(found.metadata))) + ", expected [" +
                  std::to_string(found.num_rows) + ", " + std::to_string(num_columns) + "] torch.int32");
  }
  if (!is_contiguous(metadata->view)) {
    found.metadata = found.metadata.attr("contiguous")();
    metadata = find_tensor(found.metadata, place);
  }
  if (!found.expands) return found;
  found.last_equal = get_attribute(handle, last_equal_name);
  found.slots = slots_of(metadata->view, view_of(found.last_equal, place, "handle", "_last_equal"));
  return found;
}

nb::object BufferCalls::elastic_routing_of(Turn& turn, nb::handle handle, bool routes, int num_sms) const {
  static const Name ids_name("topk_idx");
  static const Name num_experts_name("num_experts");
  static const Name num_rows_name("num_recv_tokens");
  static const Name max_tokens_name("num_max_tokens_per_rank");
  if (!routes) return get_attribute(handle, routing_name());
  const bool exact = knows_counts(handle);
  RouteOptions options;
  options.num_experts = number_of(handle, num_experts_name);
  options.max_recv_rows = exact ? 0 : number_of(handle, num_rows_name);
  options.max_tokens = exact ? 0 : number_of(handle, max_tokens_name);
  options.num_sms = num_sms;
  const nb::object ids = get_attribute(handle, ids_name);
  steps_.attr("reads")(ids);
  const PlacedRouting placed =
      route(turn, Collective::kRoute, view_of(ids, calls_->place(), "route", "topk_idx"), options);
  nb::object routing = new_routing(placed, options.max_recv_rows > 0);
  set_attribute(handle, routing_name(), routing);
  return routing;
}

nb::object BufferCalls::elastic_dispatch_again(nb::handle problem, nb::handle x, nb::handle handle,
                                               nb::handle topk_weights, nb::handle given, const ElasticForm& form,
                                               bool deferred, nb::handle epilogue, nb::handle num_sms) const {
  using enum Collective;
  static const Name bounded_name("is_bounded");
  static const Name num_expanded_name("num_expanded_tokens");
  const Calls& calls = *calls_;
  const bool routes = needs_route(handle);
  Turn turn(calls, calls.allocator().any_stream(), {kDispatch}, routes && knows_counts(handle));
  if (routes) turn.add(kRoute);
  return turn.run(problem, [&]() -> nb::object {
    const Checks checks(calls, "dispatch");
    const int bound = bound_of(num_sms, "dispatch");
    Payload payload = checks.payload(x);
    ElasticHandle found = elastic_handle_of(checks, handle);
    if (!given.is_none()) steps_.attr("check_agrees")(handle, given);
    if (payload.rows_view.extent(0) != found.num_tokens) {
      checks.refuse("x has " + std::to_string(payload.rows_view.extent(0)) + " tokens, expected the " +
                    std::to_string(found.num_tokens) + " of the handle");
    }
    ReadDispatch call{payload.rows, payload.scales};
    call.in = {payload.rows_view, payload.scales_view,
               checks.table_or_none(topk_weights, "topk_weights", DType::kFloat32, {found.num_tokens, found.num_topk})};
    const nb::object event = epilogue_event(epilogue, "dispatch");
    const nb::object routing = elastic_routing_of(turn, handle, routes, bound);
    call.tables = true;
    call.weights = call.in.topk_weights.present();
    call.narrow_ids = has_narrow_ids();
    call.bounded = find_attribute(routing, bounded_name).is(nb::handle(Py_True));
    call.column_major_scales = form.column_major_scales && !found.expands;
    call.options.zero_padding = form.zero_padding && !found.expands;
    call.options.kernel.num_sms = bound;
    if (!found.expands) wait_for(event);
    Received received = dispatch_rows(turn, Calls::native_of(routing), call);
    const Received read = received;
    const nb::object metadata = found.metadata;
    const nb::object last_equal = found.last_equal;
    const ExpandedForm expanded{found.expands ? number_of(handle, num_expanded_name) : 0, form.zero_padding,
                                form.column_major_scales};
    auto finish = [this, payload = std::move(payload), found = std::move(found), received = std::move(received),
                   expanded, handle = nb::borrow(handle), event](Stream stream, const nb::object& end) mutable {
      if (found.expands) {
        wait_for(event);
        received = expand(*calls_, received, found.slots, expanded, stream);
      }
      raise_known_errors();
      const nb::object rows = payload_of(received, payload);
      const nb::object ids = or_none(received.topk_idx);
      const nb::object weights = or_none(received.topk_weights);
      return end.is_valid() ? nb::make_tuple(rows, ids, weights, handle, end)
                            : nb::make_tuple(rows, ids, weights, handle);
    };
    if (!deferred) return finish(turn.stream(), new_event());
    return defer({read.x, read.scales, read.topk_idx, read.topk_weights, metadata, last_equal},
                 [finish = std::move(finish)](Stream stream) mutable { return finish(stream, {}); });
  });
}

void BufferCalls::check_combined(const Checks& checks, const ElasticHandle& found, const TensorView& x) const {
  const std::int64_t num_rows = x.extent(0);
  if (!found.expands) {
    if (num_rows == found.num_rows) return;
    checks.refuse("x has " + std::to_string(num_rows) + " rows, expected the " + std::to_string(found.num_rows) +
                  " that were received");
  }
  // The host cannot read slots on a GPU, where kernels ignore those past the end.
  if (calls_->place().on_gpu) return;
  const std::int64_t largest = largest_slot(found.slots.slots);
  if (largest >= num_rows) {
    checks.refuse("x has " + std::to_string(num_rows) + " rows, but handle.recv_src_metadata names row " +
                  std::to_string(largest));
  }
}

nb::object BufferCalls::elastic_combine(nb::handle problem, nb::handle x, nb::handle handle, nb::handle topk_weights,
                                        nb::handle bias, bool single_rounding, bool deferred, nb::handle epilogue,
                                        nb::handle num_sms) const {
  using enum Collective;
  const Calls& calls = *calls_;
  const Place place = calls.place();
  const bool routes = needs_route(handle);
  Turn turn(calls, calls.allocator().any_stream(), {kCombine}, routes && knows_counts(handle));
  if (routes) turn.add(kRoute);
  return turn.run(problem, [&]() -> nb::object {
    const Checks checks(calls, "combine");
    ReadCombine call{x};
    call.options.kernel.num_sms = bound_of(num_sms, "combine");
    const TensorView rows = checks.rows(x, "x", DType::kBfloat16);
    const ElasticHandle found = elastic_handle_of(checks, handle);
    check_combined(checks, found, rows);
    TensorView weights;
    if (!topk_weights.is_none()) {
      weights = found.expands
                    ? checks.table(topk_weights, "topk_weights", DType::kFloat32, {rows.extent(0)})
                    : checks.table(topk_weights, "topk_weights", DType::kFloat32, {found.num_rows, found.num_topk});
    }
    const nb::list biases = read_biases(checks, bias, found.num_tokens, rows.extent(1), call.in);
    const nb::object event = epilogue_event(epilogue, "combine");
    call.in.x = rows;
    call.in.weights = weights;
    // Converted inputs, which live until the call is made.
    nb::object aligned;
    nb::object as_f32;
    nb::object biases_as_f32;
    Reduced reduced;
    const bool sums_f32 = single_rounding && (found.expands || has_several_nodes());
    if (found.expands) {
      TensorView sent = rows;
      if (!is_aligned(rows)) {
        aligned = steps_.attr("copy_of")(x);
        sent = read_tensor(aligned, place);
      }
      reduced = reduce(
          calls, {.slots = found.slots.slots, .x = sent, .weights = weights, .last_equal = found.slots.last_equal},
          sums_f32, turn.stream());
      call.x = reduced.x;
      call.in.x = reduced.x_view;
      call.in.weights = reduced.weights_view;
    } else if (sums_f32) {
      as_f32 = steps_.attr("as_f32")(x);
      call.x = as_f32;
      call.in.x = read_tensor(as_f32, place);
    }
    wait_for(event);
    if (sums_f32 && biases.size() > 0) {
      biases_as_f32 = steps_.attr("biases_as_f32")(biases);
      for (std::size_t i = 0; i < biases.size(); ++i) {
        call.in.bias[i] = read_tensor(nb::object(biases_as_f32[i]), place);
      }
    }
    const nb::object routing = elastic_routing_of(turn, handle, routes, call.options.kernel.num_sms);
    const Combined combined = combine_rows(turn, Calls::native_of(routing), call);
    const auto finish = [this, combined, sums_f32](const nb::object& end) {
      const nb::object sums = sums_f32 ? nb::object(steps_.attr("as_bf16")(combined.x)) : combined.x;
      raise_known_errors();
      return end.is_valid() ? nb::make_tuple(sums, combined.weights, end) : nb::make_tuple(sums, combined.weights);
    };
    if (!deferred) return finish(new_event());
    return defer({combined.x, combined.weights}, [finish](Stream) { return finish({}); });
  });
}

}  // namespace ferry::python::deep_ep
