#include "deep_ep/expansion.hpp"

#include <array>
#include <span>
#include <utility>

#include "errors.hpp"
#include "objects.hpp"

namespace nb = nanobind;

namespace ferry::python::deep_ep {
namespace {

/// Columns of a handle's metadata before the slots.
constexpr std::int64_t kFirstSlot = 2;

ExpansionOptions options_on(Place place) {
  ExpansionOptions options;
  options.backend = place.on_gpu ? "cuda" : "cpu";
  options.device = place.on_gpu ? place.device : -1;
  return options;
}

/// Tensors that a call needs at once, made together.
class Outputs {
 public:
  explicit Outputs(const Calls& calls) : calls_(calls) {}

  void want(const Wanted& wanted, nb::object& tensor, TensorView& view) {
    wanted_[count_] = wanted;
    places_[count_++] = {&tensor, &view};
  }
  /// @throws nanobind::python_error
  void make() {
    std::array<nb::object, kMost> made;
    calls_.allocator().make_all(std::span(wanted_).first(count_), made);
    for (std::size_t i = 0; i < count_; ++i) {
      *places_[i].first = std::move(made[i]);
      *places_[i].second = read_tensor(*places_[i].first, calls_.place());
    }
  }

 private:
  static constexpr std::size_t kMost = 4;

  const Calls& calls_;
  std::array<Wanted, kMost> wanted_{};
  std::array<std::pair<nb::object*, TensorView*>, kMost> places_{};
  std::size_t count_ = 0;
};

}  // namespace

SlotViews slots_of(const TensorView& metadata, const TensorView& last_equal) {
  SlotViews views;
  views.slots = metadata;
  if (metadata.data != nullptr) {
    views.slots.data = static_cast<const std::int32_t*>(metadata.data) + kFirstSlot * metadata.stride(1);
  }
  views.slots.shape[1] -= kFirstSlot;
  views.last_equal = last_equal;
  return views;
}

std::int64_t largest_slot(const ConstTensorView& slots) {
  const auto* row = static_cast<const std::int32_t*>(slots.data);
  std::int32_t largest = -1;
  for (std::int64_t i = 0; i < slots.extent(0); ++i, row += slots.stride(0)) {
    for (std::int64_t k = 0; k < slots.extent(1); ++k) largest = row[k] > largest ? row[k] : largest;
  }
  return largest;
}

Received expand(const Calls& calls, const Received& by_token, const SlotViews& slots, const ExpandedForm& form,
                Stream stream) {
  const Place place = calls.place();
  const TableTypes& types = calls.allocator().types();
  ExpandInput in{.slots = slots.slots, .x = read_tensor(by_token.x, place), .last_equal = slots.last_equal};
  Received made;
  ExpandOutput out;
  nb::object row_of_slot;
  // The dtypes of the payload are new references, which live until the tensors are made.
  std::array<nb::object, 2> dtypes;
  Outputs outputs(calls);
  dtypes[0] = dtype_of(by_token.x);
  outputs.want({dtypes[0], {form.num_rows, in.x.extent(1)}}, made.x, out.x);
  if (by_token.scales.is_valid()) {
    in.scales = read_tensor(by_token.scales, place);
    dtypes[1] = dtype_of(by_token.scales);
    if (form.column_major_scales) {
      made.scales = calls.allocator().make_column_major(dtypes[1], form.num_rows, in.scales.extent(1));
      out.scales = read_tensor(made.scales, place);
    } else {
      outputs.want({dtypes[1], {form.num_rows, in.scales.extent(1)}}, made.scales, out.scales);
    }
  }
  if (by_token.topk_weights.is_valid()) {
    in.weights = read_tensor(by_token.topk_weights, place);
    outputs.want({types.f32, {form.num_rows}, 1}, made.topk_weights, out.weights);
  }
  if (form.zero_padding) outputs.want({types.i32, {form.num_rows}, 1}, row_of_slot, out.row_of_slot);
  outputs.make();
  ExpansionOptions options = options_on(place);
  options.zero_padding = form.zero_padding;
  const Status status = [&] {
    const CallScope scope;
    return expand_rows(in, options, out, stream);
  }();
  raise_if_error(status);
  return made;
}

Reduced reduce(const Calls& calls, const ReduceInput& in, bool exact, Stream stream) {
  const TableTypes& types = calls.allocator().types();
  const std::int64_t num_rows = in.slots.extent(0);
  Reduced made;
  // In symmetric memory, which combine does not stage.
  const std::array rows{Wanted{exact ? types.f32 : types.bf16, {num_rows, in.x.extent(1)}, 2, true}};
  made.x = std::move(calls.allocator().make_outputs(rows).front());
  made.x_view = read_tensor(made.x, calls.place());
  ReduceOutput out{.x = made.x_view};
  if (in.weights.present()) {
    made.weights = calls.allocator().make({types.f32, {num_rows, in.slots.extent(1)}});
    made.weights_view = read_tensor(made.weights, calls.place());
    out.weights = made.weights_view;
  }
  const Status status = [&] {
    const CallScope scope;
    return reduce_rows(in, options_on(calls.place()), out, stream);
  }();
  raise_if_error(status);
  return made;
}

}  // namespace ferry::python::deep_ep
