#ifndef FERRY_PYTHON_DEEP_EP_TURN_HPP
#define FERRY_PYTHON_DEEP_EP_TURN_HPP

/// The collective calls of one operation of deep_ep, in order. If the operation fails, the remaining calls are made as
/// calls that all ranks refuse, so that no rank waits for this one.

#include <nanobind/nanobind.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <initializer_list>

#include "arguments.hpp"
#include "calls.hpp"

namespace ferry::python::deep_ep {

enum class Collective : std::uint8_t {
  kRailRoute,     ///< with kRailDispatch a second pair, which describes the tokens that a rank forwards
  kRailDispatch,  ///< with the routing of kRailRoute
  kRoute,
  kGather,    ///< a dispatch with the buffer's own routing, which goes to all ranks
  kDispatch,  ///< with the operation's own routing, as kCombine
  kCombine,
  kLatencyDispatch,
  kLatencyCombine,
};

class Turn {
 public:
  /// exact_route: kRoute waits for the counts of all ranks, which learn in that wait of a refusal.
  Turn(const Calls& calls, Stream stream, std::initializer_list<Collective> collectives, bool exact_route = true);

  Stream stream() const { return stream_; }

  /// Adds a collective, which becomes the next one. All ranks must add it.
  void add(Collective collective);

  /// Makes the next collective.
  template <typename Make>
  auto make(Collective collective, Make make) {
    begin(collective);
    try {
      return make();
    } catch (...) {
      all_know_ = ends_here(collective);
      note_failed(collective);
      throw;
    }
  }

  /// Routing that a collective has returned, for later ones that use it.
  void set_routing(const Routing& routing) { routing_ = routing; }
  void set_rail_routing(const Routing& routing) { rail_routing_ = routing; }

  /// Whether no collective has been begun.
  bool has_sent_nothing() const { return has_sent_nothing_; }

  /// Makes the operation. problem: None, or an exception to raise at once.
  template <typename Operation>
  nanobind::object run(nanobind::handle problem, Operation operation) {
    try {
      raise_if_given(problem);
      return operation();
    } catch (const nanobind::python_error& error) {
      if (ends_call(error)) give_up();
      throw;
    } catch (...) {
      give_up();
      throw;
    }
  }

  /// Raises `problem` if it is an exception.
  static void raise_if_given(nanobind::handle problem);

 private:
  static constexpr std::size_t kMost = 6;

  void begin(Collective collective);
  /// Whether all ranks learn at once that a collective was refused, and stop there.
  bool ends_here(Collective collective) const;
  void note_failed(Collective collective);
  /// Whether no rank makes a collective, since the route that it needs was refused.
  bool is_void(Collective collective) const;
  void give_up();
  void refuse(Collective collective);

  const Calls& calls_;
  Stream stream_;
  std::array<Collective, kMost> left_{};  ///< the next one last
  std::size_t num_left_ = 0;
  bool exact_route_;
  bool all_know_ = false;
  bool has_sent_nothing_ = true;
  bool route_failed_ = false;
  bool rail_route_failed_ = false;
  Routing routing_{};
  Routing rail_routing_{};
};

}  // namespace ferry::python::deep_ep

#endif  // FERRY_PYTHON_DEEP_EP_TURN_HPP
