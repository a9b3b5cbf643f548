#ifndef FERRY_CUDA_CONTEXT_PARTS_HPP
#define FERRY_CUDA_CONTEXT_PARTS_HPP

/// Everything that a group has on this rank, and how it is made.

#include <cstddef>
#include <memory>
#include <optional>
#include <vector>

#include "call/call_sync.hpp"
#include "core/backend.hpp"
#include "cuda/context/peer_watch.hpp"
#include "cuda/context/rail_link.hpp"
#include "cuda/driver/own_stream.hpp"
#include "cuda/memory/arena_exchange.hpp"
#include "cuda/memory/device_arena.hpp"
#include "cuda/memory/pinned_memory.hpp"
#include "cuda/memory/table_memory.hpp"
#include "cuda/sync/call_log.hpp"
#include "cuda/sync/rank_params.hpp"

namespace ferry::cuda {

struct Parts {
  int device = 0;
  int num_sms = 0;                       ///< of the GPU, divided by the number of ranks that share it
  bool has_bulk = true;                  ///< the GPU has the bulk copy engine
  std::size_t shared_limit = 0;          ///< most shared memory of a block
  std::vector<TuningEntry> tuning;       ///< for this GPU and number of ranks
  std::shared_ptr<std::byte> rings;      ///< in groups of several nodes; outlives `sync`, whose network uses it
  std::shared_ptr<std::byte> gpu_rings;  ///< likewise, with chunks in GPU memory
  std::unique_ptr<call::CallSync> sync;
  std::optional<CallLog> call_log;
  std::unique_ptr<RailLink> rail_link;  ///< in groups of several nodes
  std::shared_ptr<DeviceArena> arena;
  std::unique_ptr<ArenaExchange> exchange;  // after `sync`, whose links it uses
  std::shared_ptr<TableMemory> memory;
  std::shared_ptr<PinnedMemory> pinned;
  DeviceReport* report = nullptr;  ///< in `pinned`
  std::shared_ptr<std::byte> control;
  std::shared_ptr<std::byte> latency;  ///< GroupOptions::latency_bytes in pages, right behind `control`; or null
  std::size_t latency_bytes = 0;
  std::shared_ptr<std::byte> masks;   ///< zeroed; in groups that mask lost ranks and have latency_bytes, else null
  std::uint64_t mask_timeout_ns = 0;  ///< of groups that mask lost ranks, else 0
  RankParams ranks;
  std::shared_ptr<OwnStream> stream;           ///< for work that waits for no other rank: setup, zeroing
  std::shared_ptr<OwnStream> refusals_stream;  ///< where refused calls wait for the peers
  std::unique_ptr<PeerWatch> watch;            ///< last: it reads `sync` and `report` from a thread of its own
};

/// Loads the kernels of all calls on the current GPU; `has_bulk`: whether they can use the bulk copy engine there.
/// Loading them later would wait for running kernels, which may be waiting for this rank.
using LoadKernels = Status (*)(int device, std::size_t shared_limit, bool& has_bulk);

/// Prepares the memory of latency mode, which is zeroed, by work on the stream, and takes what else it needs.
using StartLatency = Status (*)(Parts& parts, int num_ranks, cudaStream_t stream);

/// Collective: succeeds on all ranks or fails on all.
Result<Parts> create_parts(const BackendContext& context, LoadKernels load_kernels, StartLatency start_latency);

/// Whether this process can use any GPU; ok or why not.
Status probe();

}  // namespace ferry::cuda

#endif  // FERRY_CUDA_CONTEXT_PARTS_HPP
