#ifndef FERRY_TOOLS_BENCH_TUNING_FILE_HPP
#define FERRY_TOOLS_BENCH_TUNING_FILE_HPP

/// Writes the file that groups read through GroupOptions::tuning_file or the variable FERRY_TUNING (docs/cuda.md). One
/// file has a table for each GPU and number of ranks that it was tuned for.

#include <cstdint>
#include <string>
#include <vector>

#include "ferry/exchange.hpp"
#include "report/json_report.hpp"

namespace ferry::tools {

/// What was measured of one kind of call.
struct TunedCall {
  std::string operation;  ///< "dispatch" or "combine"
  bool staged = false;    ///< plain memory
  std::int64_t row_bytes = 0;
  KernelOptions best{};  ///< equal to the default: no entry
  std::int64_t default_ns = 0;
  std::int64_t best_ns = 0;

  double gain() const { return static_cast<double>(default_ns) / static_cast<double>(best_ns); }
  /// Whether the best is better than what two runs of the same settings differ by.
  bool is_better() const;
};

struct TunedMachine {
  std::string gpu;
  std::string driver;
  int num_ranks = 0;
};

/// What was the same in all calls that were measured.
struct TunedBatch {
  std::string layout;           ///< "tokens", "experts" or "slab"
  std::int64_t num_tokens = 0;  ///< of each rank
};

/// The file as it is, or an empty one where there is none.
/// @errors kInvalidArgument: the path holds something else; kSystem: it cannot be read
Result<Json> read_tuning_file(const std::string& path);

/// `file` with `calls`, of which those count that are better, in the table of this machine, in place of what that has
/// for the batch's layout and tokens. Each serves batches of more than half and up to twice as many tokens, and rows up
/// to a factor of the square root of two longer or shorter, or half way to the next size that was measured.
/// @errors kCapacity: groups would not read it
Result<Json> with_table(Json file, const TunedMachine& machine, const TunedBatch& batch, std::vector<TunedCall> calls);

}  // namespace ferry::tools

#endif  // FERRY_TOOLS_BENCH_TUNING_FILE_HPP
