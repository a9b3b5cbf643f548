#ifndef FERRY_PYTHON_ARGUMENTS_HPP
#define FERRY_PYTHON_ARGUMENTS_HPP

/// Arguments of calls from Python, read and checked. A wrong one raises ferry.InvalidArgument; texts begin with
/// "operation: name".

#include <nanobind/nanobind.h>

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "ferry/placement.hpp"
#include "ferry/types.hpp"
#include "tensors.hpp"

namespace ferry::python {

/// Raises ferry.InvalidArgument.
[[noreturn]] void refuse(const std::string& message);

/// Name of an object's class.
std::string class_name(nanobind::handle value);
std::string repr_of(nanobind::handle value);

/// Raises ferry.InvalidArgument for a tensor that cannot be read, with the reason.
[[noreturn]] void refuse_unreadable(nanobind::handle tensor, Place place, const std::string& what);

/// View of a tensor in memory of `place`; None is an absent view.
TensorView view_of(nanobind::handle tensor, Place place, const char* operation, const char* name);

/// int(value), which has to be less than 2^(bits - 1) and more than its negative. whole: 64 bits.
std::int64_t whole(nanobind::handle value, const char* operation, const char* name);
int whole_32(nanobind::handle value, const char* operation, const char* name);

/// Owner of each expert; empty for None.
std::vector<std::int32_t> owners_of(nanobind::handle expert_to_rank, const char* operation);

/// Classes of the package that hold a placement and counters.
struct LoadTypes {
  nanobind::object placement, counters;
};

struct Load {
  Placement placement{};
  LoadCounters counters{};
};

/// placement: a ferry.Placement or None. counters: a ferry.LoadCounters or None.
Load load_of(nanobind::handle placement, nanobind::handle counters, const LoadTypes& types, Place place,
             const char* operation);

/// Whether peers have to learn of an error: it is an Exception, not KeyboardInterrupt or the like.
bool ends_call(const nanobind::python_error& error);

/// Reads arguments. If that fails, makes `refuse_call`, a call that all ranks refuse, so that no peer waits.
template <typename Read, typename Refuse>
auto read_or_refuse(Read read, Refuse refuse_call) {
  try {
    return read();
  } catch (const nanobind::python_error& error) {
    if (ends_call(error)) refuse_call();
    throw;
  } catch (...) {
    refuse_call();
    throw;
  }
}

}  // namespace ferry::python

#endif  // FERRY_PYTHON_ARGUMENTS_HPP
