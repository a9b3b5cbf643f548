#include "deep_ep/turn.hpp"

#include <stdexcept>

namespace nb = nanobind;

namespace ferry::python::deep_ep {

Turn::Turn(const Calls& calls, Stream stream, std::initializer_list<Collective> collectives, bool exact_route)
    : calls_(calls), stream_(stream), num_left_(collectives.size()), exact_route_(exact_route) {
  std::size_t at = collectives.size();
  for (const Collective collective : collectives) left_.at(--at) = collective;
}

void Turn::add(Collective collective) { left_.at(num_left_++) = collective; }

void Turn::begin(Collective collective) {
  if (num_left_ == 0 || left_.at(num_left_ - 1) != collective) {
    throw std::logic_error("an operation of deep_ep makes another collective than it has announced");
  }
  --num_left_;
  has_sent_nothing_ = false;
}

bool Turn::ends_here(Collective collective) const {
  // On GPUs only routes whose counts the host waits for report a refusal before they return.
  return !calls_.place().on_gpu || (collective == Collective::kRoute && exact_route_) ||
         collective == Collective::kRailRoute;
}

void Turn::note_failed(Collective collective) {
  if (collective == Collective::kRoute) route_failed_ = true;
  if (collective == Collective::kRailRoute) rail_route_failed_ = true;
}

bool Turn::is_void(Collective collective) const {
  if (collective == Collective::kRailDispatch) return rail_route_failed_;
  return (collective == Collective::kDispatch || collective == Collective::kCombine) && route_failed_;
}

void Turn::give_up() {
  if (all_know_) return;
  while (num_left_ > 0) {
    const Collective collective = left_.at(--num_left_);
    if (is_void(collective)) continue;
    refuse(collective);
    if (ends_here(collective)) return;
  }
}

void Turn::refuse(Collective collective) {
  note_failed(collective);
  switch (collective) {
    case Collective::kRoute:
    case Collective::kRailRoute:
      return calls_.refuse_route(stream_);
    case Collective::kDispatch:
      return calls_.refuse_dispatch(routing_, stream_);
    case Collective::kRailDispatch:
      return calls_.refuse_dispatch(rail_routing_, stream_);
    case Collective::kGather:
      return calls_.refuse_dispatch({}, stream_);
    case Collective::kCombine:
      return calls_.refuse_combine(routing_, stream_);
    case Collective::kLatencyDispatch:
      return calls_.refuse_latency_dispatch(stream_);
    case Collective::kLatencyCombine:
      return calls_.refuse_latency_combine({}, stream_);
  }
}

void Turn::raise_if_given(nb::handle problem) {
  if (problem.is_none() || PyExceptionInstance_Check(problem.ptr()) == 0) return;
  PyErr_SetObject(reinterpret_cast<PyObject*>(Py_TYPE(problem.ptr())), problem.ptr());
  nb::raise_python_error();
}

}  // namespace ferry::python::deep_ep
