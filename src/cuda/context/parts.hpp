#ifndef FERRY_CUDA_CONTEXT_PARTS_HPP
#define FERRY_CUDA_CONTEXT_PARTS_HPP

/// Parts of a group on this rank, and how they are made.

#include <cstddef>
#include <functional>
#include <memory>
#include <optional>
#include <string>
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
#include "cuda/sync/corrupt_report.hpp"
#include "cuda/sync/rank_params.hpp"

namespace ferry::cuda {

struct Parts {
  int device = 0;
  int num_sms = 0;                   ///< of the GPU, divided by the number of ranks that share it
  int num_waiting_sms = 0;           ///< most of these whose blocks wait for other ranks unless a call sets a number
  bool has_bulk = true;              ///< the GPU has the bulk copy engine
  std::size_t shared_limit = 0;      ///< most shared memory that a block may have
  std::vector<TuningEntry> tuning;   ///< entries for this GPU and number of ranks
  std::shared_ptr<std::byte> rings;  ///< in groups of several nodes; outlives `sync`, whose network uses it
  std::shared_ptr<std::byte> gpu_rings;  ///< the same, with chunks in GPU memory
  std::unique_ptr<call::CallSync> sync;
  std::optional<CallLog> call_log;
  std::unique_ptr<RailLink> rail_link;  ///< in groups of several nodes
  std::shared_ptr<DeviceArena> arena;
  PeerPlaces places;                        ///< addresses of the peers' arenas
  std::unique_ptr<ArenaExchange> exchange;  // declared after `sync`, whose links it uses
  std::shared_ptr<TableMemory> memory;
  std::shared_ptr<PinnedMemory> pinned;
  DeviceReport* report = nullptr;    ///< in `pinned`
  CorruptReport* corrupt = nullptr;  ///< behind `report`
  bool verify = false;               ///< GroupOptions::verify
  std::shared_ptr<std::byte> control;
  std::shared_ptr<std::byte> latency;  ///< GroupOptions::latency_bytes in pages, directly after `control`; or null
  std::size_t latency_bytes = 0;
  std::vector<int> absent_ranks;      ///< GroupOptions::present_ranks: masked from the first call on
  std::shared_ptr<std::byte> masks;   ///< zeroed; in groups that mask lost ranks and have latency_bytes, else null
  std::uint64_t mask_timeout_ns = 0;  ///< in groups that mask lost ranks, else 0
  RankParams ranks;
  RankParams latency_ranks;           ///< of latency mode: over several nodes, of the group (RankParams::of_group)
  std::string gpu_pci_address;        ///< empty if the driver does not report it
  std::shared_ptr<OwnStream> stream;  ///< for work that waits for no other rank: setup, zeroing
  std::shared_ptr<OwnStream> refusals_stream;  ///< stream on which refused calls wait for the peers
  std::unique_ptr<PeerWatch> watch;            ///< declared after `sync` and `report`, which its thread reads
  std::shared_ptr<void> far;  ///< this rank's end of the network of latency mode (cuda/far), which uses the others
  std::function<void()> send_rest;  ///< has that end send all that kernels have posted; or null
};

/// Loads the kernels of all calls on the current GPU. `has_bulk`: whether they can use the bulk copy engine there. A
/// later load would wait for running kernels, which may be waiting for this rank.
using LoadKernels = Status (*)(int device, std::size_t shared_limit, bool& has_bulk);

/// Prepares the zeroed memory of latency mode by work on the stream, and allocates the other memory that it needs.
using StartLatency = Status (*)(Parts& parts, int num_ranks, cudaStream_t stream);

/// Collective: succeeds on all ranks or fails on all.
Result<Parts> create_parts(const BackendContext& context, LoadKernels load_kernels, StartLatency start_latency);

/// Collective: implements Backend::renew. Everything in which other ranks have a part is made anew, at the addresses
/// that kernels of captured graphs know; no work of this rank may be running. After an error it may be called again.
Status renew_parts(const BackendContext& context, StartLatency start_latency, Parts& parts);

/// Ok if this process can use any GPU, otherwise the reason why not.
Status probe();

}  // namespace ferry::cuda

#endif  // FERRY_CUDA_CONTEXT_PARTS_HPP
