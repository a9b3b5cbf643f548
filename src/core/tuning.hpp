#ifndef FERRY_CORE_TUNING_HPP
#define FERRY_CORE_TUNING_HPP

/// Kernel settings that were measured on a machine: what `ferry tune` writes, read once by Group::create. JSON:
///
///   {"ferry_tuning": 2,
///    "tables": [{"gpu": "NVIDIA H200", "driver": "580.159.04", "num_ranks": 8,
///                "entries": [{"operation": "dispatch", "layout": "tokens", "staged": false,
///                             "min_tokens": 2049, "max_tokens": 8192,
///                             "min_row_bytes": 10137, "max_row_bytes": 20274,
///                             "num_sms": 10, "num_copy_sms": 0, "chunk_tokens": 0,
///                             "default_time_us": 871.5, "time_us": 840.2}]}]}
///
/// `driver` and the times are for readers; all else is needed. A table serves groups of its number of ranks on GPUs of
/// its name, an entry calls of its operation and layout, for so many tokens of this rank, whose rows have so many bytes
/// and are staged, or not: calls like those that were measured. Version 1 said nothing of layouts and tokens; it is
/// refused.

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

/// Environment variable that names the file where GroupOptions::tuning_file does not.
inline constexpr const char* kTuningVariable = "FERRY_TUNING";
/// In place of a file name: none, whatever the variable says.
inline constexpr std::string_view kBuiltinTuning = "builtin";

struct TuningEntry {
  Operation operation = Operation::kDispatch;  ///< or kCombine
  Layout layout = Layout::kTokens;
  bool staged = false;  ///< peers cannot reach dispatch's output, or combine's input
  std::int64_t min_tokens = 0;
  std::int64_t max_tokens = 0;  ///< the last that it is for
  std::int64_t min_row_bytes = 0;
  std::int64_t max_row_bytes = 0;  ///< the last that it is for
  int num_sms = 0;                 ///< these three as in KernelOptions; 0: the default
  int num_copy_sms = 0;
  int chunk_tokens = 0;
};

struct TuningTable {
  std::string gpu;
  int num_ranks = 0;
  std::vector<TuningEntry> entries;  ///< at most one for each call
};

/// `path` is for messages.
/// @errors kInvalidArgument: what is wrong, in which line or field
Result<std::vector<TuningTable>> parse_tuning(std::string_view text, std::string_view path);

/// From the file that `option` (GroupOptions::tuning_file) or the variable names; empty where neither does.
/// @errors kInvalidArgument: it cannot be read, and those of parse_tuning
Result<std::vector<TuningTable>> load_tuning(const std::string& option);

/// The entries for such a group; none if no table is for it.
std::vector<TuningEntry> tuning_for(std::span<const TuningTable> tables, std::string_view gpu, int num_ranks);

struct TunedCall {
  Operation operation = Operation::kDispatch;
  Layout layout = Layout::kTokens;
  std::int64_t num_tokens = 0;  ///< T of this rank
  std::int64_t row_bytes = 0;
  bool staged = false;
};

/// `options` with the entry's numbers where the caller gave none. A caller who gives num_sms divides it as well.
KernelOptions tuned(const KernelOptions& options, std::span<const TuningEntry> entries, const TunedCall& call);

}  // namespace ferry

#endif  // FERRY_CORE_TUNING_HPP
