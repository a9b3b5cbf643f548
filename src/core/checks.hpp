#ifndef FERRY_CORE_CHECKS_HPP
#define FERRY_CORE_CHECKS_HPP

/// Checks of one rank's arguments. Each turns public views into a backend's call, or returns an error with the
/// operation, place, observed and expected values and remedy. Nothing here communicates with other ranks.

#include <memory>

#include "core/backend.hpp"
#include "ferry/exchange.hpp"
#include "ferry/latency.hpp"
#include "ferry/routing.hpp"

namespace ferry {

/// Fills everything but `record`, `stream` and `num_tokens_view`. `ids_on_host`: the ids are readable, so those of the
/// tokens that count are checked too.
Status check_route(const RouteInput& in, const RouteOptions& options, ExpertPlacements& placements, bool ids_on_host,
                   RouteCall& call);
/// Shapes of a dispatch's output scales.
enum class ScaleShapes {
  kRows,   ///< [rows, S]
  kSlabs,  ///< also [L, C, S] for as many rows: any strides, but each expert's elements before those of the next
};
Status check_dispatch(const RoutingState& routing, const DispatchInput& in, const DispatchOutput& out,
                      const DispatchOptions& options, DispatchCall& call,
                      ScaleShapes scale_shapes = ScaleShapes::kRows);
Status check_combine(const RoutingState& routing, const CombineInput& in, const CombineOutput& out,
                     const CombineOptions& options, CombineCall& call);
/// Whether the ranks of a group can combine in the call's format.
Status check_wire_reach(const CombineCall& call, const Topology& topology, bool verifies);

/// Fills everything but `record`, `stream` and `wait_times_ns`.
Status check_latency_dispatch(const LatencyDispatchInput& in, const LatencyDispatchOutput& out,
                              const LatencyDispatchOptions& options, ExpertPlacements& placements, bool ids_on_host,
                              LatencyDispatchCall& call);
/// Fills everything but `routing`, `record`, `stream` and `wait_times_ns`.
Status check_latency_combine(const RoutingState& routing, const LatencyCombineInput& in,
                             const LatencyCombineOutput& out, const LatencyCombineOptions& options,
                             LatencyCombineCall& call);

/// Checks an argument of latency mode; fills `times_ns`, with null if the view is absent.
Status check_wait_times(std::string_view operation, const TensorView& view, int num_ranks, std::int64_t*& times_ns);

/// Arguments of latency_update_mask and latency_query_mask.
Status check_masked_rank(int rank, const Topology& topology);
Status check_mask_view(const TensorView& out, int num_ranks);

/// Sizes of tables by channel.
struct ChannelTablesShape {
  Layout layout = Layout::kTokens;
  int num_ranks = 1;
  std::int64_t num_rows = 0;
  std::int64_t num_tokens = 0;
};
/// Fills everything but `routing` and `stream`.
Status check_channel_tables(const ChannelTablesShape& shape, int num_channels, const ChannelTables& out,
                            ChannelTablesCall& call);

/// The status, with the leading call name of its message (route, dispatch or combine) replaced by `operation`.
Status as_error_of(std::string_view operation, const Status& status);

/// Checks the options of kernels on every backend, so that a program tested on CPU ranks is right on GPUs.
Status check_kernel(std::string_view operation, const KernelOptions& kernel);

/// "[128, 8] i64" for messages.
std::string describe(const ConstTensorView& view);

/// Checks that elements of an output's scales, [rows, S] or [L, C, S], do not share memory.
Status check_scales_output(std::string_view operation, const ConstTensorView& view);

/// Checks pointer, sizes and contiguity of a small table ([T, K] ids, [rows] weights, …) with exactly this shape.
Status check_table(std::string_view what, const ConstTensorView& view, std::initializer_list<std::int64_t> shape,
                   std::initializer_list<DType> dtypes);

}  // namespace ferry

#endif  // FERRY_CORE_CHECKS_HPP
