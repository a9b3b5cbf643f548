/// Calls of latency mode as deep_ep's buffers make them.

#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <tuple>
#include <utility>

#include "arguments.hpp"
#include "deep_ep/buffer_calls.hpp"
#include "latency.hpp"
#include "objects.hpp"

namespace nb = nanobind;

namespace ferry::python::deep_ep {
namespace {

constexpr std::size_t kHandleSize = 5;
constexpr std::size_t kHiddenOfHandle = 3;

/// Quantization of a dispatch's flags.
Quantization quantization_of(const Checks& checks, const FormOfSlab& form) {
  if (!form.use_fp8) return Quantization::kNone;
  if (form.use_ue8m0 && !form.round_scale) {
    checks.refuse("use_ue8m0 is True and round_scale is False, expected True for both");
  }
  if (form.use_ue8m0) return Quantization::kFp8Ue8m0;
  return form.round_scale ? Quantization::kFp8PowerOfTwo : Quantization::kFp8;
}

/// Tensors that a hook keeps; None for a call that is not split.
nb::object kept_by(nb::handle hook) {
  static const Name kept_name("kept");
  return hook.is_none() ? nb::none() : get_attribute(hook, kept_name);
}

/// Makes an operation that may be split. One that fails before it has sent keeps no tensors.
template <typename Operation>
nb::object run_half(Turn& turn, nb::handle problem, nb::handle hook, Operation operation) {
  try {
    return turn.run(problem, operation);
  } catch (...) {
    if (!hook.is_none() && turn.has_sent_nothing()) hook.attr("forget")();
    throw;
  }
}

/// Link to the Routing, on the storage of a handle's first tensor.
const Name& link_name() {
  static const Name name("_ferry_latency");
  return name;
}

const Name& routing_name() {
  static const Name name("routing");
  return name;
}

const Name& memory_name() {
  static const Name name("combine_memory");
  return name;
}

}  // namespace

void BufferCalls::made_half(nb::handle hook, nb::handle routing, Stream stream) const {
  static const Name native_name("_native");
  static const Name dropped_name("calls_dropped");
  static const Name stream_name("stream");
  static const Name calls_name("_calls");
  if (hook.is_none()) {
    if (PyObject_IsTrue(find_attribute(in_flight_, dropped_name).ptr()) == 1) in_flight_.attr("made_whole")();
    return;
  }
  set_attribute(hook, native_name, find_attribute(routing, native_name));
  set_attribute(hook, stream_name, nb::cast(reinterpret_cast<std::uintptr_t>(stream.handle)));
  set_attribute(hook, calls_name, nb::find(*this));
}

void BufferCalls::received_on(std::uintptr_t stream) const {
  const Stream current = calls_->allocator().any_stream();
  if (reinterpret_cast<std::uintptr_t>(current.handle) != stream) steps_.attr("follow")(stream);
  raise_known_errors();
}

nb::object BufferCalls::low_latency_dispatch(nb::handle problem, nb::handle x, nb::handle topk_idx,
                                             nb::handle max_tokens, nb::handle num_experts, nb::handle expert_stats,
                                             nb::handle wait_stats, nb::handle hook, const FormOfSlab& form) const {
  const Calls& calls = *calls_;
  const int num_ranks = calls.group().num_ranks();
  const nb::object kept = kept_by(hook);
  Turn turn(calls, calls.allocator().any_stream(), {Collective::kLatencyDispatch});
  return run_half(turn, problem, hook, [&]() -> nb::object {
    const Checks checks(calls, "low_latency_dispatch");
    ReadLatencyDispatch call{x};
    const TensorView rows = checks.rows(x, "x", DType::kBfloat16);
    call.in.x = rows;
    call.in.topk_idx = checks.choice(topk_idx, nb::none(), rows.extent(0), ids_).ids;
    call.options.num_experts = checks.num_experts(num_experts);
    call.options.counters.received = checks.expert_stats(expert_stats, call.options.num_experts / num_ranks);
    call.options.wait_times_ns = checks.wait_stats(wait_stats, "dispatch_wait_recv_cost_stats");
    call.options.quantize = quantization_of(checks, form);
    call.options.max_tokens = whole_32(max_tokens, "latency_dispatch", "max_tokens");
    call.options.slab_capacity = whole_slab(num_ranks, call.options.max_tokens);
    call.column_major_scales = true;
    const bool split = keep_for_split(call, kept);
    // Before a split call: an error raised after it would lose the Routing, which the hook needs to receive.
    if (split) raise_known_errors();
    LatencyReceived received =
        turn.make(Collective::kLatencyDispatch, [&] { return latency_dispatch(calls, call, turn.stream()); });
    const nb::object routing = new_routing(received.routing, false);
    made_half(hook, routing, turn.stream());
    const SlabTables tables = slab_tables(calls, received.routing);
    const nb::object link = bare_object(types_.latency_link);
    set_attribute(link, routing_name(), routing);
    set_attribute(link, memory_name(), nb::none());
    attach_link(tables.tokens, link_name(), link);
    // Replays of a graph use the routings of its capture, and no rank learns which replay is the last.
    if (calls.allocator().is_capturing()) captured_.attr("append")(routing);
    if (!split) raise_known_errors();
    const nb::object payload =
        received.scales.is_valid() ? nb::object(nb::make_tuple(received.x, received.scales)) : received.x;
    const nb::tuple handle = nb::make_tuple(tables.tokens, tables.ranges, max_tokens, rows.extent(1), num_experts);
    return nb::make_tuple(payload, tables.counts, handle, new_event(), hook);
  });
}

BufferCalls::Slab BufferCalls::find_slab(nb::handle handle, const char* operation) const {
  const Checks checks(*calls_, operation);
  const std::string expected =
      "expected the " + std::to_string(kHandleSize) + " values that low_latency_dispatch returned";
  if (!is_sequence(handle) || nb::len(handle) != kHandleSize) {
    checks.refuse("handle is " +
                  (is_sequence(handle) ? std::to_string(nb::len(handle)) + " values" : "a " + class_name(handle)) +
                  ", " + expected);
  }
  const nb::object first = handle[0];
  if (!nb::isinstance(first, calls_->allocator().tensor_type())) {
    checks.refuse("handle[0] is a " + class_name(first) + ", " + expected);
  }
  Slab slab{find_link(first, link_name())};
  if (!slab.link.is_valid()) {
    checks.refuse(
        "handle[0] is not the tensor that low_latency_dispatch returned, perhaps a copy of it; pass the handle as it "
        "was returned");
  }
  slab.routing = get_attribute(slab.link, routing_name());
  if (!is_of_group(slab.routing, group_)) {
    checks.refuse("the handle was returned by another buffer; call low_latency_dispatch on this one");
  }
  const nb::object hidden = handle[kHiddenOfHandle];
  slab.hidden = index_of(hidden);
  if (slab.hidden < 1) {
    refuse("handle[3] (hidden) is " + repr_of(hidden) + ", expected an integer of at least 1");
  }
  const Routing& routing = Calls::native_of(slab.routing);
  slab.num_local = routing.num_experts() / calls_->group().num_ranks();
  slab.num_rows = slab.num_local > 0 ? routing.num_recv_rows() / slab.num_local : 0;
  return slab;
}

void BufferCalls::check_latency_shape(nb::handle max_tokens, nb::handle hidden, nb::handle num_experts,
                                      const char* operation) const {
  const Checks checks(*calls_, operation);
  checks.size(max_tokens, "num_max_dispatch_tokens_per_rank");
  checks.size(hidden, "hidden");
  checks.num_experts(num_experts);
}

nb::object BufferCalls::slab_of(nb::handle handle, const char* operation) const {
  const Slab slab = find_slab(handle, operation);
  return nb::make_tuple(slab.link, nb::make_tuple(slab.num_local, slab.num_rows, slab.hidden));
}

nb::object BufferCalls::low_latency_combine(nb::handle problem, nb::handle x, nb::handle topk_idx,
                                            nb::handle topk_weights, nb::handle handle, nb::handle out,
                                            nb::handle wait_stats, bool zero_copy, nb::handle hook,
                                            nb::handle overlap) const {
  const char* const operation = "low_latency_combine";
  const Calls& calls = *calls_;
  const nb::object kept = kept_by(hook);
  Turn turn(calls, calls.allocator().any_stream(), {Collective::kLatencyCombine});
  return run_half(turn, problem, hook, [&]() -> nb::object {
    const Checks checks(calls, operation);
    const Slab slab = find_slab(handle, operation);
    const Routing& routing = Calls::native_of(slab.routing);
    const std::int64_t num_tokens = routing.num_tokens();
    const std::int64_t num_topk = routing.num_topk();
    ReadLatencyCombine call{x};
    call.in.x = checks.table(x, "x", DType::kBfloat16, {slab.num_local, slab.num_rows, slab.hidden});
    checks.table(topk_idx, "topk_idx", ids_, {num_tokens, num_topk});
    call.in.topk_weights = checks.table(topk_weights, "topk_weights", DType::kFloat32, {num_tokens, num_topk});
    call.out = checks.table_or_none(out, "out", DType::kBfloat16, {num_tokens, slab.hidden});
    call.options.wait_times_ns = checks.wait_stats(wait_stats, "combine_wait_recv_cost_stats");
    if (zero_copy) call.in.x = combine_memory_of(checks, slab, kept);
    if (!overlap.is_none()) read_overlap(checks, slab, overlap, call);
    call.options.order = CombineOrder::kRankSums;
    const bool split = keep_for_split(call, kept);
    if (split) raise_known_errors();
    const nb::object sums =
        turn.make(Collective::kLatencyCombine, [&] { return latency_combine(calls, routing, call, turn.stream()); });
    made_half(hook, slab.routing, turn.stream());
    if (!split) raise_known_errors();
    return nb::make_tuple(sums.is_valid() ? sums : nb::borrow(out), new_event(), hook);
  });
}

void BufferCalls::read_overlap(const Checks& checks, const Slab& slab, nb::handle overlap,
                               ReadLatencyCombine& call) const {
  const auto [name, words, tile_rows, threshold, num_sms] =
      nb::cast<std::tuple<std::string, nb::object, nb::object, nb::object, nb::object>>(overlap);
  TileSignals& signals = call.in.signals;
  signals.tile_rows = tile_rows.is_none() ? slab.num_rows : checks.size(tile_rows, "block_m");
  const auto size_32 = [&checks](nb::handle value, const char* what) {
    checks.size(value, what);
    return whole_32(value, "low_latency_combine", what);
  };
  signals.threshold = size_32(threshold, tile_rows.is_none() ? "src_signal_expect_value" : "threshold");
  call.options.kernel.num_sms = size_32(num_sms, "num_sms");
  const std::int64_t num_tiles = slab.num_rows / signals.tile_rows + (slab.num_rows % signals.tile_rows != 0 ? 1 : 0);
  const std::int64_t num_words = slab.num_local * num_tiles;
  // Engines make a flat tensor for the smallest tiles and use its beginning.
  const std::optional<ReadTensor> read = find_tensor(words, calls_->place());
  const bool fits =
      read && read->view.dtype == DType::kInt32 && is_contiguous(read->view) &&
      (read->view.num_dims == 1 ? read->view.extent(0) >= num_words : read->view.num_elements() == num_words);
  if (!fits) {
    checks.tensor(words, name);
    checks.refuse(name + " is of shape " + repr_of(words.attr("shape")) + " and dtype " + repr_of(words.attr("dtype")) +
                  ", expected " + std::to_string(num_words) + " contiguous words of int32 or uint32: one for each " +
                  std::to_string(signals.tile_rows) + " of the " + std::to_string(slab.num_rows) + " rows of each of " +
                  std::to_string(slab.num_local) + " experts");
  }
  signals.words = ConstTensorView(read->view.data, DType::kInt32, {slab.num_local, num_tiles});
}

TensorView BufferCalls::combine_memory_of(const Checks& checks, const Slab& slab, nb::handle kept) const {
  const nb::object memory = get_attribute(slab.link, memory_name());
  const std::optional<ReadTensor> read = find_tensor(memory, calls_->place());
  const bool fits = read && read->view.num_dims == 3 && read->view.extent(0) == slab.num_local &&
                    read->view.extent(1) == slab.num_rows && read->view.extent(2) == slab.hidden;
  if (!fits) {
    checks.refuse(
        "zero_copy is True, but get_next_low_latency_combine_buffer was not called with this handle; write the rows to "
        "what it returns first");
  }
  steps_.attr("reads")(memory);
  if (!kept.is_none()) kept.attr("append")(memory);
  return read->view;
}

}  // namespace ferry::python::deep_ep
