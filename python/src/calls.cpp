#include "calls.hpp"

#include <algorithm>
#include <bit>
#include <cstdint>
#include <optional>
#include <utility>
#include <vector>

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
/// that brings more rows than any before it would take new memory: torch's allocator does not put them where fewer
/// were, and all ranks map what the group takes, which is milliseconds of a call.
constexpr std::int64_t kRoundedBytes = std::int64_t{16} << 20;
constexpr std::uint64_t kRoundedParts = 16;

std::int64_t with_room(std::int64_t num_rows) {
  const std::uint64_t rows = static_cast<std::uint64_t>(num_rows);
  const std::uint64_t granule = std::max<std::uint64_t>(1, std::bit_floor(rows) / kRoundedParts);
  return static_cast<std::int64_t>((rows + granule - 1) / granule * granule);
}

/// None is an absent view; false if it cannot be read.
bool read_optional(nb::handle tensor, Place place, TensorView& view) {
  if (tensor.is_none()) return true;
  const std::optional<ReadTensor> read = find_tensor(tensor, place);
  if (read) view = read->view;
  return read.has_value();
}

bool read_optional(nb::handle tensor, Place place, ConstTensorView& view) {
  TensorView read;
  if (!read_optional(tensor, place, read)) return false;
  view = read;
  return true;
}

/// None, a tensor, or up to two.
bool read_biases(nb::handle bias, Place place, std::array<ConstTensorView, kMaxBiases>& views) {
  if (!nb::isinstance<nb::tuple>(bias) && !nb::isinstance<nb::list>(bias)) {
    return read_optional(bias, place, views[0]);
  }
  const std::size_t count = nb::len(bias);
  if (count > kMaxBiases) return false;
  for (std::size_t i = 0; i < count; ++i) {
    if (!read_optional(bias[i], place, views[i]) || !views[i].present()) return false;
  }
  return true;
}

/// The numbers are integers, or the package finds out what they are.
nb::object route(const Calls& calls, nb::handle owner, nb::handle topk_idx, nb::handle topk_weights,
                 nb::handle num_experts, int layout, nb::handle expert_alignment, nb::handle slab_capacity,
                 nb::handle max_recv_rows, nb::handle max_tokens, nb::handle num_sms) {
  const Place place = calls.place();
  const std::optional<Stream> stream = calls.allocator().stream();
  RouteInput in;
  RouteOptions options;
  options.layout = static_cast<Layout>(layout);
  if (!stream || !read_optional(topk_idx, place, in.topk_idx) || !in.topk_idx.present() ||
      !read_optional(topk_weights, place, in.topk_weights) || !nb::try_cast(num_experts, options.num_experts, false) ||
      !nb::try_cast(expert_alignment, options.expert_alignment, false) ||
      !nb::try_cast(slab_capacity, options.slab_capacity, false) ||
      !nb::try_cast(max_recv_rows, options.max_recv_rows, false) ||
      !nb::try_cast(max_tokens, options.max_tokens, false) || !nb::try_cast(num_sms, options.num_sms, false)) {
    return nb::none();
  }
  Result<Routing> routing = [&] {
    const CallScope scope;
    return calls.group().route(in, options, *stream);
  }();
  const PlacedRouting placed{value_or_raise(std::move(routing)), place};
  return calls.new_routing(placed, owner, !topk_weights.is_none(), options.max_recv_rows > 0);
}

std::optional<int> small_integer(nb::handle value) {
  int result = 0;
  return nb::try_cast(value, result, false) ? std::optional(result) : std::nullopt;
}

nb::object or_none(nb::object value) { return value.is_valid() ? std::move(value) : nb::none(); }

/// in: x, scales, topk_weights; out: x, scales, source.
nb::object dispatch(const Calls& calls, const PlacedRouting& routing, nb::handle x, nb::handle scales,
                    nb::handle topk_weights, nb::handle out, nb::handle out_scales, nb::handle out_source, bool tables,
                    bool has_weights, bool bounded, bool zero_padding, nb::handle num_sms, int quantize) {
  const Place place = calls.place();
  const std::optional<Stream> stream = calls.allocator().stream();
  const std::optional<int> sms = small_integer(num_sms);
  ReadDispatch call{x, scales};
  if (!stream || !sms || !routing.routing.present() || !read_optional(x, place, call.in.x) || !call.in.x.present() ||
      !read_optional(scales, place, call.in.scales) || !read_optional(topk_weights, place, call.in.topk_weights) ||
      !read_optional(out, place, call.out.x) || !read_optional(out_scales, place, call.out.scales) ||
      !read_optional(out_source, place, call.out.source)) {
    return nb::none();
  }
  call.tables = tables;
  call.weights = has_weights || call.in.topk_weights.present();
  call.bounded = bounded;
  call.options.zero_padding = zero_padding;
  call.options.kernel.num_sms = *sms;
  call.options.quantize = static_cast<Quantization>(quantize);
  Received made = calls.dispatch(routing.routing, call, *stream);
  const nb::tuple received = nb::make_tuple(made.x.is_valid() ? made.x : nb::borrow(out),
                                            made.scales.is_valid() ? made.scales : nb::borrow(out_scales),
                                            or_none(made.topk_idx), or_none(made.topk_weights));
  return named_tuple(calls.types().received, received);
}

nb::object combine(const Calls& calls, const PlacedRouting& routing, nb::handle x, nb::handle weights, nb::handle bias,
                   bool weighted, nb::handle topk_weights, nb::handle out, nb::handle num_sms) {
  const Place place = calls.place();
  const std::optional<Stream> stream = calls.allocator().stream();
  const std::optional<int> sms = small_integer(num_sms);
  ReadCombine call{x};
  if (!stream || !sms || !routing.routing.present() || !read_optional(x, place, call.in.x) || !call.in.x.present() ||
      !read_optional(weights, place, call.in.weights) || !read_biases(bias, place, call.in.bias) ||
      !read_optional(topk_weights, place, call.in.topk_weights) || !read_optional(out, place, call.out)) {
    return nb::none();
  }
  call.options.weighted = weighted;
  call.options.kernel.num_sms = *sms;
  Combined combined = calls.combine(routing.routing, call, *stream);
  const nb::tuple sums = nb::make_tuple(combined.x.is_valid() ? combined.x : nb::borrow(out), combined.weights);
  return named_tuple(calls.types().combined, sums);
}

}  // namespace

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
  // Scales that are given to a dispatch that makes its own are refused by the call.
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
  // Where memory is that short, each attempt would make torch give back what it keeps.
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
      .def("route", &route, "owner"_a, "topk_idx"_a.none(), "topk_weights"_a.none(), "num_experts"_a.none(), "layout"_a,
           "expert_alignment"_a.none(), "slab_capacity"_a.none(), "max_recv_rows"_a.none(), "max_tokens"_a.none(),
           "num_sms"_a.none())
      .def("dispatch", &dispatch, "routing"_a, "x"_a.none(), "scales"_a.none(), "topk_weights"_a.none(), "out"_a.none(),
           "out_scales"_a.none(), "out_source"_a.none(), "tables"_a, "has_weights"_a, "bounded"_a, "zero_padding"_a,
           "num_sms"_a.none(), "quantize"_a = 0)
      .def("combine", &combine, "routing"_a, "x"_a.none(), "weights"_a.none(), "bias"_a.none(), "weighted"_a,
           "topk_weights"_a.none(), "out"_a.none(), "num_sms"_a.none());
}

}  // namespace ferry::python
