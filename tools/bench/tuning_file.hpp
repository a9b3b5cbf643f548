#ifndef FERRY_TOOLS_BENCH_TUNING_FILE_HPP
#define FERRY_TOOLS_BENCH_TUNING_FILE_HPP

/// Writer of the file that groups read through GroupOptions::tuning_file or the variable FERRY_TUNING (docs/tune.md).
/// A file has one table for each GPU, number of nodes and number of ranks in each for which it was tuned.

#include <cstdint>
#include <string>
#include <vector>

#include "ferry/exchange.hpp"
#include "report/json_report.hpp"

namespace ferry::tools {

/// Result for one kind of call.
struct TunedCall {
  std::string operation;  ///< "dispatch" or "combine", in latency mode with "latency_" before it
  bool staged = false;    ///< plain memory, where it makes a difference
  std::int64_t row_bytes = 0;
  KernelOptions best{};  ///< no entry if equal to the default
  std::int64_t default_ns = 0;
  std::int64_t best_ns = 0;

  double gain() const { return static_cast<double>(default_ns) / static_cast<double>(best_ns); }
  /// True if the best settings gain more than the difference between two runs of the same settings.
  bool is_better() const;
};

struct TunedMachine {
  std::string gpu;
  std::string driver;
  int num_ranks = 0;  ///< of each node
  int num_nodes = 1;
  std::string network{};  ///< over several nodes
};

/// Parameters that all measured calls share.
struct TunedBatch {
  std::string layout;           ///< "tokens", "experts" or "slab"
  std::int64_t num_tokens = 0;  ///< per rank
  bool latency = false;         ///< calls of latency mode
};

/// The existing file, or an empty one.
/// @errors kInvalidArgument: the path holds something else; kSystem: it cannot be read
Result<Json> read_tuning_file(const std::string& path);

/// Adds those of `calls` that gain to this machine's table in `file`, replacing its entries for the batch's mode,
/// layout and tokens. Each entry applies to batches of more than half and up to twice as many tokens, and to rows up to
/// a factor of the square root of two longer or shorter, or half way to the next measured size.
/// @errors kCapacity: groups would not read the result
Result<Json> with_table(Json file, const TunedMachine& machine, const TunedBatch& batch, std::vector<TunedCall> calls);

}  // namespace ferry::tools

#endif  // FERRY_TOOLS_BENCH_TUNING_FILE_HPP
