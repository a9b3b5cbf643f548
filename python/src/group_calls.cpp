/// Group.route, Group.dispatch and Group.combine of the package: their arguments, and their names in the module.

#include <nanobind/stl/string.h>

#include <array>
#include <optional>
#include <string>
#include <utility>

#include "arguments.hpp"
#include "calls.hpp"
#include "errors.hpp"
#include "objects.hpp"

namespace nb = nanobind;
using namespace nb::literals;

namespace ferry::python {
namespace {

constexpr std::size_t kMaxBiases = 2;

/// Refuses anything but a tensor of at least one dimension, whose width an output takes.
void check_rows(const Calls& calls, nb::handle tensor, const char* operation, const char* name) {
  if (find_tensor(tensor, calls.place())) return;
  if (nb::isinstance(tensor, calls.allocator().tensor_type()) && nb::cast<int>(tensor.attr("dim")()) >= 1) return;
  refuse(std::string(operation) + ": " + name + ": expected a torch.Tensor of rows, got " + class_name(tensor));
}

/// List of up to two biases, either of which may be None. bias: None, a tensor, or an iterable.
nb::list biases_of(const Calls& calls, nb::handle bias) {
  nb::list biases;
  if (bias.is_none()) return biases;
  if (nb::isinstance(bias, calls.allocator().tensor_type())) {
    biases.append(bias);
    return biases;
  }
  const int is_given = PyObject_IsTrue(bias.ptr());
  if (is_given < 0) nb::raise_python_error();
  if (is_given == 0) return biases;
  PyObject* const list = PySequence_List(bias.ptr());
  if (list == nullptr) {
    if (PyErr_ExceptionMatches(PyExc_TypeError) == 0) nb::raise_python_error();
    PyErr_Clear();
    refuse("combine: bias is a " + class_name(bias) + ", expected one or two tensors");
  }
  biases = nb::steal<nb::list>(list);
  if (biases.size() > kMaxBiases) {
    refuse("combine: " + std::to_string(biases.size()) + " biases, expected at most two; add them first");
  }
  return biases;
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
                   nb::handle bias, bool weighted, nb::handle topk_weights, nb::handle out, nb::handle num_sms,
                   nb::handle wire_format) {
  const char* const operation = "combine";
  const Place place = calls.place();
  const Stream stream = calls.allocator().any_stream();
  nb::list biases;  // keeps them until the call is made: those of an iterator have no other owner
  const ReadCombine call = read_or_refuse(
      [&] {
        ReadCombine read{x};
        calls.check_routing(routing, operation);
        biases = biases_of(calls, bias);
        const std::optional<ReadTensor> rows = find_tensor(x, place);
        if (!rows && out.is_none()) check_rows(calls, x, operation, "x");
        read.options.kernel.num_sms = whole_32(num_sms, operation, "num_sms");
        read.in.x = rows ? rows->view : view_of(x, place, operation, "x");
        read.in.weights = view_of(weights, place, operation, "weights");
        for (std::size_t i = 0; i < biases.size(); ++i) {
          read.in.bias[i] = view_of(nb::object(biases[i]), place, operation, i == 0 ? "bias" : "second bias");
        }
        read.in.topk_weights = view_of(topk_weights, place, operation, "topk_weights");
        read.out = view_of(out, place, operation, "out");
        read.options.weighted = weighted;
        read.options.wire_format = wire_format_of(wire_format, operation);
        return read;
      },
      [&] { calls.refuse_combine(calls.routing_or_none(routing, owner), stream); });
  Combined combined = calls.combine(calls.native_of(routing), call, stream);
  const nb::tuple sums = nb::make_tuple(combined.x.is_valid() ? combined.x : nb::borrow(out), combined.weights);
  return named_tuple(calls.types().combined, sums);
}

}  // namespace

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
           "weighted"_a, "topk_weights"_a.none(), "out"_a.none(), "num_sms"_a.none(), "wire_format"_a.none())
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
