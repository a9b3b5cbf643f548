#ifndef FERRY_FERRY_H
#define FERRY_FERRY_H

/// The C interface of libferry, C99: all of it, for C and for whatever calls C (Rust, Python's ctypes, Julia, …).
/// What calls mean, which shapes and dtypes they take, and their errors are those of the C++ functions of the same
/// name (ferry/group.hpp, ferry/routing.hpp, ferry/exchange.hpp, ferry/latency.hpp). docs/c.md is the guide.
///
/// Structs. The first member of those that a caller fills is `struct_size`: set it to sizeof the struct. Of every other
/// member zero (NULL) means the default. Structs only grow at their end, so a program compiled with an older header
/// works with a newer library; with an older library it works as long as what that one does not know is zero. A NULL
/// pointer to a struct stands for one of zeros. Truth values are int32_t: 0, or anything else for yes.
///
/// Lifetimes. Nothing a call is given is kept after it returns, but for the tensors' memory, which the call's
/// declaration speaks of, and all_gather's `user`. Strings and arrays that are returned belong to the handle that they
/// come from. Every handle is freed once, by its function, which takes NULL; using it afterwards is undefined.
///
/// Threads. One call at a time for each group and each bootstrap. Routings and statuses may be read by many threads.
/// Different handles are independent; there is no global state to set up. (ferry_observe_launches has some, for tools.)

#include "ferry/ferry_balance.h"    // which expert lives on which rank
#include "ferry/ferry_base.h"       // version, status, tensors, what a build has
#include "ferry/ferry_exchange.h"   // route, dispatch, combine
#include "ferry/ferry_expansion.h"  // rows by token to rows by expert and back
#include "ferry/ferry_gating.h"     // router logits to experts
#include "ferry/ferry_group.h"      // bootstraps, groups, symmetric memory
#include "ferry/ferry_latency.h"    // latency mode
#include "ferry/ferry_launches.h"   // kernels that calls launch, memory that is known
#include "ferry/ferry_load.h"       // load over many calls, what went to other nodes
#include "ferry/ferry_one_sided.h"  // memory that ranks read and write alone
#include "ferry/ferry_placement.h"  // experts with several homes, counters of load
#include "ferry/ferry_tools.h"      // tables, quantisation, sizes

#endif  // FERRY_FERRY_H
