#ifndef FERRY_CUDA_INTRANODE_COUNTER_TABLES_HPP
#define FERRY_CUDA_INTRANODE_COUNTER_TABLES_HPP

/// A program's counters (ferry/placement.hpp) in the form that kernels take.

#include <cuda_runtime_api.h>

#include <cstdint>

#include "ferry/placement.hpp"

namespace ferry::cuda {

struct CounterTable {
  void* data = nullptr;  ///< null: no counter
  bool wide = false;     ///< i64, else i32
};

struct CounterTables {
  CounterTable logical;
  CounterTable physical;
  CounterTable received;
};

inline CounterTables counter_tables(const LoadCounters& counters) {
  const auto table = [](const TensorView& view) {
    CounterTable made;
    if (view.present()) made = {view.data, view.dtype == DType::kInt64};
    return made;
  };
  return {table(counters.logical), table(counters.physical), table(counters.received)};
}

}  // namespace ferry::cuda

#endif  // FERRY_CUDA_INTRANODE_COUNTER_TABLES_HPP
