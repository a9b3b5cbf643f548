/// Calls of latency mode as deep_ep's buffers make them.

#include <cstddef>
#include <cstdint>
#include <optional>
#include <utility>

#include "buffer_calls.hpp"
#include "deep_ep_arguments.hpp"
#include "latency.hpp"
#include "objects.hpp"
#include "views.hpp"

namespace nb = nanobind;

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

/// Quantization of a dispatch's flags; empty where they contradict each other.
std::optional<Quantization> quantization_of(const FormOfSlab& form) {
  if (!form.use_fp8) return Quantization::kNone;
  if (form.use_ue8m0 && !form.round_scale) return std::nullopt;
  if (form.use_ue8m0) return Quantization::kFp8Ue8m0;
  return form.round_scale ? Quantization::kFp8PowerOfTwo : Quantization::kFp8;
}

/// Of a split call; None: it is not split.
nb::object tensors_of(nb::handle sent) {
  static const Name kept_name("kept");
  return sent.is_none() ? nb::none() : find_attribute(sent, kept_name);
}

/// What a call needs to find its Routing by, on the storage of a handle's first tensor.
const Name& link_name() {
  static const Name name("_ferry_latency");
  return name;
}

}  // namespace

void BufferCalls::attach_slab(nb::handle src_info, const nb::object& routing) const {
  static const Name untyped_storage("untyped_storage");
  static const Name routing_name("routing");
  static const Name memory_name("combine_memory");
  const nb::object link = bare_object(latency_link_);
  set_attribute(link, routing_name, routing);
  set_attribute(link, memory_name, nb::none());
  PyObject* const storage = PyObject_CallMethodNoArgs(src_info.ptr(), untyped_storage.ptr());
  if (storage == nullptr) nb::raise_python_error();
  set_attribute(nb::steal(storage), link_name(), link);
}

nb::object BufferCalls::made_half(nb::handle sent, const nb::object& routing) const {
  static const Name native_name("_native");
  static const Name dropped_name("calls_dropped");
  static const Name sent_name("_sent");
  static const Name group_name("_group");
  if (sent.is_none()) {
    if (PyObject_IsTrue(find_attribute(in_flight_, dropped_name).ptr()) == 1) in_flight_.attr("made_whole")();
    return nb::none();
  }
  set_attribute(sent, native_name, find_attribute(routing, native_name));
  nb::object hook = bare_object(hook_);
  set_attribute(hook, sent_name, sent);
  set_attribute(hook, group_name, group_);
  return hook;
}

nb::object BufferCalls::low_latency_dispatch(nb::handle x, nb::handle topk_idx, nb::handle max_tokens,
                                             nb::handle num_experts, nb::handle expert_stats, nb::handle wait_stats,
                                             nb::handle sent, const FormOfSlab& form) const {
  const Calls& calls = *calls_;
  const Place place = calls.place();
  const std::int64_t num_ranks = calls.group().num_ranks();
  const std::optional<Stream> stream = calls.allocator().stream();
  const std::optional<std::int64_t> most = find_integer(max_tokens);
  const std::optional<std::int64_t> experts = find_integer(num_experts);
  const std::optional<TensorView> rows = find_rows(x, place);
  const std::optional<Quantization> quantize = quantization_of(form);
  if (!stream || !most || *most < 1 || *most > kMaxTokens || !experts || *experts < 1 || *experts % num_ranks != 0 ||
      !rows || rows->dtype != DType::kBfloat16 || !quantize) {
    return nb::none();
  }
  const std::optional<TensorView> ids = find_table(topk_idx, place, DType::kInt64, {rows->extent(0), kAny});
  if (!ids || ids->extent(1) < 1 || ids->extent(1) > kMaxTopk ||
      !is_table_or_none(expert_stats, place, DType::kInt32, *experts / num_ranks) ||
      !is_table_or_none(wait_stats, place, DType::kInt64, num_ranks)) {
    return nb::none();
  }
  ReadLatencyDispatch call{x};
  call.in.x = *rows;
  call.in.topk_idx = *ids;
  call.options.num_experts = *experts;
  call.options.max_tokens = *most;
  call.options.slab_capacity = num_ranks * *most;
  call.options.quantize = *quantize;
  const nb::object kept = tensors_of(sent);
  const bool split = keep_for_split(call, kept);
  call.options.counters.received = view_of(expert_stats, place);
  call.options.wait_times_ns = view_of(wait_stats, place);
  call.column_major_scales = true;
  // Before a split call: what is raised after it takes away the Routing that it is to be received by.
  if (split) raise_known_errors(calls);
  LatencyReceived received = latency_dispatch(calls, call, *stream);
  const nb::object routing = new_routing(received.routing, false);
  const nb::object hook = made_half(sent, routing);
  const SlabTables tables = slab_tables(calls, received.routing);
  attach_slab(tables.tokens, routing);
  // Replays of a graph use the routings of its capture, and nobody tells when the last one was.
  if (calls.allocator().is_capturing()) captured_.attr("append")(routing);
  if (!split) raise_known_errors(calls);
  const nb::object payload =
      received.scales.is_valid() ? nb::object(nb::make_tuple(received.x, received.scales)) : received.x;
  const nb::tuple handle = nb::make_tuple(tables.tokens, tables.ranges, max_tokens, rows->extent(1), num_experts);
  return nb::make_tuple(payload, tables.counts, handle, new_event(), hook);
}

nb::object BufferCalls::low_latency_combine(nb::handle x, nb::handle topk_idx, nb::handle topk_weights,
                                            nb::handle handle, nb::handle out, nb::handle wait_stats,
                                            nb::handle sent) const {
  const Calls& calls = *calls_;
  const Place place = calls.place();
  const std::int64_t num_ranks = calls.group().num_ranks();
  const std::optional<Stream> stream = calls.allocator().stream();
  if (!stream || !nb::isinstance<nb::tuple>(handle) || nb::len(handle) != kHandleSize) return nb::none();
  static const Name routing_name("routing");
  const nb::object link = find_link(nb::object(handle[0]), link_name());
  if (!link.is_valid()) return nb::none();
  const nb::object owner = find_attribute(link, routing_name);
  if (!owner.is_valid()) return nb::none();
  const PlacedRouting* placed = find_routing(owner, group_);
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
  call.options.wait_times_ns = view_of(wait_stats, place);
  const nb::object kept = tensors_of(sent);
  const bool split = keep_for_split(call, kept);
  if (split) raise_known_errors(calls);
  const nb::object sums = latency_combine(calls, routing, call, *stream);
  const nb::object hook = made_half(sent, owner);
  if (!split) raise_known_errors(calls);
  return nb::make_tuple(sums.is_valid() ? sums : nb::borrow(out), new_event(), hook);
}

}  // namespace ferry::python
