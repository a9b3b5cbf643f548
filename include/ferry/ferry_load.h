#ifndef FERRY_LOAD_H
#define FERRY_LOAD_H

/// C interface: the load of experts over a window of calls, and a rank's traffic to other nodes (ferry/load.hpp,
/// docs/experts-load.md). Include ferry/ferry.h.

#include "ferry/ferry_base.h"
#include "ferry/ferry_group.h"
#include "ferry/ferry_placement.h"

// NOLINTBEGIN(readability-identifier-naming): C has no namespaces
#ifdef __cplusplus
extern "C" {
#endif

/// ferry::LoadWindow: counters of one rank for every layer of a model, in host memory. One call at a time.
typedef struct ferry_load_window ferry_load_window;
/// ferry::LoadSummary: the counts of all ranks. Read-only, usable by any thread.
typedef struct ferry_load_summary ferry_load_summary;

/// num_physical_experts 0: only logical experts are counted.
FERRY_C_API ferry_status* ferry_load_window_create(int64_t num_layers, int64_t num_experts,
                                                   int64_t num_physical_experts, ferry_load_window** window);
FERRY_C_API void ferry_load_window_free(ferry_load_window* window);

/// Fills in the counters to pass to calls of a layer, from 0; their memory is the window's. For groups on GPUs the
/// program keeps such counters itself, and adds them.
/// FERRY_ERROR_INVALID_ARGUMENT: there is no such layer.
FERRY_C_API ferry_status* ferry_load_window_counters(ferry_load_window* window, int64_t layer,
                                                     ferry_load_counters* counters);
/// Adds counts from elsewhere: logical [layers, E]; physical [layers, P], or NULL and 0.
FERRY_C_API ferry_status* ferry_load_window_add(ferry_load_window* window, const int64_t* logical, int64_t num_logical,
                                                const int64_t* physical, int64_t num_physical);
/// Begins a new window: sets all counts to zero.
FERRY_C_API ferry_status* ferry_load_window_reset(ferry_load_window* window);

/// This rank's counts so far, row-major; their number in *num: [layers, E] and [layers, P].
FERRY_C_API const int64_t* ferry_load_window_logical(const ferry_load_window* window, int64_t* num);
FERRY_C_API const int64_t* ferry_load_window_physical(const ferry_load_window* window, int64_t* num);

/// The counts of all ranks. Collective over the bootstrap; resets nothing. wait_times_ns: [R] growth of
/// ferry_group_wait_times_ns in this window, or NULL and 0 on all ranks. timeout_ns 0: 50 s.
FERRY_C_API ferry_status* ferry_load_window_sum(const ferry_load_window* window, ferry_bootstrap* bootstrap,
                                                const int64_t* wait_times_ns, int64_t num_wait_times,
                                                int64_t timeout_ns, ferry_load_summary** summary);
FERRY_C_API void ferry_load_summary_free(ferry_load_summary* summary);

/// Arrays of the summary, row-major; their lengths in *num: [layers, E]; [layers, P]; [R, R] nanoseconds for which rank
/// i has waited for rank j, none if no rank passed any.
FERRY_C_API const int64_t* ferry_load_summary_logical(const ferry_load_summary* summary, int64_t* num);
FERRY_C_API const int64_t* ferry_load_summary_physical(const ferry_load_summary* summary, int64_t* num);
FERRY_C_API const int64_t* ferry_load_summary_wait_times_ns(const ferry_load_summary* summary, int64_t* num);
/// ferry::LoadSummary::to_json. "" for NULL.
FERRY_C_API const char* ferry_load_summary_json(const ferry_load_summary* summary);

// ---- Between nodes --------------------------------------------------------------------------------------------------

/// ferry::NetworkUsage: traffic of a rank to other nodes since its group was created.
typedef struct ferry_network_usage ferry_network_usage;

/// Traffic to one rail peer, a rank with this rank's index in another node.
typedef struct ferry_rail_usage {
  uint64_t struct_size;  ///< set by the library
  uint64_t sent_bytes;   ///< payload, tables and call headers handed to the network
  uint64_t num_messages;
  const char* route;  ///< path to the peer as named by the engine
  int32_t rank;       ///< the rail peer
  int32_t reserved;
} ferry_rail_usage;

FERRY_C_API ferry_status* ferry_group_network_usage(const ferry_group* group, ferry_network_usage** usage);
FERRY_C_API void ferry_network_usage_free(ferry_network_usage* usage);
/// Engine in use, devices through which other hosts reach this rank, and memory of the rings; "" with one node, and for
/// NULL.
FERRY_C_API const char* ferry_network_usage_transport(const ferry_network_usage* usage);
FERRY_C_API const char* ferry_network_usage_net_devices(const ferry_network_usage* usage);
FERRY_C_API const char* ferry_network_usage_ring_memory(const ferry_network_usage* usage);
/// Why rings are not in GPU memory; "" if they are, with one node, and for NULL.
FERRY_C_API const char* ferry_network_usage_why_host_memory(const ferry_network_usage* usage);
/// Service level and number of connections that this rank's network cards were given; -1 and 0 if none were.
FERRY_C_API int32_t ferry_network_usage_service_level(const ferry_network_usage* usage);
FERRY_C_API int32_t ferry_network_usage_num_paths(const ferry_network_usage* usage);
/// Number of rail peers, one per other node; 0 with one node.
FERRY_C_API int64_t ferry_network_usage_num_rails(const ferry_network_usage* usage);
/// The rail peers by node. NULL if there is no such rail. Belongs to the usage.
FERRY_C_API const ferry_rail_usage* ferry_network_usage_rail(const ferry_network_usage* usage, int64_t index);

#ifdef __cplusplus
}  // extern "C"
#endif
// NOLINTEND(readability-identifier-naming)

#endif  // FERRY_LOAD_H
