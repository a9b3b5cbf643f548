#ifndef FERRY_CUDA_INTRANODE_ROUTING_HPP
#define FERRY_CUDA_INTRANODE_ROUTING_HPP

/// A Routing's tables on the GPU, and the host's view of them, which may become available later.

#include <cstdint>
#include <memory>
#include <mutex>
#include <string_view>

#include "core/routing_state.hpp"
#include "cuda/intranode/homes.hpp"
#include "cuda/intranode/placements.hpp"
#include "cuda/intranode/route_params.hpp"
#include "cuda/intranode/routing_tables.hpp"
#include "cuda/memory/pinned_memory.hpp"
#include "cuda/sync/report.hpp"

namespace ferry::cuda {

/// Route's report to the host, in pinned memory: sizes and pointers.
struct HostResult {
  RouteResult* result = nullptr;
  FaultReport* fault = nullptr;
  std::int64_t* from_rank = nullptr;
  std::int64_t* to_rank = nullptr;
  std::int32_t* rows_per_expert = nullptr;
  std::int64_t* row_offsets = nullptr;
  std::uint64_t* words = nullptr;  ///< RouteWords in place of the arrays and of the numbers in `result`
  std::size_t num_words = 0;
  std::size_t size_bytes = 0;

  static HostResult at(std::byte* base, std::size_t num_ranks, std::size_t num_local_experts);
  static HostResult of_words(std::byte* base, std::size_t num_words);
  /// Zeroes the words whose value 0 means that the result is not known yet.
  void clear() const;
  /// 0: not known yet, 1: counts are available, 2: refused.
  std::uint64_t state() const;
  /// Whether the stream has reached the route.
  bool started() const;
};

/// Limit on how long a host waits for the counts of a route. A kernel that waits for other ranks ends by its own
/// deadline; this limit is for a GPU that does not run the kernel at all. Work that the program queued earlier on the
/// stream may take any time, so the deadline runs from the moment when the stream reaches the route; until then a far
/// longer one applies.
class CountsDeadline {
 public:
  CountsDeadline(const HostResult& host, std::int64_t timeout_ns);
  bool expired();

 private:
  const HostResult& host_;
  std::int64_t timeout_ns_;
  std::int64_t deadline_ns_;
  bool started_ = false;
};

/// Memory that a host needs to wait for counts.
struct CountsMemory {
  const std::shared_ptr<TableMemory>& owner;
  const std::shared_ptr<PinnedMemory>& pinned;
  const DeviceReport* report = nullptr;
};

/// Pinned memory in which kernels report the result of a route to the host.
struct CountsBlock {
  std::shared_ptr<TableMemory> owner;
  std::shared_ptr<PinnedMemory> memory;
  std::byte* data = nullptr;
  std::size_t size_bytes = 0;
  bool is_written = false;  ///< the whole block is written; else the kernel that writes it may not have run yet

  CountsBlock() = default;
  CountsBlock(const CountsBlock&) = delete;
  CountsBlock& operator=(const CountsBlock&) = delete;
  ~CountsBlock();
};

/// Marks a Routing made in a capture as not yet filled by any replay. Enqueues its work on `own_stream`.
Status mark_not_routed(std::string_view operation, RouteSummary* summary, cudaStream_t own_stream);

struct CudaRouting : RoutingState {
  /// Waits for the counts until CountsDeadline; leaves them empty if they do not arrive.
  void settle() const override;
  /// Takes pinned memory in which kernels report the counts of `num_ranks` ranks to the host; `settle` waits for them.
  /// The local experts must be known. Returns that memory as kernels address it, without `fault`.
  Result<RouteResultTables> expect_counts(const CountsMemory& counts, int num_ranks, std::int64_t deadline_ns);
  /// Variant of expect_counts for counts that are reported as words.
  Result<RouteWords> expect_words(const CountsMemory& counts, int num_ranks, std::int64_t deadline_ns);
  /// Makes `unsettled` read the kernels' reports. Called after expect_counts or expect_words.
  void count_calls_apart();
  /// Copies the counts out of pinned memory and releases it. The result's state must not be 0.
  void adopt_result();

  /// HostResult::state as far as it is known. 0 also while another thread settles, and after a wait was given up. Does
  /// not wait.
  std::uint64_t counts_state() const;

  /// [num_recv_rows, 2] in device memory.
  const std::int32_t* source_rows() const { return reinterpret_cast<const std::int32_t*>(source_memory.get()); }

  RoutingTables tables;
  std::shared_ptr<std::byte> memory;
  std::shared_ptr<std::byte> source_memory;
  std::shared_ptr<const Placement> placement;
  BuiltHomes homes;
  bool exact_rows = false;  ///< outputs certainly have no row beyond the used ones
  int num_blocks = 0;
  int tokens_per_block = 0;

  std::shared_ptr<PinnedMemory> pinned;
  std::shared_ptr<CountsBlock> pinned_data;  ///< null: the counts are adopted, or were never requested (captured)
  HostResult host;
  std::int64_t timeout_ns = 0;
  const DeviceReport* report = nullptr;  ///< in `report_memory`: a lost peer ends the wait
  mutable std::mutex settle_mutex;
  mutable bool gave_up = false;     ///< guarded by settle_mutex
  std::uint64_t adopted_state = 0;  ///< guarded by settle_mutex

 private:
  Status take_pinned_data(const CountsMemory& counts, std::size_t bytes, std::int64_t deadline_ns);
  RouteWords words_of_host() const;
};

/// Refuses Routings of latency mode, which lack tables that dispatch and combine need.
/// @errors kUnsupported
Status check_not_latency(const RoutingState& routing, std::string_view operation);

/// Summary that kernels of a call check first: a refused Routing moves nothing. Null without a Routing.
inline const RouteSummary* summary_of(const std::shared_ptr<const RoutingState>& routing) {
  return routing == nullptr ? nullptr : static_cast<const CudaRouting&>(*routing).tables.summary;
}

}  // namespace ferry::cuda

#endif  // FERRY_CUDA_INTRANODE_ROUTING_HPP
