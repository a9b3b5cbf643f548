#ifndef FERRY_ONE_SIDED_H
#define FERRY_ONE_SIDED_H

/// C interface: memory that every rank has at the same offset, and calls by which a rank reads and writes the memory of
/// another. Order, visibility and errors are those of ferry::OneSided (ferry/one_sided.hpp, docs/one-sided.md). Include
/// ferry/ferry.h.
///
/// Threads: any thread may call at any time, except that collective calls (allocate, release, split, barrier, destroy)
/// are made one at a time.

#include "ferry/ferry_group.h"

// NOLINTBEGIN(readability-identifier-naming): C has no namespaces
#ifdef __cplusplus
extern "C" {
#endif

typedef struct ferry_one_sided ferry_one_sided;
/// Set of ranks that meet at a barrier. Valid as long as its ferry_one_sided; freed separately.
typedef struct ferry_team ferry_team;

/// ferry::OneSidedOptions. The same on every rank, except device and net_devices.
typedef struct ferry_one_sided_options {
  uint64_t struct_size;
  const char* backend;      ///< NULL: "auto"
  const char* transport;    ///< NULL: "auto"
  const char* net_devices;  ///< NULL: the variable FERRY_NET_DEVICES, else detected
  uint64_t heap_bytes;      ///< symmetric memory of each rank; 0: 64 MiB
  int64_t timeout_ns;       ///< deadline of every wait; 0: 10 minutes
  int32_t ranks_per_node;   ///< 0: the ranks of each host
  int32_t use_device;       ///< backend "cuda": take the GPU `device`; 0: the calling thread's current one
  int32_t device;
  int32_t reserved;
} ferry_one_sided_options;

/// ferry::Comparison, of unsigned numbers.
enum {
  FERRY_EQUAL = 0,
  FERRY_NOT_EQUAL = 1,
  FERRY_GREATER = 2,
  FERRY_GREATER_EQUAL = 3,
  FERRY_LESS = 4,
  FERRY_LESS_EQUAL = 5
};
/// ferry::SignalOp.
enum { FERRY_SIGNAL_SET = 0, FERRY_SIGNAL_ADD = 1 };
/// `op` of ferry_fetch: the word becomes its sum with the value, the value itself, or its bitwise and, or, exclusive or
/// with the value.
enum { FERRY_FETCH_ADD = 0, FERRY_FETCH_SWAP = 1, FERRY_FETCH_AND = 2, FERRY_FETCH_OR = 3, FERRY_FETCH_XOR = 4 };
/// `which` of ferry_team_get.
enum { FERRY_TEAM_WORLD = 0, FERRY_TEAM_NODE = 1, FERRY_TEAM_RAIL = 2 };

/// Collective. The bootstrap is only used during this call.
FERRY_C_API ferry_status* ferry_one_sided_create(ferry_bootstrap* bootstrap, const ferry_one_sided_options* options,
                                                 ferry_one_sided** one_sided);
/// Collective, optional. The handle must still be freed.
FERRY_C_API ferry_status* ferry_one_sided_destroy(ferry_one_sided* one_sided);
/// Leaves without waiting for other ranks. Frees the symmetric memory.
FERRY_C_API void ferry_one_sided_free(ferry_one_sided* one_sided);
FERRY_C_API ferry_status* ferry_one_sided_topology(const ferry_one_sided* one_sided, ferry_topology* topology);
/// Name of the backend in use. Static.
FERRY_C_API const char* ferry_one_sided_backend(const ferry_one_sided* one_sided);
/// Errors of work on streams so far.
FERRY_C_API ferry_status* ferry_one_sided_poll(ferry_one_sided* one_sided);

/// Collective: memory at the same offset on every rank, aligned to a page, zeroed.
FERRY_C_API ferry_status* ferry_one_sided_allocate(ferry_one_sided* one_sided, uint64_t num_bytes, void** data);
/// Collective: frees memory of ferry_one_sided_allocate.
FERRY_C_API ferry_status* ferry_one_sided_release(ferry_one_sided* one_sided, void* data);
/// Address at which this rank loads and stores the memory of `rank`; NULL if it cannot.
FERRY_C_API void* ferry_one_sided_peer_pointer(const ferry_one_sided* one_sided, int32_t rank, const void* data);

// Copies. Remote sides (`dest` of a put, `source` of a get, every `word`) are addresses in this rank's own symmetric
// memory: the call uses the same offset in the memory of `rank`. nbi: the local side may be used again after a quiet.

FERRY_C_API ferry_status* ferry_put(ferry_one_sided* one_sided, int32_t rank, void* dest, const void* source,
                                    uint64_t num_bytes, void* stream);
FERRY_C_API ferry_status* ferry_put_nbi(ferry_one_sided* one_sided, int32_t rank, void* dest, const void* source,
                                        uint64_t num_bytes, void* stream);
FERRY_C_API ferry_status* ferry_get(ferry_one_sided* one_sided, int32_t rank, void* dest, const void* source,
                                    uint64_t num_bytes, void* stream);
FERRY_C_API ferry_status* ferry_get_nbi(ferry_one_sided* one_sided, int32_t rank, void* dest, const void* source,
                                        uint64_t num_bytes, void* stream);
/// A rank that sees the signal also sees the bytes. op: FERRY_SIGNAL_SET, ….
FERRY_C_API ferry_status* ferry_put_signal(ferry_one_sided* one_sided, int32_t rank, void* dest, const void* source,
                                           uint64_t num_bytes, uint64_t* word, uint64_t value, int32_t op,
                                           void* stream);
FERRY_C_API ferry_status* ferry_put_signal_nbi(ferry_one_sided* one_sided, int32_t rank, void* dest, const void* source,
                                               uint64_t num_bytes, uint64_t* word, uint64_t value, int32_t op,
                                               void* stream);

// Words: 8 bytes, aligned to 8; of functions whose name has a 32: 4 bytes, aligned to 4. A word of 4 bytes and one of 8
// that contains it are not atomic with each other.

FERRY_C_API ferry_status* ferry_signal(ferry_one_sided* one_sided, int32_t rank, uint64_t* word, uint64_t value,
                                       int32_t op, void* stream);
FERRY_C_API ferry_status* ferry_signal32(ferry_one_sided* one_sided, int32_t rank, uint32_t* word, uint32_t value,
                                         int32_t op, void* stream);
/// *fetched: previous value of the word; CUDA: written for later work on the stream, in memory that the GPU reaches.
FERRY_C_API ferry_status* ferry_fetch_add(ferry_one_sided* one_sided, int32_t rank, uint64_t* word, uint64_t value,
                                          uint64_t* fetched, void* stream);
FERRY_C_API ferry_status* ferry_compare_swap(ferry_one_sided* one_sided, int32_t rank, uint64_t* word,
                                             uint64_t expected, uint64_t desired, uint64_t* fetched, void* stream);
FERRY_C_API ferry_status* ferry_compare_swap32(ferry_one_sided* one_sided, int32_t rank, uint32_t* word,
                                               uint32_t expected, uint32_t desired, uint32_t* fetched, void* stream);
/// op: FERRY_FETCH_ADD, ….
FERRY_C_API ferry_status* ferry_fetch(ferry_one_sided* one_sided, int32_t rank, int32_t op, uint64_t* word,
                                      uint64_t value, uint64_t* fetched, void* stream);
FERRY_C_API ferry_status* ferry_fetch32(ferry_one_sided* one_sided, int32_t rank, int32_t op, uint32_t* word,
                                        uint32_t value, uint32_t* fetched, void* stream);
/// The same with *fetched in host memory, written on return; CUDA: blocks the host, uses no stream.
FERRY_C_API ferry_status* ferry_fetch_add_on_host(ferry_one_sided* one_sided, int32_t rank, uint64_t* word,
                                                  uint64_t value, uint64_t* fetched);
FERRY_C_API ferry_status* ferry_compare_swap_on_host(ferry_one_sided* one_sided, int32_t rank, uint64_t* word,
                                                     uint64_t expected, uint64_t desired, uint64_t* fetched);
FERRY_C_API ferry_status* ferry_compare_swap32_on_host(ferry_one_sided* one_sided, int32_t rank, uint32_t* word,
                                                       uint32_t expected, uint32_t desired, uint32_t* fetched);
FERRY_C_API ferry_status* ferry_fetch_on_host(ferry_one_sided* one_sided, int32_t rank, int32_t op, uint64_t* word,
                                              uint64_t value, uint64_t* fetched);
FERRY_C_API ferry_status* ferry_fetch32_on_host(ferry_one_sided* one_sided, int32_t rank, int32_t op, uint32_t* word,
                                                uint32_t value, uint32_t* fetched);
/// Wait until the word of this rank compares so with `value` (FERRY_EQUAL, …). timeout_ns 0: the options' timeout_ns.
FERRY_C_API ferry_status* ferry_wait_until(ferry_one_sided* one_sided, const uint64_t* word, int32_t comparison,
                                           uint64_t value, int64_t timeout_ns, void* stream);
/// *holds: whether the word compares so now.
FERRY_C_API ferry_status* ferry_test_word(ferry_one_sided* one_sided, const uint64_t* word, int32_t comparison,
                                          uint64_t value, int32_t* holds);

// Order and completion

/// Orders this rank's earlier operations to `rank` before all later ones; -1: for each rank.
FERRY_C_API ferry_status* ferry_fence(ferry_one_sided* one_sided, int32_t rank, void* stream);
/// Waits until everything that this rank has started is complete.
FERRY_C_API ferry_status* ferry_quiet(ferry_one_sided* one_sided, void* stream);
/// The same for the operations to `rank` alone.
FERRY_C_API ferry_status* ferry_quiet_rank(ferry_one_sided* one_sided, int32_t rank, void* stream);
/// quiet, then a barrier of the team; NULL: of all ranks.
FERRY_C_API ferry_status* ferry_barrier(ferry_one_sided* one_sided, const ferry_team* team, void* stream);

// Teams

/// All ranks, those of this node, or those with this rank's index in each node: FERRY_TEAM_WORLD, ….
FERRY_C_API ferry_status* ferry_team_get(ferry_one_sided* one_sided, int32_t which, ferry_team** team);
/// Collective over `parent` (NULL: all ranks): one team of the ranks that pass the same colour, ordered by key, then by
/// rank. A negative colour: *team is NULL. A rank can join 64 teams in all, including the three initial ones and teams
/// freed since; after that FERRY_ERROR_CAPACITY.
FERRY_C_API ferry_status* ferry_team_split(ferry_one_sided* one_sided, const ferry_team* parent, int32_t colour,
                                           int32_t key, ferry_team** team);
FERRY_C_API int32_t ferry_team_num_ranks(const ferry_team* team);
/// This rank's index in the team; -1 without a team.
FERRY_C_API int32_t ferry_team_rank(const ferry_team* team);
/// The rank at that index of the team; -1 if there is none.
FERRY_C_API int32_t ferry_team_world_rank(const ferry_team* team, int32_t team_rank);
FERRY_C_API void ferry_team_free(ferry_team* team);

#ifdef __cplusplus
}  // extern "C"
#endif
// NOLINTEND(readability-identifier-naming)

#endif  // FERRY_ONE_SIDED_H
