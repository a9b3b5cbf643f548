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

Balance balance_loads(nb::handle load, nb::handle previous, std::int64_t num_replicas, int num_groups, int num_nodes,
                      int num_ranks, int policy, std::int64_t max_moves, double move_weight, int max_steps) {
  BalanceOptions options;
  options.num_replicas = num_replicas;
  options.num_groups = num_groups;
  options.num_nodes = num_nodes;
  options.num_ranks = num_ranks;
  options.policy = static_cast<BalancePolicy>(policy);
  options.previous = view_of(previous, {}, "balance", "previous");
  options.max_moves = max_moves;
  options.move_weight = move_weight;
  options.max_steps = max_steps;
  SignalCheck signals;
  options.interrupted = [&signals] { return signals.ask(); };
  const ConstTensorView loads = view_of(load, {}, "balance", "load");
  Result<Balance> balanced = [&] {
    const GilReleased released;
    return balance(loads, options);
  }();
  return value_or_raise(std::move(balanced));
}

/// Copies as tuples, first copy of each wave, counts, staging places.
nb::tuple plan_copies(nb::handle previous, nb::handle next, std::int64_t num_experts, int num_ranks, int num_nodes) {
  const ConstTensorView before = view_of(previous, {}, "plan_moves", "previous");
  const ConstTensorView after = view_of(next, {}, "plan_moves", "next");
  Result<MovePlan> planned = [&] {
    const GilReleased released;
    return plan_moves(before, after, {num_experts, num_ranks, num_nodes});
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
  module.def("balance", &balance_loads, "load"_a, "previous"_a.none(), "num_replicas"_a, "num_groups"_a, "num_nodes"_a,
             "num_ranks"_a, "policy"_a, "max_moves"_a, "move_weight"_a, "max_steps"_a);
  module.def("plan_moves", &plan_copies);
}

}  // namespace ferry::python
