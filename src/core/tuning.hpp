#ifndef FERRY_CORE_TUNING_HPP
#define FERRY_CORE_TUNING_HPP

/// Kernel settings that `ferry tune` measured on a machine and wrote to a file, read once by Group::create. JSON:
///
///   {"ferry_tuning": 2,
///    "tables": [{"gpu": "NVIDIA H200", "driver": "580.159.04", "num_nodes": 1, "num_ranks": 8,
///                "entries": [{"operation": "dispatch", "layout": "tokens", "staged": false,
///                             "min_tokens": 2049, "max_tokens": 8192,
///                             "min_row_bytes": 10137, "max_row_bytes": 20274,
///                             "num_sms": 10, "num_copy_sms": 0, "chunk_tokens": 0,
///                             "default_time_us": 871.5, "time_us": 840.2}]}]}
///
/// `driver`, `network` (over several nodes) and the times are for people who read the file; `num_nodes` is 1 where a
/// table leaves it out; all other members are required. A table serves groups on GPUs of its name, of as many nodes and
/// of `num_ranks` ranks in each. An entry serves calls of its operation and layout, within its ranges of this rank's
/// tokens and of row bytes, with rows staged or not as given: calls like the measured ones. A row of a dispatch that
/// quantises is the quantised one. Entries with a setting that such calls cannot follow are refused. Version 1 had no
/// layouts and tokens, and is refused.

#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "core/agreement.hpp"
#include "ferry/exchange.hpp"
#include "ferry/routing.hpp"
#include "ferry/status.hpp"

namespace ferry {

/// Environment variable that names the file if GroupOptions::tuning_file does not.
inline constexpr const char* kTuningVariable = "FERRY_TUNING";
/// Value in place of a file name: no file, whatever the variable contains.
inline constexpr std::string_view kBuiltinTuning = "builtin";

struct TuningEntry {
  Operation operation = Operation::kDispatch;  ///< or kCombine, kLatencyDispatch, kLatencyCombine
  Layout layout = Layout::kTokens;             ///< kSlab in latency mode
  /// Peers cannot reach dispatch's output, or combine's input. Always false where that makes no difference: in latency
  /// mode inside a node, and for a dispatch over several.
  bool staged = false;
  std::int64_t min_tokens = 0;
  std::int64_t max_tokens = 0;  ///< inclusive
  std::int64_t min_row_bytes = 0;
  std::int64_t max_row_bytes = 0;  ///< inclusive
  int num_sms = 0;                 ///< this and the next two as in KernelOptions; 0: the default
  int num_copy_sms = 0;
  int chunk_tokens = 0;
};

struct TuningTable {
  std::string gpu;
  int num_nodes = 1;
  int num_ranks = 0;                 ///< of each node
  std::vector<TuningEntry> entries;  ///< at most one for any call
};

/// Parses a file's text; `path` is for messages.
/// @errors kInvalidArgument: the error, with its line or field
Result<std::vector<TuningTable>> parse_tuning(std::string_view text, std::string_view path);

/// Path of the file that `option` (GroupOptions::tuning_file) or the variable names; empty if neither does.
std::string tuning_path(const std::string& option);

/// Tables of the file at tuning_path(option); empty if there is no path.
/// @errors kInvalidArgument: the file cannot be read; errors of parse_tuning
Result<std::vector<TuningTable>> load_tuning(const std::string& option);

/// Entries of the table for such a group; none if there is no such table. `num_ranks`: of each node.
std::vector<TuningEntry> tuning_for(std::span<const TuningTable> tables, std::string_view gpu, int num_nodes,
                                    int num_ranks);

struct TunedCall {
  Operation operation = Operation::kDispatch;
  Layout layout = Layout::kTokens;
  std::int64_t num_tokens = 0;  ///< T of this rank
  std::int64_t row_bytes = 0;
  bool staged = false;
};

/// `options` with the entry's numbers where the caller gave none. A caller that gives num_sms also decides
/// num_copy_sms.
KernelOptions tuned(const KernelOptions& options, std::span<const TuningEntry> entries, const TunedCall& call);

}  // namespace ferry

#endif  // FERRY_CORE_TUNING_HPP
