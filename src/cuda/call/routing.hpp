#ifndef FERRY_CUDA_CALL_ROUTING_HPP
#define FERRY_CUDA_CALL_ROUTING_HPP

/// A Routing's tables on the GPU, and the host's view of them, which may come later.

#include <cstdint>
#include <memory>
#include <mutex>
#include <string_view>

#include "core/routing_state.hpp"
#include "cuda/call/route_result.hpp"
#include "cuda/call/routing_tables.hpp"
#include "cuda/memory/pinned_memory.hpp"
#include "cuda/placement/homes.hpp"
#include "cuda/placement/placements.hpp"
#include "cuda/sync/report.hpp"

namespace ferry::cuda {

/// What route reports to the host, in pinned memory: sizes and pointers.
struct HostResult {
  RouteResult* result = nullptr;
  FaultReport* fault = nullptr;
  std::int64_t* from_rank = nullptr;
  std::int64_t* to_rank = nullptr;
  std::int32_t* rows_per_expert = nullptr;
  std::int64_t* row_offsets = nullptr;
  std::uint64_t* words = nullptr;  ///< in place of the arrays, and of the numbers in `result`: RouteWords
  std::size_t num_words = 0;
  std::size_t size_bytes = 0;

  static HostResult at(std::byte* base, std::size_t num_ranks, std::size_t num_local_experts);
  static HostResult of_words(std::byte* base, std::size_t num_words);
  /// Zeroes what tells that nothing is known yet.
  void clear() const;
  /// 0: not known yet, 1: counts are there, 2: refused.
  std::uint64_t state() const;
  /// Whether the stream has come to the route.
  bool started() const;
};

/// How long a host waits for the counts of a route. A kernel that waits for others ends by its own deadline; this is
/// for a GPU that does not run it at all. What the program has put on the stream before takes as long as it takes, so
/// the deadline runs from the moment when the stream comes to the route, and a far longer one until then.
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

/// What a host that waits for counts needs.
struct CountsMemory {
  const std::shared_ptr<TableMemory>& owner;
  const std::shared_ptr<PinnedMemory>& pinned;
  const DeviceReport* report = nullptr;
};

/// Pinned memory in which kernels tell the host what a route has found.
struct CountsBlock {
  std::shared_ptr<TableMemory> owner;
  std::shared_ptr<PinnedMemory> memory;
  std::byte* data = nullptr;
  std::size_t size_bytes = 0;
  bool is_written = false;  ///< whole; else the kernel that writes there may not have run yet

  CountsBlock() = default;
  CountsBlock(const CountsBlock&) = delete;
  CountsBlock& operator=(const CountsBlock&) = delete;
  ~CountsBlock();
};

/// Marks a Routing made in a capture as one that no graph has filled yet. By work on `own_stream`.
Status mark_not_routed(std::string_view operation, RouteSummary* summary, cudaStream_t own_stream);

struct CudaRouting : RoutingState {
  /// Waits for the counts until CountsDeadline; leaves them empty if they never come.
  void settle() const override;
  /// Takes pinned memory in which kernels tell the host the counts of `num_ranks` ranks, for `settle` to wait for. The
  /// local experts are known. Returns that memory as kernels see it, but for `fault`.
  Result<RouteResultTables> expect_counts(const CountsMemory& counts, int num_ranks, std::int64_t deadline_ns);
  /// The same of counts that come as words.
  Result<RouteWords> expect_words(const CountsMemory& counts, int num_ranks, std::int64_t deadline_ns);
  /// Has `unsettled` look at what kernels tell the host. After one of these two.
  void count_calls_apart();
  /// Copies the counts out of pinned memory and gives that back. The result's state is not 0.
  void adopt_result();

  /// HostResult::state as far as it is known: 0 also while another thread settles, and after a wait was given up.
  /// Waits for nothing.
  std::uint64_t counts_state() const;

  /// [num_recv_rows, 2] in device memory.
  const std::int32_t* source_rows() const { return reinterpret_cast<const std::int32_t*>(source_memory.get()); }

  RoutingTables tables;
  std::shared_ptr<std::byte> memory;
  std::shared_ptr<std::byte> source_memory;
  std::shared_ptr<const Placement> placement;
  BuiltHomes homes;
  bool exact_rows = false;  ///< outputs have no row beyond the used ones, for certain
  int num_blocks = 0;
  int tokens_per_block = 0;

  std::shared_ptr<PinnedMemory> pinned;
  std::shared_ptr<CountsBlock> pinned_data;  ///< null: adopted, or never asked for (captured)
  HostResult host;
  std::int64_t timeout_ns = 0;
  const DeviceReport* report = nullptr;  ///< in `report_memory`: a lost peer ends the wait
  mutable std::mutex settle_mutex;
  mutable bool gave_up = false;     ///< guarded by settle_mutex
  std::uint64_t adopted_state = 0;  ///< likewise

 private:
  Status take_pinned_data(const CountsMemory& counts, std::size_t bytes, std::int64_t deadline_ns);
  RouteWords words_of_host() const;
};

/// Routings of latency mode lack what dispatch and combine need.
/// @errors kUnsupported
Status check_not_latency(const RoutingState& routing, std::string_view operation);

/// The summary that kernels of a call check first: a Routing that was refused moves nothing. Null without a Routing.
inline const RouteSummary* summary_of(const std::shared_ptr<const RoutingState>& routing) {
  return routing == nullptr ? nullptr : static_cast<const CudaRouting&>(*routing).tables.summary;
}

}  // namespace ferry::cuda

#endif  // FERRY_CUDA_CALL_ROUTING_HPP
