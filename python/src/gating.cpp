#include "gating.hpp"

#include <nanobind/stl/string_view.h>

#include <tuple>

#include "arguments.hpp"
#include "errors.hpp"
#include "ferry/gating.hpp"
#include "gil.hpp"

namespace nb = nanobind;

namespace ferry::python {
namespace {

nb::tuple tuple_of(const GatingOptions& options) {
  return nb::make_tuple(static_cast<int>(options.score), options.num_topk, options.num_groups,
                        options.num_selected_groups, options.normalize, options.scale,
                        static_cast<int>(options.group_score), options.epsilon, options.capacity,
                        static_cast<int>(options.overflow), options.noise, options.noise_seed, options.first_token);
}

GatingOptions options_of(const nb::tuple& numbers) {
  constexpr std::size_t kNumMembers = 13;
  if (numbers.size() != kNumMembers) throw nb::value_error("select_experts: options has another number of members");
  GatingOptions options;
  std::size_t at = 0;
  const auto take = [&](auto& member) { member = nb::cast<std::decay_t<decltype(member)>>(numbers[at++]); };
  const auto take_enumerator = [&](auto& member) {
    member = static_cast<std::decay_t<decltype(member)>>(nb::cast<int>(numbers[at++]));
  };
  take_enumerator(options.score);
  take(options.num_topk);
  take(options.num_groups);
  take(options.num_selected_groups);
  take(options.normalize);
  take(options.scale);
  take_enumerator(options.group_score);
  take(options.epsilon);
  take(options.capacity);
  take_enumerator(options.overflow);
  take(options.noise);
  take(options.noise_seed);
  take(options.first_token);
  return options;
}

/// `device`: -1 on the host.
void choose(nb::handle logits, nb::handle bias, nb::handle ids, nb::handle weights, const nb::tuple& numbers,
            int device, std::uintptr_t stream) {
  const Place place{device >= 0, device >= 0 ? device : 0};
  const TensorView from = view_of(logits, place, "select_experts", "logits");
  const TensorView with = view_of(bias, place, "select_experts", "bias");
  const TensorView to_ids = view_of(ids, place, "select_experts", "out_idx");
  const TensorView to_weights = view_of(weights, place, "select_experts", "out_weights");
  const GatingOptions options = options_of(numbers);
  Status status;
  {
    const GilReleased unlocked;
    status = select_experts(from, with, options, to_ids, to_weights, {place.on_gpu ? "cuda" : "cpu", device},
                            {reinterpret_cast<void*>(stream)});
  }
  raise_if_error(status);
}

nb::list list_presets() {
  nb::list list;
  for (const GatingPreset& preset : gating_presets()) {
    list.append(
        nb::make_tuple(preset.name, preset.num_experts, preset.has_bias, preset.source, tuple_of(preset.options)));
  }
  return list;
}

}  // namespace

void define_gating(nb::module_& module) {
  module.def("select_experts", &choose, nb::arg("logits"), nb::arg("bias").none(), nb::arg("topk_idx"),
             nb::arg("topk_weights"), nb::arg("options"), nb::arg("device"), nb::arg("stream"));
  module.def("gating_presets", &list_presets);
}

}  // namespace ferry::python
