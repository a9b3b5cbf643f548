#ifndef FERRY_FERRY_HPP
#define FERRY_FERRY_HPP

/// The whole public interface: include this, or only the headers you need.

#include "ferry/arrival_tables.hpp"   // rows received by a dispatch
#include "ferry/backends.hpp"         // backends of this build
#include "ferry/balance.hpp"          // experts to ranks by load
#include "ferry/bootstrap.hpp"        // how ranks find each other
#include "ferry/channel_tables.hpp"   // a Routing as prefix counts by channel
#include "ferry/dispatch_layout.hpp"  // counts of one rank's tokens, without a group
#include "ferry/exchange.hpp"         // inputs and outputs of dispatch and combine
#include "ferry/expansion.hpp"        // rows by token to rows by expert, and back
#include "ferry/fp8.hpp"              // quantisation to FP8 and back
#include "ferry/gating.hpp"           // router scores to top-k experts
#include "ferry/group.hpp"            // ranks, memory, the three calls
#include "ferry/int8.hpp"             // quantisation to INT8 and back
#include "ferry/known_memory.hpp"     // tensors whose memory need not be looked up
#include "ferry/latency.hpp"          // inputs and outputs of latency mode
#include "ferry/launches.hpp"         // GPU work of calls
#include "ferry/load.hpp"             // load of experts over many calls, of all ranks
#include "ferry/membership.hpp"       // ranks that are lost, replaced and added
#include "ferry/memory.hpp"           // symmetric memory of a group
#include "ferry/one_sided.hpp"        // symmetric memory, puts, gets, signals, atomics
#include "ferry/placement.hpp"        // experts with several homes, load counters
#include "ferry/quantization.hpp"     // quantisation modes, and where it runs
#include "ferry/recorded_calls.hpp"   // last calls of the ranks of hung or killed groups
#include "ferry/routing.hpp"          // destinations of every token
#include "ferry/status.hpp"           // errors
#include "ferry/transports.hpp"       // networks between nodes
#include "ferry/types.hpp"            // dtypes, views, streams
#include "ferry/version.hpp"

#endif  // FERRY_FERRY_HPP
