#include "calls.hpp"

#include <nanobind/stl/string.h>

#include <algorithm>
#include <bit>
#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "arguments.hpp"
#include "errors.hpp"
#include "objects.hpp"

namespace nb = nanobind;
using namespace nb::literals;

namespace ferry::python {
namespace {

constexpr std::size_t kMaxBiases = 2;
/// UE8M0 scales are made four to an i32, as matrix products on GPUs take them.
constexpr std::int64_t kExponentsPerWord = 4;

/// Rows from this size on are made in sixteenths of a power of two. Exact routes differ from call to call, and each
/// with more rows than all before it would take new memory: torch's allocator does not put them where fewer were, and
/// all ranks map what the group takes, which is milliseconds of a call.
constexpr std::int64_t kRoundedBytes = std::int64_t{16} << 20;
constexpr std::uint64_t kRoundedParts = 16;

std::int64_t with_room(std::int64_t num_rows) {
  const std::uint64_t rows = static_cast<std::uint64_t>(num_rows);
  const std::uint64_t granule = std::max<std::uint64_t>(1, std::bit_floor(rows) / kRoundedParts);
  return static_cast<std::int64_t>((rows + granule - 1) / granule * granule);
}

/// Refuses anything but a tensor of at least one dimension, whose width an output takes.
void check_rows(const Calls& calls, nb::handle tensor, const char* operation, const char* name) {
  if (find_tensor(tensor, calls.place())) return;
  if (nb::isinstance(tensor, calls.allocator().tensor_type()) && nb::cast<int>(tensor.attr("dim")()) >= 1) return;
  refuse(std::string(operation) + ": " + name + ": expected a torch.Tensor of rows, got " + class_name(tensor));
}

/// None, a tensor, or up to two, either of which may be None.
std::array<ConstTensorView, kMaxBiases> biases_of(const Calls& calls, nb::handle bias) {
  std::array<ConstTensorView, kMaxBiases> views;
  const auto read = [&](std::size_t at, nb::handle tensor) {
    views[at] = view_of(tensor, calls.place(), "combine", at == 0 ? "bias" : "second bias");
  };
  if (bias.is_none() || nb::isinstance(bias, calls.allocator().tensor_type())) {
    read(0, bias);
    return views;
  }
  const int is_given = PyObject_IsTrue(bias.ptr());
  if (is_given < 0) nb::raise_python_error();
  if (is_given == 0) return views;
  const nb::object list = nb::steal(PySequence_List(bias.ptr()));
  if (!list.is_valid()) {
    if (PyErr_ExceptionMatches(PyExc_TypeError) == 0) nb::raise_python_error();
    PyErr_Clear();
    refuse("combine: bias is a " + class_name(bias) + ", expected one or two tensors");
  }
  const std::size_t count = nb::len(list);
  if (count > kMaxBiases) {
    refuse("combine: " + std::to_string(count) + " biases, expected at most two; add them first");
  }
  for (std::size_t i = 0; i < count; ++i) read(i, nb::object(list[i]));
  return views;
}

Layout layout_of(nb::handle layout) {
  // In the order of Layout.
  static const std::array names{Name("tokens"), Name("experts"), Name("slab")};
  static const std::array layouts{Layout::kTokens, Layout::kExperts, Layout::kSlab};
  for (std::size_t i = 0; i < names.size(); ++i) {
    if (layout.ptr() == names[i].ptr()) return layouts[i];
  }
  for (std::size_t i = 0; i < names.size(); ++i) {
    const int equal = PyObject_RichCompareBool(layout.ptr(), names[i].ptr(), Py_EQ);
    if (equal < 0) nb::raise_python_error();
    if (equal == 1) return layouts[i];
  }
  refuse("route: layout is " + repr_of(layout) + ", expected one of 'tokens', 'experts', 'slab'");
}

struct RouteArguments {
  nb::handle topk_idx{}, topk_weights{}, num_experts{}, layout{}, expert_alignment{}, slab_capacity{}, max_recv_rows{},
      max_tokens{}, num_sms{}, expert_to_rank{}, placement{}, counters{};
};

struct ReadRoute {
  RouteInput in{};
  RouteOptions options{};
};

ReadRoute read_route(const Calls& calls, const RouteArguments& given) {
  const char* const operation = "route";
  ReadRoute call;
  RouteOptions& options = call.options;
  options.layout = layout_of(given.layout);
  options.max_recv_rows = whole(given.max_recv_rows, operation, "max_recv_rows");
  options.num_experts = whole(given.num_experts, operation, "num_experts");
  options.expert_alignment = whole(given.expert_alignment, operation, "expert_alignment");
  options.slab_capacity = whole(given.slab_capacity, operation, "slab_capacity");
  options.max_tokens = whole(given.max_tokens, operation, "max_tokens");
  options.num_sms = whole_32(given.num_sms, operation, "num_sms");
  options.expert_to_rank = owners_of(given.expert_to_rank, operation);
  Load load = load_of(given.placement, given.counters, calls.types().load, calls.place(), operation);
  options.placement = std::move(load.placement);
  options.counters = load.counters;
  call.in = {view_of(given.topk_idx, calls.place(), operation, "topk_idx"),
             view_of(given.topk_weights, calls.place(), operation, "topk_weights")};
  return call;
}

/// A ferry.Routing.
nb::object route(const Calls& calls, nb::handle owner, nb::handle topk_idx, nb::handle topk_weights,
                 nb::handle num_experts, nb::handle layout, nb::handle expert_alignment, nb::handle slab_capacity,
                 nb::handle max_recv_rows, nb::handle max_tokens, nb::handle num_sms, nb::handle expert_to_rank,
                 nb::handle placement, nb::handle counters) {
  const Stream stream = calls.allocator().any_stream();
  const ReadRoute call = read_or_refuse(
      [&] {
        return read_route(calls, {topk_idx, topk_weights, num_experts, layout, expert_alignment, slab_capacity,
                                  max_recv_rows, max_tokens, num_sms, expert_to_rank, placement, counters});
      },
      [&] { calls.refuse_route(stream); });
  Result<Routing> routing = [&] {
    const CallScope scope;
    return calls.group().route(call.in, call.options, stream);
  }();
  const PlacedRouting placed{value_or_raise(std::move(routing)), calls.place()};
  return calls.new_routing(placed, owner, !topk_weights.is_none(), call.options.max_recv_rows > 0);
}

bool is_true(nb::handle owner, const Name& name) { return find_attribute(owner, name).is(nb::handle(Py_True)); }

struct DispatchArguments {
  nb::handle routing{}, x{}, scales{}, topk_weights{}, out{}, out_scales{}, out_source{};
  bool tables = true, zero_padding = false;
  nb::handle num_sms{}, quantize{};
};

ReadDispatch read_dispatch(const Calls& calls, const DispatchArguments& given) {
  static const Name has_weights_name("has_weights");
  static const Name is_bounded_name("is_bounded");
  const char* const operation = "dispatch";
  const Place place = calls.place();
  ReadDispatch call{given.x, given.scales};
  call.options.quantize = quantization_of(given.quantize, operation);
  calls.check_routing(given.routing, operation);
  const bool quantizes = call.options.quantize != Quantization::kNone;
  const std::optional<ReadTensor> x = find_tensor(given.x, place);
  if (!x && (given.out.is_none() || (quantizes && (given.tables || given.out_scales.is_none())))) {
    check_rows(calls, given.x, operation, "x");
  }
  if (!given.scales.is_none() && !quantizes && given.out_scales.is_none()) {
    check_rows(calls, given.scales, operation, "scales");
  }
  call.options.kernel.num_sms = whole_32(given.num_sms, operation, "num_sms");
  call.in = {x ? x->view : view_of(given.x, place, operation, "x"), view_of(given.scales, place, operation, "scales"),
             view_of(given.topk_weights, place, operation, "topk_weights")};
  call.out.x = view_of(given.out, place, operation, "out");
  call.out.scales = view_of(given.out_scales, place, operation, "out_scales");
  call.out.source = view_of(given.out_source, place, operation, "out_source");
  call.tables = given.tables;
  call.weights = is_true(given.routing, has_weights_name) || call.in.topk_weights.present();
  call.bounded = is_true(given.routing, is_bounded_name);
  call.options.zero_padding = given.zero_padding;
  return call;
}

/// A ferry.Received.
nb::object dispatch(const Calls& calls, nb::handle owner, nb::handle routing, nb::handle x, nb::handle scales,
                    nb::handle topk_weights, nb::handle out, nb::handle out_scales, nb::handle out_source, bool tables,
                    bool zero_padding, nb::handle num_sms, nb::handle quantize) {
  const Stream stream = calls.allocator().any_stream();
  const ReadDispatch call = read_or_refuse(
      [&] {
        return read_dispatch(calls, {routing, x, scales, topk_weights, out, out_scales, out_source, tables,
                                     zero_padding, num_sms, quantize});
      },
      [&] { calls.refuse_dispatch(calls.routing_or_none(routing, owner), stream); });
  Received made = calls.dispatch(calls.native_of(routing), call, stream);
  const nb::tuple received = nb::make_tuple(made.x.is_valid() ? made.x : nb::borrow(out),
                                            made.scales.is_valid() ? made.scales : nb::borrow(out_scales),
                                            or_none(made.topk_idx), or_none(made.topk_weights));
  return named_tuple(calls.types().received, received);
}

/// A ferry.Combined.
nb::object combine(const Calls& calls, nb::handle owner, nb::handle routing, nb::handle x, nb::handle weights,
                   nb::handle bias, bool weighted, nb::handle topk_weights, nb::handle out, nb::handle num_sms) {
  const char* const operation = "combine";
  const Place place = calls.place();
  const Stream stream = calls.allocator().any_stream();
  const ReadCombine call = read_or_refuse(
      [&] {
        ReadCombine read{x};
        calls.check_routing(routing, operation);
        read.in.bias = biases_of(calls, bias);
        const std::optional<ReadTensor> rows = find_tensor(x, place);
        if (!rows && out.is_none()) check_rows(calls, x, operation, "x");
        read.options.kernel.num_sms = whole_32(num_sms, operation, "num_sms");
        read.in.x = rows ? rows->view : view_of(x, place, operation, "x");
        read.in.weights = view_of(weights, place, operation, "weights");
        read.in.topk_weights = view_of(topk_weights, place, operation, "topk_weights");
        read.out = view_of(out, place, operation, "out");
        read.options.weighted = weighted;
        return read;
      },
      [&] { calls.refuse_combine(calls.routing_or_none(routing, owner), stream); });
  Combined combined = calls.combine(calls.native_of(routing), call, stream);
  const nb::tuple sums = nb::make_tuple(combined.x.is_valid() ? combined.x : nb::borrow(out), combined.weights);
  return named_tuple(calls.types().combined, sums);
}

}  // namespace

Quantization quantization_of(nb::handle mode, const char* operation) {
  if (mode.is_none()) return Quantization::kNone;
  const nb::object number = nb::module_::import_("ferry._quantize").attr("number_of")(mode, operation);
  return static_cast<Quantization>(nb::cast<int>(number));
}

Wanted quantized_rows(const TableTypes& types, Quantization quantize, std::int64_t rows, std::int64_t hidden) {
  return {quantize == Quantization::kInt8 ? types.i8 : types.e4m3, {rows, hidden}, 2, true};
}

Wanted quantized_scales(const TableTypes& types, Quantization quantize, std::int64_t rows, std::int64_t hidden) {
  const bool exponents = quantize == Quantization::kFp8Ue8m0;
  const std::int64_t channels = exponents ? kQuantBlockSize * kExponentsPerWord : kQuantBlockSize;
  return {exponents ? types.i32 : types.f32, {rows, (hidden + channels - 1) / channels}};
}

nb::object Calls::new_routing(const PlacedRouting& routing, nb::handle owner, bool has_weights, bool bounded) const {
  static const Name native_name("_native");
  static const Name group_name("group");
  static const Name has_weights_name("has_weights");
  static const Name is_bounded_name("is_bounded");
  nb::object made = bare_object(types_.routing);
  set_attribute(made, native_name, nb::cast(routing));
  set_attribute(made, group_name, owner);
  set_attribute(made, has_weights_name, nb::bool_(has_weights));
  set_attribute(made, is_bounded_name, nb::bool_(bounded));
  return made;
}

const Routing& Calls::native_of(nb::handle routing) {
  static const Name native_name("_native");
  return nb::cast<const PlacedRouting&>(find_attribute(routing, native_name)).routing;
}

void Calls::check_routing(nb::handle routing, const char* operation) const {
  if (nb::isinstance(routing, types_.routing)) return;
  refuse(std::string(operation) + ": routing is a " + class_name(routing) +
         ", expected the ferry.Routing that route returned");
}

Routing Calls::routing_or_none(nb::handle routing, nb::handle owner) const {
  static const Name group_name("group");
  const bool is_own = nb::isinstance(routing, types_.routing) && find_attribute(routing, group_name).is(owner);
  return is_own ? native_of(routing) : Routing();
}

void Calls::refuse_route(Stream stream) const {
  RouteOptions options;
  options.num_experts = 1;
  {
    const nb::gil_scoped_release released;
    static_cast<void>(group_->route({}, options, stream));
  }
  raise_kept();
}

void Calls::refuse_dispatch(const Routing& routing, Stream stream) const {
  {
    const nb::gil_scoped_release released;
    static_cast<void>(group_->dispatch(routing, {}, {}, stream));
  }
  raise_kept();
}

void Calls::refuse_combine(const Routing& routing, Stream stream) const {
  {
    const nb::gil_scoped_release released;
    static_cast<void>(group_->combine(routing, {}, {}, stream));
  }
  raise_kept();
}

std::optional<MadeOutputs> Calls::make_outputs(const ReceivedShape& shape, const ReadDispatch& call,
                                               bool quickly) const {
  MadeOutputs outputs{{}, call.out};
  Received& made = outputs.made;
  DispatchOutput& out = outputs.out;
  const bool of_tokens = shape.layout == Layout::kTokens;
  const std::int64_t rows = shape.num_rows;
  // The dtypes of the payload are new references, which live until the tensors are made.
  std::array<nb::object, 2> dtypes;
  std::array<Wanted, 4> wanted{};
  std::array<std::pair<nb::object*, TensorView*>, wanted.size()> places{};
  std::size_t count = 0;
  const Quantization quantize = call.options.quantize;
  const auto want = [&](const Wanted& one, nb::object& tensor, TensorView& view) {
    wanted[count] = one;
    places[count++] = {&tensor, &view};
  };
  if (!out.x.present()) {
    const std::int64_t hidden = call.in.x.extent(call.in.x.num_dims - 1);
    if (quantize != Quantization::kNone) {
      want(quantized_rows(allocator_.types(), quantize, rows, hidden), made.x, out.x);
    } else {
      dtypes[0] = dtype_of(call.x);
      want({dtypes[0], {rows, hidden}, 2, true}, made.x, out.x);
    }
  }
  // A dispatch that quantises refuses given scales itself.
  if (quantize == Quantization::kNone && call.in.scales.present() && !out.scales.present()) {
    dtypes[1] = dtype_of(call.scales);
    const std::int64_t width = call.in.scales.extent(call.in.scales.num_dims - 1);
    if (call.column_major_scales) {
      made.scales = allocator_.make_column_major(dtypes[1], rows, width);
      out.scales = read_tensor(made.scales, place_);
    } else {
      want({dtypes[1], {rows, width}}, made.scales, out.scales);
    }
  }
  if (quantize != Quantization::kNone && !out.scales.present()) {
    const std::int64_t hidden = call.in.x.extent(call.in.x.num_dims - 1);
    want(quantized_scales(allocator_.types(), quantize, rows, hidden), made.scales, out.scales);
  }
  if (call.tables && of_tokens) want({allocator_.types().i64, {rows, shape.num_topk}}, made.topk_idx, out.topk_idx);
  if (call.tables && call.weights) {
    want({allocator_.types().f32, {rows, shape.num_topk}, of_tokens ? 2 : 1}, made.topk_weights, out.topk_weights);
  }
  const std::span<const Wanted> asked = std::span(wanted).first(count);
  std::vector<nb::object> tensors = quickly ? allocator_.make_outputs_quickly(asked) : allocator_.make_outputs(asked);
  if (tensors.size() < count) return std::nullopt;
  for (std::size_t i = 0; i < count; ++i) {
    *places[i].first = std::move(tensors[i]);
    *places[i].second = read_tensor(*places[i].first, place_);
  }
  return outputs;
}

void Calls::keep_first_rows(MadeOutputs& outputs) const {
  const auto keep = [this](nb::object& tensor, const TensorView& view) {
    if (tensor.is_valid()) tensor = allocator_.first_rows(tensor, view);
  };
  keep(outputs.made.x, outputs.out.x);
  keep(outputs.made.scales, outputs.out.scales);
  keep(outputs.made.topk_idx, outputs.out.topk_idx);
  keep(outputs.made.topk_weights, outputs.out.topk_weights);
}

std::optional<MadeOutputs> Calls::make_with_room(const Routing& routing, const ReadDispatch& call) const try {
  const DispatchOutput& out = call.out;
  const bool given = out.x.present() || out.scales.present() || out.topk_idx.present() || out.topk_weights.present();
  const bool by_row = !call.column_major_scales && call.options.quantize == Quantization::kNone;
  const std::int64_t num_rows = routing.num_recv_rows();
  if (!place_.on_gpu || given || !by_row || call.bounded || routing.layout() == Layout::kSlab) return {};
  const ConstTensorView& x = call.in.x;
  if (x.num_dims != 2) return {};
  const std::int64_t row_bytes = x.extent(1) * static_cast<std::int64_t>(size_bytes(x.dtype));
  const std::int64_t rounded_bytes = with_room(num_rows) * row_bytes;
  if (num_rows * row_bytes < kRoundedBytes || rounded_bytes >= no_room_bytes_) return {};
  std::optional<MadeOutputs> made =
      make_outputs({routing.layout(), with_room(num_rows), routing.num_topk()}, call, true);
  // Another attempt would make torch give back its cached memory again.
  if (!made) no_room_bytes_ = rounded_bytes;
  return made;
} catch (...) {
  return {};  // the outputs are made exactly then, and the call is refused if that fails too
}

Received Calls::dispatch(const Routing& routing, const ReadDispatch& call, Stream stream, MadeOutputs* early) const {
  MadeOutputs outputs;
  std::optional<MadeOutputs> with_more;
  const std::int64_t num_rows = routing.num_recv_rows();
  if (early == nullptr) {
    with_more = make_with_room(routing, call);
    if (with_more) early = &*with_more;
  }
  const bool has_more = early != nullptr && early->out.x.extent(0) > num_rows;
  if (early != nullptr) {
    outputs = std::move(*early);
    for (TensorView* view : {&outputs.out.x, &outputs.out.scales, &outputs.out.topk_idx, &outputs.out.topk_weights}) {
      view->shape[0] = view->present() ? num_rows : 0;
    }
  } else {
    try {
      outputs = *make_outputs({routing.layout(), num_rows, routing.num_topk()}, call);
    } catch (...) {
      refuse_dispatch(routing, stream);
      throw;
    }
  }
  DispatchOptions options = call.options;
  options.clear_if_refused = call.bounded;  // no garbage to index with
  const Status status = [&] {
    const CallScope scope;
    return group_->dispatch(routing, call.in, outputs.out, stream, options);
  }();
  raise_if_error(status);
  if (has_more) keep_first_rows(outputs);
  return std::move(outputs.made);
}

Combined Calls::combine(const Routing& routing, const ReadCombine& call, Stream stream) const {
  Combined made{{}, nb::none()};
  CombineOutput out{call.out, {}};
  try {
    const std::int64_t num_tokens = routing.num_tokens();
    nb::object dtype;  // a new reference, which lives until the tensors are made
    std::array<Wanted, 2> wanted{};
    std::size_t count = 0;
    const bool makes_sums = !out.x.present();
    if (makes_sums) {
      dtype = dtype_of(call.x);
      wanted[count++] = {dtype, {num_tokens, call.in.x.extent(call.in.x.num_dims - 1)}};
    }
    if (call.in.weights.present()) wanted[count++] = {allocator_.types().f32, {num_tokens, routing.num_topk()}};
    std::array<nb::object, 2> tensors;
    allocator_.make_all(std::span(wanted).first(count), tensors);
    if (makes_sums) {
      made.x = tensors[0];
      out.x = read_tensor(made.x, place_);
    }
    if (call.in.weights.present()) {
      made.weights = tensors[count - 1];
      out.weights = read_tensor(made.weights, place_);
    }
  } catch (...) {
    refuse_combine(routing, stream);
    throw;
  }
  const Status status = [&] {
    const CallScope scope;
    return group_->combine(routing, call.in, out, stream, call.options);
  }();
  raise_if_error(status);
  return made;
}

void define_calls(nb::module_& module) {
  nb::class_<Calls>(module, "Calls")
      .def("route", &route, "owner"_a, "topk_idx"_a.none(), "topk_weights"_a.none(), "num_experts"_a.none(),
           "layout"_a.none(), "expert_alignment"_a.none(), "slab_capacity"_a.none(), "max_recv_rows"_a.none(),
           "max_tokens"_a.none(), "num_sms"_a.none(), "expert_to_rank"_a.none(), "placement"_a.none(),
           "counters"_a.none())
      .def("dispatch", &dispatch, "owner"_a, "routing"_a.none(), "x"_a.none(), "scales"_a.none(),
           "topk_weights"_a.none(), "out"_a.none(), "out_scales"_a.none(), "out_source"_a.none(), "tables"_a,
           "zero_padding"_a, "num_sms"_a.none(), "quantize"_a.none())
      .def("combine", &combine, "owner"_a, "routing"_a.none(), "x"_a.none(), "weights"_a.none(), "bias"_a.none(),
           "weighted"_a, "topk_weights"_a.none(), "out"_a.none(), "num_sms"_a.none())
      .def("refuse_route", [](const Calls& self) { self.refuse_route(self.allocator().any_stream()); })
      .def(
          "refuse_combine",
          [](const Calls& self, nb::handle owner, nb::handle routing) {
            self.refuse_combine(self.routing_or_none(routing, owner), self.allocator().any_stream());
          },
          "owner"_a, "routing"_a)
      .def(
          "check_placement",
          [](const Calls& self, nb::handle placement, const std::string& operation) {
            load_of(placement, nb::none(), self.types().load, self.place(), operation.c_str());
          },
          "placement"_a, "operation"_a);
}

}  // namespace ferry::python
