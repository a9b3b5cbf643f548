#ifndef FERRY_CUDA_PLACEMENT_COUNTERS_HPP
#define FERRY_CUDA_PLACEMENT_COUNTERS_HPP

/// A program's counters (ferry/placement.hpp) in the form that kernels take.

#include <cuda_runtime_api.h>

#include <cstdint>

#include "cuda/placement/placement_tables.hpp"
#include "ferry/placement.hpp"
#include "plan/host_device.hpp"

namespace ferry::cuda {

struct CounterTable {
  void* data = nullptr;  ///< null: no counter
  bool wide = false;     ///< i64, else i32
};

struct CounterTables {
  CounterTable logical;
  CounterTable physical;
  CounterTable received;
  CounterTable homeless;

  FERRY_HOST_DEVICE bool any() const {
    return logical.data != nullptr || physical.data != nullptr || received.data != nullptr || homeless.data != nullptr;
  }
};

inline CounterTables counter_tables(const LoadCounters& counters) {
  const auto table = [](const TensorView& view) {
    CounterTable made;
    if (view.present()) made = {view.data, view.dtype == DType::kInt64};
    return made;
  };
  return {table(counters.logical), table(counters.physical), table(counters.received), table(counters.homeless)};
}

/// Parameters of the kernel that adds to counters when no kernel has counted.
struct CountersParams {
  CounterTables counters;
  PlacementTables placement;
  int num_experts = 0;
  int num_local_experts = 0;
  const std::int32_t* own_counts = nullptr;       ///< [E]
  const std::int32_t* rows_per_expert = nullptr;  ///< [L]
  std::int32_t num_homeless = 0;                  ///< this rank's entries whose expert has no home
};
cudaError_t launch_counters(const CountersParams& params, cudaStream_t stream);
cudaError_t load_counters_kernel();

}  // namespace ferry::cuda

#endif  // FERRY_CUDA_PLACEMENT_COUNTERS_HPP
