#ifndef FERRY_CUDA_CALL_ROUTE_RESULT_HPP
#define FERRY_CUDA_CALL_ROUTE_RESULT_HPP

/// Pinned memory in which kernels report the outcome of a route to the host: the location of the counts, and their
/// order.

#include <cstddef>
#include <cstdint>

#include "cuda/sync/report.hpp"
#include "plan/host_device.hpp"

namespace ferry::cuda {

/// Counts that the exchange passes to the host in words that are their own flags: the memory is 0 before, then kThere
/// plus a count. No kernel has to wait for the counts to arrive before the host may see them. In order: rows of this
/// rank, token rows, repeats, rows from each rank [R], to each rank [R], of each local expert [L], and, in layouts with
/// groups, first row of each group [L + 1]. The words of a refused route are meaningless.
struct RouteWords {
  static constexpr std::uint64_t kThere = std::uint64_t{1} << 32;

  std::uint64_t* words = nullptr;  ///< null: the host does not ask
  int num_ranks = 0;
  int num_local_experts = 0;

  FERRY_HOST_DEVICE std::uint64_t* used_rows() const { return words; }
  FERRY_HOST_DEVICE std::uint64_t* token_rows() const { return words + 1; }
  FERRY_HOST_DEVICE std::uint64_t* repeats() const { return words + 2; }
  FERRY_HOST_DEVICE std::uint64_t* from_rank() const { return words + 3; }
  FERRY_HOST_DEVICE std::uint64_t* to_rank() const { return from_rank() + num_ranks; }
  FERRY_HOST_DEVICE std::uint64_t* rows_per_expert() const { return to_rank() + num_ranks; }
  FERRY_HOST_DEVICE std::uint64_t* row_offsets() const { return rows_per_expert() + num_local_experts; }

  static constexpr std::size_t count(std::size_t num_ranks, std::size_t num_local_experts, bool groups) {
    return 3 + 2 * num_ranks + num_local_experts + (groups ? num_local_experts + 1 : 0);
  }
};

/// Device addresses of the pinned memory in which the host reads the outcome. Null if the host does not ask.
struct RouteResultTables {
  RouteResult* result = nullptr;
  FaultReport* fault = nullptr;
  std::int64_t* from_rank = nullptr;        ///< [R]
  std::int64_t* to_rank = nullptr;          ///< [R]
  std::int32_t* rows_per_expert = nullptr;  ///< [L]
  std::int64_t* row_offsets = nullptr;      ///< [L + 1]
};

}  // namespace ferry::cuda

#endif  // FERRY_CUDA_CALL_ROUTE_RESULT_HPP
