#ifndef FERRY_GROUP_H
#define FERRY_GROUP_H

/// C interface: bootstraps, groups, symmetric memory. Include ferry/ferry.h.

#include "ferry/ferry_base.h"

// NOLINTBEGIN(readability-identifier-naming): C has no namespaces
#ifdef __cplusplus
extern "C" {
#endif

/// Used only while a group is created from it; may serve many groups, one after the other.
typedef struct ferry_bootstrap ferry_bootstrap;

/// For ranks that are threads of this process. Writes `num_ranks` handles; bootstraps[r] is for the thread of rank r.
FERRY_C_API ferry_status* ferry_bootstrap_create_in_process(int32_t num_ranks, ferry_bootstrap** bootstraps);

/// ferry::TcpBootstrapOptions: ranks numbered by hand.
typedef struct ferry_tcp_options {
  uint64_t struct_size;
  const char* host;    ///< address of rank 0; NULL: "127.0.0.1"
  const char* secret;  ///< the same on all ranks
  int64_t timeout_ns;  ///< time for all ranks to arrive; 0: 50 s
  int32_t rank;
  int32_t num_ranks;
  int32_t port;       ///< port on which rank 0 listens
  int32_t listen_fd;  ///< rank 0: a listening socket to use instead, owned by the bootstrap from then on; 0: none
} ferry_tcp_options;

FERRY_C_API ferry_status* ferry_bootstrap_create_tcp(const ferry_tcp_options* options, ferry_bootstrap** bootstrap);

/// TCP, with the environment variables of torchrun, mpirun or srun, or your own FERRY_RANK, FERRY_NUM_RANKS,
/// FERRY_HOST, FERRY_PORT and FERRY_SECRET (docs/bootstrap.md). timeout_ns: time for all ranks to arrive; 0: 50 s.
FERRY_C_API ferry_status* ferry_bootstrap_create_from_environment(int64_t timeout_ns, ferry_bootstrap** bootstrap);

/// Every rank passes `num_bytes` bytes, the same number on all ranks, and gets those of all ranks, in rank order. Waits
/// at most about `timeout_ns` nanoseconds, if it can bound that.
/// Returns 0, or an error code (FERRY_ERROR_TIMEOUT, …; other numbers count as FERRY_ERROR_TRANSPORT).
typedef int32_t (*ferry_all_gather)(void* user, const void* mine, uint64_t num_bytes, void* all, int64_t timeout_ns);

/// All-gather of the program: MPI, a key-value store, ….
typedef struct ferry_callback_options {
  uint64_t struct_size;
  ferry_all_gather all_gather;
  void* user;                 ///< passed to all_gather
  const char* local_address;  ///< numeric address of this host on the network that joins it to rank 0; NULL: not known
  int32_t rank;
  int32_t num_ranks;
} ferry_callback_options;

/// all_gather and its `user` must stay valid until the bootstrap is freed. It is called only by threads that use the
/// bootstrap, during their calls.
FERRY_C_API ferry_status* ferry_bootstrap_create_callback(const ferry_callback_options* options,
                                                          ferry_bootstrap** bootstrap);

FERRY_C_API int32_t ferry_bootstrap_rank(const ferry_bootstrap* bootstrap);
FERRY_C_API int32_t ferry_bootstrap_num_ranks(const ferry_bootstrap* bootstrap);
/// Collective, for the program's own use. As ferry_all_gather: `all` has room for num_ranks * num_bytes, at most 1 MiB
/// from each rank. timeout_ns 0: 50 s.
FERRY_C_API ferry_status* ferry_bootstrap_all_gather(ferry_bootstrap* bootstrap, const void* mine, uint64_t num_bytes,
                                                     void* all, int64_t timeout_ns);
/// Ranks that still gather get FERRY_ERROR_PEER_LOST.
FERRY_C_API void ferry_bootstrap_free(ferry_bootstrap* bootstrap);

// ---- Groups ---------------------------------------------------------------------------------------------------------

typedef struct ferry_group ferry_group;

/// ferry::GroupOptions. The same on every rank, except arena_bytes, device, num_reserved_sms, network_poll_ns,
/// net_devices, network_service_level, network_paths, tuning_file and interrupted.
typedef struct ferry_group_options {
  uint64_t struct_size;
  const char* backend;      ///< NULL: "auto", which is "cuda" if there is a GPU; host memory needs "cpu"
  const char* transport;    ///< NULL: "auto"
  const char* ring_memory;  ///< NULL: "auto"
  const char* net_devices;  ///< NULL: the variable FERRY_NET_DEVICES, else detected
  const char* tuning_file;  ///< NULL: the variable FERRY_TUNING, else none
  uint64_t arena_bytes;     ///< most symmetric memory of this rank; 0: 32 GiB of addresses
  int64_t timeout_ns;       ///< deadline of every wait; 0: 10 minutes
  uint64_t latency_bytes;   ///< backend "cuda": see ferry_latency_bytes_required
  int64_t mask_timeout_ns;  ///< with mask_lost_ranks; 0: 100 s
  int32_t ranks_per_node;   ///< 0: the ranks of each host
  int32_t mask_lost_ranks;  ///< latency mode continues without lost ranks
  int32_t use_device;       ///< backend "cuda": take the GPU `device`; 0: the calling thread's current one
  int32_t device;
  ferry_interrupted interrupted;  ///< NULL: waits end by themselves; else it ends a wait and breaks the group
  void* interrupted_user;         ///< passed to `interrupted`
  /// Backend "cuda": multiprocessors left to other libraries' kernels that wait for ranks, such as NCCL's. 0: the
  /// variable FERRY_RESERVED_SMS, else 32; less than 0: none.
  int32_t num_reserved_sms;
  int32_t verify;  ///< rows carry checksums, and a wrong row is FERRY_ERROR_DATA_CORRUPT; see ferry::GroupOptions
  /// Backend "cuda", several nodes: time that the network's thread polls after the last movement. 0: the variable
  /// FERRY_NETWORK_POLL, else a second; -1: always.
  int64_t network_poll_ns;
  /// InfiniBand service level (RoCE v2: Ethernet priority) of a network card, 1 to 15. 0: UCX's choice; less than 0:
  /// level 0. No effect without a card, see ferry_network_usage_service_level.
  int32_t network_service_level;
  int32_t network_paths;  ///< connections of a card to a rank of another host, 1 to 16; 0: UCX's choice
  /// [num_present_ranks] rank in the group of each rank of the bootstrap, ascending. The other ranks are absent until
  /// ferry_group_renew brings them in: calls of latency mode are made without them, others are
  /// FERRY_ERROR_INVALID_ARGUMENT. NULL: all are present, in order.
  const int32_t* present_ranks;
  int32_t num_present_ranks;
  int32_t num_ranks;  ///< ranks of the group, of which present_ranks have a process; 0: as many as the bootstrap has
} ferry_group_options;

/// Collective.
FERRY_C_API ferry_status* ferry_group_create(ferry_bootstrap* bootstrap, const ferry_group_options* options,
                                             ferry_group** group);
/// Collective, optional: waits until every rank is done, then leaves. Later calls return FERRY_ERROR_INVALID_ARGUMENT.
/// The handle must still be freed.
FERRY_C_API ferry_status* ferry_group_destroy(ferry_group* group);
/// Leaves the group, if ferry_group_destroy did not, without waiting for other ranks. Its buffers and routings stay
/// valid.
FERRY_C_API void ferry_group_free(ferry_group* group);

/// ferry::Group::suspend: ends this rank's part in the group until ferry_group_renew. For a rank that has lost another
/// one and calls ferry_membership_next_view: calls of ranks that still wait for it end soon, in latency mode with masks
/// by masking it. Local, but waits until this rank's calls have run; replays of captured graphs must be done. Other
/// calls on the group return FERRY_ERROR_INVALID_ARGUMENT until then; it may be destroyed and freed.
/// silent_ranks: has room for `num` ranks, num = the number of ranks of the group. Receives, ascending, the
/// `*num_silent` silent ranks (see ferry::Group::suspend), for ferry_next_view_options::silent_ids.
/// FERRY_ERROR_INVALID_ARGUMENT (an argument, a group that is suspended or destroyed) and FERRY_ERROR_UNSUPPORTED
/// (several nodes): nothing has changed. Otherwise FERRY_ERROR_CUDA.
FERRY_C_API ferry_status* ferry_group_suspend(ferry_group* group, int32_t* silent_ranks, int64_t num,
                                              int64_t* num_silent);
/// ferry::Group::renew: goes on with the processes that are there now, in a group of one node. Collective over the
/// ranks of the bootstrap: those that stay call it, suspended or between calls; processes that take the place of lost
/// ones call ferry_group_create with the group's options, its `num_ranks` and the same present_ranks.
/// present_ranks: [num] rank in the group of each rank of the bootstrap, ascending, as in ferry_group_options: the ids
/// of a membership's view if it began with the ranks of this group.
/// Rank and options stay, and on GPUs memory and captured graphs of latency mode. Other routings, split calls that were
/// not received, an error that broke the group and all masks end; absent ranks are masked on every rank then, and no
/// others. Errors as ferry_group_create; the group can make no calls then, and may be renewed again.
FERRY_C_API ferry_status* ferry_group_renew(ferry_group* group, ferry_bootstrap* bootstrap,
                                            const int32_t* present_ranks, int64_t num);

/// Filled by the library. Ranks are node-major.
typedef struct ferry_topology {
  uint64_t struct_size;
  int32_t rank;
  int32_t num_ranks;
  int32_t ranks_per_node;
  int32_t num_nodes;
} ferry_topology;

FERRY_C_API ferry_status* ferry_group_topology(const ferry_group* group, ferry_topology* topology);
FERRY_C_API int32_t ferry_group_rank(const ferry_group* group);
FERRY_C_API int32_t ferry_group_num_ranks(const ferry_group* group);
/// Name of the backend in use. Static.
FERRY_C_API const char* ferry_group_backend(const ferry_group* group);

/// Filled by the library: symmetric memory of this rank, in bytes.
typedef struct ferry_memory_usage {
  uint64_t struct_size;
  uint64_t control_bytes;
  uint64_t network_bytes;
  uint64_t staging_bytes;
  uint64_t allocated_bytes;
  uint64_t total_bytes;
} ferry_memory_usage;

FERRY_C_API ferry_status* ferry_group_memory_usage(const ferry_group* group, ferry_memory_usage* usage);
/// Nanoseconds that calls of this rank have waited for each rank so far: [num], num = the number of ranks. Never waits
/// for a GPU.
FERRY_C_API ferry_status* ferry_group_wait_times_ns(const ferry_group* group, int64_t* times_ns, int64_t num);
/// Free staging memory that no rank can still use. Local, between calls.
FERRY_C_API ferry_status* ferry_group_trim(ferry_group* group);
/// Wait until this rank's work on the stream is done, and report errors since the last report.
FERRY_C_API ferry_status* ferry_group_wait(ferry_group* group, void* stream);
/// The report of ferry_group_wait as of now, without waiting.
FERRY_C_API ferry_status* ferry_group_poll(ferry_group* group);

/// Symmetric memory, which peers of a node reach without staging copies.
typedef struct ferry_buffer ferry_buffer;

/// Aligned to a page, zeroed. Local.
FERRY_C_API ferry_status* ferry_group_allocate(ferry_group* group, uint64_t num_bytes, ferry_buffer** buffer);
FERRY_C_API void* ferry_buffer_data(const ferry_buffer* buffer);
FERRY_C_API uint64_t ferry_buffer_num_bytes(const ferry_buffer* buffer);
/// Allowed before or after the group is freed.
FERRY_C_API void ferry_buffer_free(ferry_buffer* buffer);

#ifdef __cplusplus
}  // extern "C"
#endif
// NOLINTEND(readability-identifier-naming)

#endif  // FERRY_GROUP_H
