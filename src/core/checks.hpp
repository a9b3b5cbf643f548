#ifndef FERRY_CORE_CHECKS_HPP
#define FERRY_CORE_CHECKS_HPP

/// Checks of one rank's arguments. Each turns public views into a backend's call, or reports what is wrong: what,
/// where, observed, expected, what to do. Nothing here communicates with other ranks.

#include <memory>

#include "core/backend.hpp"
#include "ferry/exchange.hpp"
#include "ferry/routing.hpp"

namespace ferry {

/// Fills everything but `record` and `stream`. `ids_on_host`: the ids can be read and are checked too.
Status check_route(const RouteInput& in, const RouteOptions& options, const Topology& topology, bool ids_on_host,
                   RouteCall& call);
Status check_dispatch(const RoutingState& routing, const DispatchInput& in, const DispatchOutput& out,
                      Quantization quantize, DispatchCall& call);
Status check_combine(const RoutingState& routing, const CombineInput& in, const CombineOutput& out,
                     const CombineOptions& options, CombineCall& call);

/// Fills everything but `routing` and `stream`.
Status check_channel_tables(const RoutingState& routing, int num_ranks, int num_channels, const ChannelTables& out,
                            ChannelTablesCall& call);

/// "[128, 8] i64" for messages.
std::string describe(const ConstTensorView& view);

/// The backend of this name, for a call that needs no group.
/// @errors kUnsupported, kInvalidArgument: this build has none, or there is none
Result<const BackendFactory*> find_backend(std::string_view operation, std::string_view name);

/// Pointer, sizes and contiguity of a small table ([T, K] ids, [rows] weights, …) with exactly this shape.
Status check_table(std::string_view what, const ConstTensorView& view, std::initializer_list<std::int64_t> shape,
                   std::initializer_list<DType> dtypes);

}  // namespace ferry

#endif  // FERRY_CORE_CHECKS_HPP
