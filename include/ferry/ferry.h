#ifndef FERRY_FERRY_H
#define FERRY_FERRY_H

/// The whole C interface of libferry, C99: for C and every language that calls C (Rust, Python's ctypes, Julia, …).
/// Semantics, shapes, dtypes and errors are those of the C++ functions of the same name (ferry/group.hpp,
/// ferry/routing.hpp, ferry/exchange.hpp, ferry/latency.hpp). docs/c.md is the guide.
///
/// Structs. The first member of every struct that a caller fills is `struct_size`: set it to sizeof the struct. For
/// every other member zero (NULL) means the default. Structs only grow at their end, so a program compiled with an
/// older header works with a newer library; with an older library it works as long as the members that the library
/// lacks are zero. A NULL pointer to a struct stands for a struct of zeros. Truth values are int32_t: 0 is false, any
/// other value is true.
///
/// Lifetimes. The library keeps no argument after a call returns, except the tensors' memory, as the call's declaration
/// states, and all_gather's `user`. Returned strings and arrays belong to the handle that returned them. Every handle
/// is freed once, by its function, which accepts NULL; using it afterwards is undefined.
///
/// Threads. One call at a time for each group and each bootstrap. Any number of threads may read routings and statuses.
/// Different handles are independent; there is no global state to set up.

#include "ferry/ferry_balance.h"       // placement of experts on ranks
#include "ferry/ferry_base.h"          // version, status, tensors, backends and networks
#include "ferry/ferry_exchange.h"      // route, dispatch, combine
#include "ferry/ferry_expansion.h"     // rows by token to rows by expert and back
#include "ferry/ferry_gating.h"        // router logits to experts
#include "ferry/ferry_group.h"         // bootstraps, groups, symmetric memory
#include "ferry/ferry_latency.h"       // latency mode
#include "ferry/ferry_load.h"          // load over many calls, traffic between nodes
#include "ferry/ferry_membership.h"    // ranks that are lost or join
#include "ferry/ferry_memory.h"        // memory that calls need, known memory
#include "ferry/ferry_one_sided.h"     // memory that other ranks read and write
#include "ferry/ferry_placement.h"     // experts with several homes, counters of load
#include "ferry/ferry_quantization.h"  // FP8 and INT8
#include "ferry/ferry_tables.h"        // tables of a routing, layout of a dispatch

#endif  // FERRY_FERRY_H
