#include "latency.hpp"

#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cstddef>
#include <limits>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "arguments.hpp"
#include "calls.hpp"
#include "errors.hpp"
#include "ferry/latency.hpp"
#include "gil.hpp"
#include "placed.hpp"
#include "views.hpp"

namespace nb = nanobind;
using namespace nb::literals;

namespace ferry::python {
namespace {

constexpr std::int64_t kMostRows = std::numeric_limits<std::int32_t>::max();

/// L; -1 if the options are wrong, which the call reports.
std::int64_t find_num_local_experts(const LatencyDispatchOptions& options, const Group& group) {
  const Placement& placement = options.placement;
  const std::int64_t num_experts = placement.present() ? placement.num_physical_experts() : options.num_experts;
  if (num_experts < 1 || num_experts > kMostRows || options.slab_capacity < 1) return -1;
  const std::int64_t rank = group.rank();
  const std::int64_t num_ranks = group.num_ranks();
  const std::vector<std::int32_t>& owners = placement.present() ? placement.physical_to_rank : options.expert_to_rank;
  if (!owners.empty() && owners.size() != static_cast<std::size_t>(num_experts)) return -1;
  const std::int64_t num_local = owners.empty()
                                     ? (rank + 1) * num_experts / num_ranks - rank * num_experts / num_ranks
                                     : std::count(owners.begin(), owners.end(), static_cast<std::int32_t>(rank));
  return num_local <= kMostRows / options.slab_capacity ? num_local : -1;
}

/// Adds a tensor that was made to the list, if there is one.
void keep(nb::handle kept, const nb::object& made) {
  if (!kept.is_valid() || !made.is_valid()) return;
  if (PyList_Append(kept.ptr(), made.ptr()) != 0) nb::raise_python_error();
}

/// [L, C, ...] for a Wanted [rows, ...].
Wanted as_slab(Wanted rows, std::int64_t num_local, std::int64_t capacity) {
  rows.shape = {num_local, capacity, rows.shape[1]};
  rows.num_dims = 3;
  return rows;
}

/// Makes the outputs that are absent, unless the call is refused anyway.
void make_outputs(const Calls& calls, ReadLatencyDispatch& call, LatencyReceived& received) {
  const ConstTensorView& x = call.in.x;
  const bool quantizes = call.options.quantize != Quantization::kNone;
  const bool needs_scales = (quantizes || call.in.scales.present()) && !call.out.scales.present();
  const std::int64_t num_local = find_num_local_experts(call.options, calls.group());
  const bool fits = call.in.topk_idx.present() && call.in.topk_idx.extent(0) <= call.options.max_tokens;
  if (num_local < 0 || !fits || !x.present() || (call.out.x.present() && !needs_scales)) return;
  const TableTypes& types = calls.allocator().types();
  const std::int64_t capacity = call.options.slab_capacity;
  const std::int64_t hidden = x.extent(x.num_dims - 1);
  // The dtypes of the payload are new references, which live until the tensors are made.
  std::array<nb::object, 2> dtypes;
  std::array<Wanted, 2> wanted{};
  std::array<std::pair<nb::object*, TensorView*>, 2> places{};
  std::size_t count = 0;
  const auto want = [&](const Wanted& one, nb::object& tensor, TensorView& view) {
    wanted[count] = as_slab(one, num_local, capacity);
    places[count++] = {&tensor, &view};
  };
  if (!call.out.x.present()) {
    if (!quantizes) dtypes[0] = call.x.attr("dtype");
    want(quantizes ? quantized_rows(types, call.options.quantize, 0, hidden) : Wanted{dtypes[0], {0, hidden}, 2, true},
         received.x, call.out.x);
  }
  if (needs_scales) {
    if (!quantizes) dtypes[1] = call.scales.attr("dtype");
    Wanted scales = quantizes ? quantized_scales(types, call.options.quantize, 0, hidden)
                              : Wanted{dtypes[1], {0, call.in.scales.extent(call.in.scales.num_dims - 1)}};
    scales.column_major = call.column_major_scales;
    want(scales, received.scales, call.out.scales);
  }
  // Kernels of one node receive in memory of the group's own, and write a rank's slab themselves.
  std::vector<nb::object> tensors;
  if (calls.place().on_gpu && calls.group().topology().num_nodes() == 1) {
    tensors.resize(count);
    calls.allocator().make_all(std::span(wanted).first(count), tensors);
  } else {
    tensors = calls.allocator().make_outputs(std::span(wanted).first(count));
  }
  for (std::size_t i = 0; i < count; ++i) {
    *places[i].first = std::move(tensors[i]);
    *places[i].second = read_tensor(*places[i].first, calls.place());
  }
}

/// The list of tensors that a ferry._latency.Sent keeps; None for a call that is not split.
nb::object kept_of(nb::handle sent) { return sent.is_none() ? nb::none() : nb::object(sent.attr("kept")); }

/// Nothing was sent.
void forget(nb::handle sent) {
  if (!sent.is_none()) sent.attr("forget")();
}

CombineOrder order_of(nb::handle order) {
  // In the order of CombineOrder.
  constexpr std::array names{"exact", "rank_sums"};
  for (std::size_t i = 0; i < names.size(); ++i) {
    if (nb::isinstance<nb::str>(order) && PyUnicode_CompareWithASCIIString(order.ptr(), names[i]) == 0) {
      return static_cast<CombineOrder>(i);
    }
  }
  refuse("latency_combine: order is " + repr_of(order) + ", expected one of 'exact', 'rank_sums'");
}

/// signals: a ferry.TileSignals, or None.
TileSignals signals_of(nb::handle signals, Place place) {
  const char* const operation = "latency_combine";
  if (signals.is_none()) return {};
  for (const char* const name : {"words", "tile_rows", "threshold"}) {
    if (nb::hasattr(signals, name)) continue;
    refuse(std::string(operation) + ": signals is a " + class_name(signals) + ", expected a ferry.TileSignals or None");
  }
  const ConstTensorView words = view_of(signals.attr("words"), place, operation, "signals.words");
  if (!words.present()) refuse(std::string(operation) + ": signals.words is None, expected a tensor");
  return {words, whole(signals.attr("tile_rows"), operation, "signals.tile_rows"),
          whole_32(signals.attr("threshold"), operation, "signals.threshold")};
}

struct DispatchArguments {
  nb::handle x{}, scales{}, topk_idx{}, topk_weights{}, out{}, out_scales{}, num_tokens{}, wait_times_ns{};
  nb::handle num_experts{}, max_tokens{}, slab_capacity{}, expert_to_rank{}, quantize{};
  bool column_major_scales = false, zero_padding = false;
  nb::handle num_sms{}, placement{}, counters{};
};

ReadLatencyDispatch read_dispatch(const Calls& calls, const DispatchArguments& given) {
  const char* const operation = "latency_dispatch";
  const Place place = calls.place();
  ReadLatencyDispatch call{given.x, given.scales};
  LatencyDispatchOptions& options = call.options;
  options.max_tokens = whole_32(given.max_tokens, operation, "max_tokens");
  options.num_experts = whole_32(given.num_experts, operation, "num_experts");
  options.slab_capacity = given.slab_capacity.is_none() ? whole_slab(calls.group().num_ranks(), options.max_tokens)
                                                        : whole_32(given.slab_capacity, operation, "slab_capacity");
  options.expert_to_rank = owners_of(given.expert_to_rank, operation);
  options.quantize = quantization_of(given.quantize, operation);
  options.zero_padding = given.zero_padding;
  options.kernel.num_sms = whole_32(given.num_sms, operation, "num_sms");
  call.column_major_scales = given.column_major_scales;
  Load load = load_of(given.placement, given.counters, calls.types().load, place, operation);
  options.placement = std::move(load.placement);
  options.counters = load.counters;
  const auto view = [&](nb::handle tensor, const char* name) { return view_of(tensor, place, operation, name); };
  call.in.x = view(given.x, "x");
  call.in.scales = view(given.scales, "scales");
  call.in.topk_idx = view(given.topk_idx, "topk_idx");
  call.in.topk_weights = view(given.topk_weights, "topk_weights");
  call.out.x = view(given.out, "out");
  call.out.scales = view(given.out_scales, "out_scales");
  call.in.num_tokens_view = view(given.num_tokens, "num_tokens");
  options.wait_times_ns = view(given.wait_times_ns, "wait_times_ns");
  return call;
}

/// sent: a ferry._latency.Sent, or None if the call is not split. -> x, scales, native routing
nb::object dispatch(const Calls& calls, nb::handle x, nb::handle scales, nb::handle topk_idx, nb::handle topk_weights,
                    nb::handle out, nb::handle out_scales, nb::handle num_tokens, nb::handle wait_times_ns,
                    nb::handle num_experts, nb::handle max_tokens, nb::handle slab_capacity, nb::handle expert_to_rank,
                    nb::handle quantize, bool column_major_scales, bool zero_padding, nb::handle sent,
                    nb::handle num_sms, nb::handle placement, nb::handle counters) {
  const Stream stream = calls.allocator().any_stream();
  ReadLatencyDispatch call = read_or_refuse(
      [&] {
        return read_dispatch(calls, {x, scales, topk_idx, topk_weights, out, out_scales, num_tokens, wait_times_ns,
                                     num_experts, max_tokens, slab_capacity, expert_to_rank, quantize,
                                     column_major_scales, zero_padding, num_sms, placement, counters});
      },
      [&] {
        forget(sent);
        calls.refuse_latency_dispatch(stream);
      });
  const nb::object kept = kept_of(sent);
  keep_for_split(call, kept);
  LatencyReceived received = latency_dispatch(calls, call, stream);
  return nb::make_tuple(received.x.is_valid() ? received.x : nb::borrow(out),
                        received.scales.is_valid() ? received.scales : nb::borrow(out_scales), received.routing);
}

/// -> the sums
nb::object combine(const Calls& calls, nb::handle owner, nb::handle routing, nb::handle x, nb::handle topk_weights,
                   nb::handle out, nb::handle wait_times_ns, nb::handle order, nb::handle sent, nb::handle num_sms,
                   nb::handle wire_format, nb::handle signals) {
  const char* const operation = "latency_combine";
  const Place place = calls.place();
  const Stream stream = calls.allocator().any_stream();
  ReadLatencyCombine call = read_or_refuse(
      [&] {
        ReadLatencyCombine read{x};
        calls.check_routing(routing, operation);
        read.options.order = order_of(order);
        read.options.wire_format = wire_format_of(wire_format, operation);
        read.options.kernel.num_sms = whole_32(num_sms, operation, "num_sms");
        read.in.x = view_of(x, place, operation, "x");
        read.in.topk_weights = view_of(topk_weights, place, operation, "topk_weights");
        read.in.signals = signals_of(signals, place);
        read.out = view_of(out, place, operation, "out");
        read.options.wait_times_ns = view_of(wait_times_ns, place, operation, "wait_times_ns");
        return read;
      },
      [&] {
        forget(sent);
        calls.refuse_latency_combine(calls.routing_or_none(routing, owner), stream);
      });
  const nb::object kept = kept_of(sent);
  keep_for_split(call, kept);
  nb::object sums = latency_combine(calls, Calls::native_of(routing), call, stream);
  return sums.is_valid() ? std::move(sums) : nb::borrow(out);
}

/// given: handle of a stream, or None for the current one.
void receive(const Calls& calls, const PlacedRouting& routing, nb::handle given) {
  const Stream stream = given.is_none() ? calls.allocator().any_stream()
                                        : Stream{reinterpret_cast<void*>(nb::cast<std::uintptr_t>(given))};
  const Status status = [&] {
    const GilReleased released;
    return calls.group().latency_receive(routing.routing, stream);
  }();
  raise_if_error(status);
}

std::size_t bytes_required(const std::string& backend, nb::handle num_ranks, nb::handle max_tokens, nb::handle num_topk,
                           nb::handle dispatch_row_bytes, nb::handle combine_row_bytes, int order) {
  const auto number = [](nb::handle value) {
    return whole_32(value, "latency_bytes_required", "a number of the shape");
  };
  LatencyShape shape;
  shape.order = static_cast<CombineOrder>(order);
  shape.backend = backend;
  shape.num_ranks = number(num_ranks);
  shape.max_tokens = number(max_tokens);
  shape.num_topk = number(num_topk);
  shape.dispatch_row_bytes = number(dispatch_row_bytes);
  shape.combine_row_bytes = number(combine_row_bytes);
  return value_or_raise(latency_bytes_required(shape));
}

}  // namespace

std::int64_t whole_slab(int num_ranks, std::int64_t max_tokens) {
  const std::int64_t rows = std::max<std::int64_t>(num_ranks * max_tokens, 1);
  if (rows > kMostRows) {
    refuse("latency_dispatch: slab_capacity is " + std::to_string(rows) + ", expected less than 2**31");
  }
  return rows;
}

void Calls::refuse_latency_dispatch(Stream stream) const {
  LatencyDispatchOptions options;
  options.num_experts = 1;
  options.max_tokens = 1;
  options.slab_capacity = 1;
  {
    const GilReleased released;
    static_cast<void>(group_->latency_dispatch({}, {}, options, stream));
  }
  raise_kept();
}

void Calls::refuse_latency_combine(const Routing& routing, Stream stream) const {
  {
    const GilReleased released;
    static_cast<void>(group_->latency_combine(routing, {}, {}, stream));
  }
  raise_kept();
}

LatencyReceived latency_dispatch(const Calls& calls, ReadLatencyDispatch& call, Stream stream) {
  LatencyReceived received;
  try {
    make_outputs(calls, call, received);
    keep(call.kept, received.x);
    keep(call.kept, received.scales);
  } catch (...) {
    calls.refuse_latency_dispatch(stream);
    throw;
  }
  Result<Routing> routing = [&] {
    const CallScope scope;
    return calls.group().latency_dispatch(call.in, call.out, call.options, stream);
  }();
  received.routing = {value_or_raise(std::move(routing)), calls.place()};
  return received;
}

nb::object latency_combine(const Calls& calls, const Routing& routing, ReadLatencyCombine& call, Stream stream) {
  nb::object sums;
  try {
    if (!call.out.present() && call.in.x.present() && routing.present()) {
      const nb::object dtype = call.x.attr("dtype");
      sums = calls.allocator().make({dtype, {routing.num_tokens(), call.in.x.extent(call.in.x.num_dims - 1)}});
      call.out = read_tensor(sums, calls.place());
      keep(call.kept, sums);
    }
  } catch (...) {
    calls.refuse_latency_combine(routing, stream);
    throw;
  }
  const Status status = [&] {
    const CallScope scope;
    return calls.group().latency_combine(routing, call.in, {call.out}, stream, call.options);
  }();
  raise_if_error(status);
  return sums;
}

SlabTables slab_tables(const Calls& calls, const PlacedRouting& placed) {
  static_assert(std::endian::native == std::endian::little, "a range's words are read as one number");
  const Routing& routing = placed.routing;
  const nb::handle type = calls.allocator().tensor_type();
  const auto owner = std::make_shared<Routing>(routing);
  const ConstTensorView counts = routing.num_rows_per_local_expert_view();
  const ConstTensorView source = routing.source();
  ConstTensorView ranges = routing.source_ranges();
  if (!ranges.present() || !source.present() || !counts.present()) {
    throw nb::value_error("the Routing is not one of latency mode");
  }
  const std::int64_t num_local = ranges.extent(0);
  const std::int64_t capacity = num_local == 0 ? 0 : routing.num_recv_rows() / num_local;
  ranges = ConstTensorView(ranges.data, DType::kInt64, {num_local, ranges.extent(1)});
  ConstTensorView tokens(static_cast<const std::int32_t*>(source.data) + 1, DType::kInt32, {num_local, capacity});
  tokens.strides = {2 * capacity, 2};
  return {tensor_on(counts, placed.place, owner, type), tensor_on(tokens, placed.place, owner, type),
          tensor_on(ranges, placed.place, owner, type)};
}

void define_latency(nb::module_& module) {
  module.def("latency_dispatch", &dispatch, "calls"_a, "x"_a.none(), "scales"_a.none(), "topk_idx"_a.none(),
             "topk_weights"_a.none(), "out"_a.none(), "out_scales"_a.none(), "num_tokens"_a.none(),
             "wait_times_ns"_a.none(), "num_experts"_a.none(), "max_tokens"_a.none(), "slab_capacity"_a.none(),
             "expert_to_rank"_a.none(), "quantize"_a.none(), "column_major_scales"_a, "zero_padding"_a, "sent"_a.none(),
             "num_sms"_a.none(), "placement"_a.none(), "counters"_a.none());
  module.def("latency_combine", &combine, "calls"_a, "owner"_a, "routing"_a.none(), "x"_a.none(),
             "topk_weights"_a.none(), "out"_a.none(), "wait_times_ns"_a.none(), "order"_a.none(), "sent"_a.none(),
             "num_sms"_a.none(), "wire_format"_a.none(), "signals"_a.none());
  module.def("latency_receive", &receive, "calls"_a, "routing"_a, "stream"_a.none());
  module.def("latency_bytes_required", &bytes_required, "backend"_a, "num_ranks"_a.none(), "max_tokens"_a.none(),
             "num_topk"_a.none(), "dispatch_row_bytes"_a.none(), "combine_row_bytes"_a.none(), "order"_a);
}

}  // namespace ferry::python
