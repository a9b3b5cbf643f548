#include "balance.hpp"

#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <cstdint>
#include <vector>

#include "arguments.hpp"
#include "errors.hpp"
#include "ferry/balance.hpp"
#include "gil.hpp"
#include "views.hpp"

namespace nb = nanobind;
using namespace nb::literals;

namespace ferry::python {
namespace {

Balance balance_loads(nb::handle load, nb::handle previous, nb::handle num_replicas, nb::handle num_groups,
                      nb::handle num_nodes, nb::handle num_ranks, int policy, nb::handle max_moves, double move_weight,
                      nb::handle max_steps) {
  constexpr const char* kCall = "balance";
  BalanceOptions options;
  options.num_replicas = whole(num_replicas, kCall, "num_replicas");
  options.num_groups = whole_32(num_groups, kCall, "num_groups");
  options.num_nodes = whole_32(num_nodes, kCall, "num_nodes");
  options.num_ranks = whole_32(num_ranks, kCall, "num_ranks");
  options.policy = static_cast<BalancePolicy>(policy);
  options.previous = view_of(previous, {}, kCall, "previous");
  options.max_moves = whole(max_moves, kCall, "max_moves");
  options.move_weight = move_weight;
  options.max_steps = whole_32(max_steps, kCall, "max_steps");
  SignalCheck signals;
  options.interrupted = [&signals] { return signals.ask(); };
  const ConstTensorView loads = view_of(load, {}, kCall, "load");
  Result<Balance> balanced = [&] {
    const GilReleased released;
    return balance(loads, options);
  }();
  return value_or_raise(std::move(balanced));
}

/// Copies as tuples, first copy of each wave, counts, staging places.
nb::tuple plan_copies(nb::handle previous, nb::handle next, nb::handle num_experts, nb::handle num_ranks,
                      nb::handle num_nodes) {
  constexpr const char* kCall = "plan_moves";
  const ConstTensorView before = view_of(previous, {}, kCall, "previous");
  const ConstTensorView after = view_of(next, {}, kCall, "next");
  const MovePlanOptions options{whole(num_experts, kCall, "num_experts"), whole_32(num_ranks, kCall, "num_ranks"),
                                whole_32(num_nodes, kCall, "num_nodes")};
  Result<MovePlan> planned = [&] {
    const GilReleased released;
    return plan_moves(before, after, options);
  }();
  const MovePlan plan = value_or_raise(std::move(planned));
  nb::list copies;
  for (const ExpertCopy& copy : plan.copies) {
    copies.append(nb::make_tuple(copy.layer, copy.expert, copy.from, copy.to, copy.from_rank, copy.to_rank,
                                 copy.from_staging, copy.to_staging));
  }
  return nb::make_tuple(copies, nb::cast(plan.wave_begin), plan.num_remote, plan.num_between_nodes, plan.num_local,
                        nb::cast(plan.num_staging));
}

/// The view's memory lives as long as `self`.
nb::object table(nb::handle self, const std::vector<std::int32_t>& values, const ConstTensorView& shape) {
  ConstTensorView view = shape;
  view.data = values.data();
  return array_of(view, {}, self);
}

}  // namespace

void define_balance(nb::module_& module) {
  nb::class_<Balance>(module, "Balance")
      .def("physical_to_logical",
           [](nb::handle self) {
             const auto& of = nb::cast<const Balance&>(self);
             return table(self, of.physical_to_logical, {nullptr, DType::kInt32, {of.num_layers, of.num_replicas}});
           })
      .def("logical_to_physical",
           [](nb::handle self) {
             const auto& of = nb::cast<const Balance&>(self);
             return table(self, of.logical_to_physical,
                          {nullptr, DType::kInt32, {of.num_layers, of.num_experts, of.max_replicas}});
           })
      .def("replica_counts",
           [](nb::handle self) {
             const auto& of = nb::cast<const Balance&>(self);
             return table(self, of.replica_counts, {nullptr, DType::kInt32, {of.num_layers, of.num_experts}});
           })
      .def_prop_ro("policy", [](const Balance& of) { return std::string(to_string(of.policy)); })
      .def_prop_ro("max_load", [](const Balance& of) { return of.max_load; })
      .def_prop_ro("mean_load", [](const Balance& of) { return of.mean_load; })
      .def_prop_ro("num_moves", [](const Balance& of) { return of.num_moves; });
  module.def("balance", &balance_loads, "load"_a, "previous"_a.none(), "num_replicas"_a.none(), "num_groups"_a.none(),
             "num_nodes"_a.none(), "num_ranks"_a.none(), "policy"_a, "max_moves"_a.none(), "move_weight"_a,
             "max_steps"_a.none());
  module.def("plan_moves", &plan_copies, "previous"_a, "next"_a, "num_experts"_a.none(), "num_ranks"_a.none(),
             "num_nodes"_a.none());
}

}  // namespace ferry::python
