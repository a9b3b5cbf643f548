#include "calls.hpp"

#include <algorithm>
#include <bit>
#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "arguments.hpp"
#include "errors.hpp"
#include "gil.hpp"
#include "objects.hpp"

namespace nb = nanobind;

namespace ferry::python {
namespace {

/// UE8M0 scales are made four to an i32, as matrix products on GPUs take them.
constexpr std::int64_t kExponentsPerWord = 4;

/// Rows from this size on are made in sixteenths of a power of two. Exact routes differ from call to call, and each
/// with more rows than all before it would take new memory: torch's allocator does not put them where fewer were, and
/// all ranks map the memory that the group takes, which costs milliseconds.
constexpr std::int64_t kRoundedBytes = std::int64_t{16} << 20;
constexpr std::uint64_t kRoundedParts = 16;

std::int64_t with_room(std::int64_t num_rows) {
  const std::uint64_t rows = static_cast<std::uint64_t>(num_rows);
  const std::uint64_t granule = std::max<std::uint64_t>(1, std::bit_floor(rows) / kRoundedParts);
  return static_cast<std::int64_t>((rows + granule - 1) / granule * granule);
}

}  // namespace

Quantization quantization_of(nb::handle mode, const char* operation) {
  if (mode.is_none()) return Quantization::kNone;
  const nb::object number = nb::module_::import_("ferry._quantize").attr("number_of")(mode, operation);
  return static_cast<Quantization>(nb::cast<int>(number));
}

WireFormat wire_format_of(nb::handle format, const char* operation) {
  if (format.is_none()) return WireFormat::kAsGiven;
  static const Name fp8("fp8");
  const int equal = PyObject_RichCompareBool(format.ptr(), fp8.ptr(), Py_EQ);
  if (equal < 0) nb::raise_python_error();
  if (equal == 1) return WireFormat::kFp8;
  refuse(std::string(operation) + ": wire_format is " + repr_of(format) + ", expected None or 'fp8'");
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
  return nb::cast<const PlacedRouting&>(get_attribute(routing, native_name)).routing;
}

void Calls::check_routing(nb::handle routing, const char* operation) const {
  if (!nb::isinstance(routing, types_.routing)) {
    refuse(std::string(operation) + ": routing is a " + class_name(routing) +
           ", expected the ferry.Routing that route returned");
  }
  static_cast<void>(native_of(routing));
}

Routing Calls::routing_or_none(nb::handle routing, nb::handle owner) const {
  static const Name group_name("group");
  static const Name native_name("_native");
  if (!nb::isinstance(routing, types_.routing) || !find_attribute(routing, group_name).is(owner)) return {};
  const nb::object native = find_attribute(routing, native_name);
  const bool is_whole = native.is_valid() && nb::isinstance<PlacedRouting>(native);
  return is_whole ? nb::cast<const PlacedRouting&>(native).routing : Routing();
}

void Calls::refuse_route(Stream stream) const {
  RouteOptions options;
  options.num_experts = 1;
  {
    const GilReleased released;
    static_cast<void>(group_->route({}, options, stream));
  }
  raise_kept();
}

void Calls::refuse_dispatch(const Routing& routing, Stream stream) const {
  {
    const GilReleased released;
    static_cast<void>(group_->dispatch(routing, {}, {}, stream));
  }
  raise_kept();
}

void Calls::refuse_combine(const Routing& routing, Stream stream) const {
  {
    const GilReleased released;
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
  if (call.tables && of_tokens) {
    const nb::object& type = call.narrow_ids ? allocator_.types().i32 : allocator_.types().i64;
    want({type, {rows, shape.num_topk}}, made.topk_idx, out.topk_idx);
  }
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

}  // namespace ferry::python
