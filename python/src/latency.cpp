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

#include "calls.hpp"
#include "errors.hpp"
#include "ferry/latency.hpp"
#include "placed.hpp"
#include "views.hpp"

namespace nb = nanobind;
using namespace nb::literals;

namespace ferry::python {
namespace {

constexpr std::int64_t kMostRows = std::numeric_limits<std::int32_t>::max();

/// L, if the options are such that the call can succeed; -1: the call finds out what is wrong.
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

/// [L, C, ...] of a Wanted [rows, ...].
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

/// tensors: x, scales, topk_idx, topk_weights, out, out_scales, num_tokens, wait_times_ns, or views of them.
/// -> x, scales, routing
nb::object dispatch(const Calls& calls, nb::handle x, nb::handle scales, const nb::tuple& tensors,
                    std::int64_t num_experts, std::int64_t max_tokens, std::int64_t slab_capacity,
                    std::vector<std::int32_t> expert_to_rank, int quantize, bool column_major_scales, bool zero_padding,
                    nb::handle kept, int num_sms, const Placement* placement, nb::handle table, nb::handle counters) {
  const Place place = calls.place();
  ReadLatencyDispatch call{x, scales};
  call.in = {view_of(tensors[0], place), view_of(tensors[1], place), view_of(tensors[2], place),
             view_of(tensors[3], place), view_of(tensors[6], place)};
  call.out = {view_of(tensors[4], place), view_of(tensors[5], place)};
  call.options.num_experts = num_experts;
  call.options.max_tokens = max_tokens;
  call.options.slab_capacity = slab_capacity;
  call.options.expert_to_rank = std::move(expert_to_rank);
  call.options.placement = placement_of(placement, table, place);
  call.options.counters = counters_of(counters, place);
  call.options.wait_times_ns = view_of(tensors[7], place);
  call.options.quantize = static_cast<Quantization>(quantize);
  call.options.zero_padding = zero_padding;
  keep_for_split(call, kept);
  call.options.kernel.num_sms = num_sms;
  call.column_major_scales = column_major_scales;
  LatencyReceived received = latency_dispatch(calls, call, calls.allocator().any_stream());
  return nb::make_tuple(received.x.is_valid() ? received.x : nb::object(tensors[4]),
                        received.scales.is_valid() ? received.scales : nb::object(tensors[5]), received.routing);
}

/// tensors: x, topk_weights, out, wait_times_ns, or views of them. -> out
nb::object combine(const Calls& calls, const PlacedRouting& routing, nb::handle x, const nb::tuple& tensors, int order,
                   nb::handle kept, int num_sms) {
  const Place place = calls.place();
  ReadLatencyCombine call{x, {view_of(tensors[0], place), view_of(tensors[1], place)}, view_of(tensors[2], place)};
  call.options.order = static_cast<CombineOrder>(order);
  call.options.wait_times_ns = view_of(tensors[3], place);
  keep_for_split(call, kept);
  call.options.kernel.num_sms = num_sms;
  nb::object sums = latency_combine(calls, routing.routing, call, calls.allocator().any_stream());
  return sums.is_valid() ? std::move(sums) : nb::object(tensors[2]);
}

void receive(const Calls& calls, const PlacedRouting& routing) {
  const Stream stream = calls.allocator().any_stream();
  const Status status = [&] {
    const nb::gil_scoped_release released;
    return calls.group().latency_receive(routing.routing, stream);
  }();
  raise_if_error(status);
}

nb::object tables(const Calls& calls, const PlacedRouting& routing) {
  SlabTables made = slab_tables(calls, routing);
  return nb::make_tuple(made.counts, made.tokens, made.ranges);
}

std::size_t bytes_required(const std::string& backend, int num_ranks, std::int64_t max_tokens, int num_topk,
                           std::int64_t dispatch_row_bytes, std::int64_t combine_row_bytes, int order) {
  LatencyShape shape;
  shape.order = static_cast<CombineOrder>(order);
  shape.backend = backend;
  shape.num_ranks = num_ranks;
  shape.max_tokens = max_tokens;
  shape.num_topk = num_topk;
  shape.dispatch_row_bytes = dispatch_row_bytes;
  shape.combine_row_bytes = combine_row_bytes;
  return value_or_raise(latency_bytes_required(shape));
}

}  // namespace

LatencyReceived latency_dispatch(const Calls& calls, ReadLatencyDispatch& call, Stream stream) {
  LatencyReceived received;
  try {
    make_outputs(calls, call, received);
    keep(call.kept, received.x);
    keep(call.kept, received.scales);
  } catch (...) {
    {
      const nb::gil_scoped_release released;
      static_cast<void>(calls.group().latency_dispatch({}, {}, {}, stream));
    }
    raise_kept();
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
    {
      const nb::gil_scoped_release released;
      static_cast<void>(calls.group().latency_combine(routing, {}, {}, stream));
    }
    raise_kept();
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
  module.def("latency_dispatch", &dispatch, "calls"_a, "x"_a.none(), "scales"_a.none(), "tensors"_a, "num_experts"_a,
             "max_tokens"_a, "slab_capacity"_a, "expert_to_rank"_a, "quantize"_a, "column_major_scales"_a,
             "zero_padding"_a, "kept"_a.none(), "num_sms"_a, "placement"_a.none() = nb::none(),
             "table"_a.none() = nb::none(), "counters"_a.none() = nb::none());
  module.def("latency_combine", &combine, "calls"_a, "routing"_a, "x"_a.none(), "tensors"_a, "order"_a, "kept"_a.none(),
             "num_sms"_a);
  module.def("latency_receive", &receive, "calls"_a, "routing"_a);
  module.def("latency_slab_tables", &tables, "calls"_a, "routing"_a);
  module.def("latency_bytes_required", &bytes_required, "backend"_a, "num_ranks"_a, "max_tokens"_a, "num_topk"_a,
             "dispatch_row_bytes"_a, "combine_row_bytes"_a, "order"_a);
}

}  // namespace ferry::python
