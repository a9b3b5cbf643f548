#ifndef FERRY_PYTHON_LATENCY_HPP
#define FERRY_PYTHON_LATENCY_HPP

/// Calls of latency mode on objects of Python, as calls.hpp has them for throughput mode.

#include <nanobind/nanobind.h>

#include "calls.hpp"
#include "ferry/latency.hpp"

namespace ferry::python {

/// A dispatch whose inputs have been read.
struct ReadLatencyDispatch {
  nanobind::handle x{}, scales{};  ///< whose dtypes the outputs have
  LatencyDispatchInput in{};
  LatencyDispatchOutput out{};  ///< absent: to be made
  LatencyDispatchOptions options{};
  bool column_major_scales = false;
  nanobind::handle kept{};  ///< see keep_for_split; null: none
};

/// Tensors that a dispatch made; outputs that were given are not valid.
struct LatencyReceived {
  nanobind::object x, scales;
  PlacedRouting routing{};
};

/// A combine whose inputs have been read.
struct ReadLatencyCombine {
  nanobind::handle x{};  ///< whose dtype the sums have
  LatencyCombineInput in{};
  TensorView out{};  ///< absent: to be made
  LatencyCombineOptions options{};
  nanobind::handle kept{};  ///< see keep_for_split; null: none
};

/// kept: a list that holds the tensors of a call that is to be split, or None. Outputs that are made are added before
/// the call, so that no interruption of the program frees memory that the call reads or writes.
/// -> whether the call is split
template <typename Call>
bool keep_for_split(Call& call, nanobind::handle kept) {
  const bool split = !kept.is_none();
  call.options.split = split;
  if (split) call.kept = kept;
  return split;
}

/// Make the outputs that are absent, and dispatch or combine. If they cannot be made, the call is refused on all ranks,
/// so that none waits for this one.
LatencyReceived latency_dispatch(const Calls& calls, ReadLatencyDispatch& call, Stream stream);
/// -> the sums; not valid if the output was given
nanobind::object latency_combine(const Calls& calls, const Routing& routing, ReadLatencyCombine& call, Stream stream);

/// R * M rows of each local expert, which is always enough; refused where they are too many to count.
std::int64_t whole_slab(int num_ranks, std::int64_t max_tokens);

/// The tables of a slab as programs written for deep_ep take them.
struct SlabTables {
  nanobind::object counts;  ///< [L] i32 rows of each local expert
  nanobind::object tokens;  ///< [L, C] i32 tokens at their sources: every other word of the table of sources
  nanobind::object ranges;  ///< [L, R] i64 first row << 32 | rows of an expert from a rank
};
SlabTables slab_tables(const Calls& calls, const PlacedRouting& routing);

void define_latency(nanobind::module_& module);

}  // namespace ferry::python

#endif  // FERRY_PYTHON_LATENCY_HPP
