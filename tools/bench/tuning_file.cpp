#include "bench/tuning_file.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <numbers>
#include <tuple>
#include <utility>

#include "common/read_file.hpp"

namespace ferry::tools {

namespace {

constexpr int kVersion = 2;
/// Limits of the library's reader: bytes of the file, tables, and entries in a table.
constexpr std::size_t kMaxFileBytes = std::size_t{1} << 20;
constexpr std::size_t kMaxItems = 1024;
constexpr double kNsPerUs = 1000.0;
/// Medians of the same settings in one run differed by less than this factor.
constexpr double kMinGain = 1.01;
/// Ratio between the tokens of the batches that an entry serves and those of the measured batch.
constexpr std::int64_t kTokensFactor = 2;

std::int64_t min_tokens(const TunedBatch& batch) { return batch.num_tokens / kTokensFactor + 1; }
std::int64_t max_tokens(const TunedBatch& batch) { return batch.num_tokens * kTokensFactor; }

Json entry_of(const TunedCall& call, const TunedBatch& batch, std::int64_t min_row_bytes, std::int64_t max_row_bytes) {
  return {{"operation", call.operation},
          {"layout", batch.layout},
          {"staged", call.staged},
          {"min_tokens", min_tokens(batch)},
          {"max_tokens", max_tokens(batch)},
          {"min_row_bytes", min_row_bytes},
          {"max_row_bytes", max_row_bytes},
          {"num_sms", call.best.num_sms},
          {"num_copy_sms", call.best.num_copy_sms},
          {"chunk_tokens", call.best.chunk_tokens},
          {"default_time_us", static_cast<double>(call.default_ns) / kNsPerUs},
          {"time_us", static_cast<double>(call.best_ns) / kNsPerUs}};
}

/// True if an entry applies to batches like this one, or to none at all.
bool serves(const Json& entry, const TunedBatch& batch) {
  if (!entry.is_object()) return true;
  const Json low = entry.value("min_tokens", Json());
  const Json high = entry.value("max_tokens", Json());
  if (!low.is_number_integer() || !high.is_number_integer()) return true;
  const Json operation = entry.value("operation", Json());
  const bool latency = operation.is_string() && operation.get<std::string>().starts_with("latency_");
  return latency == batch.latency && entry.value("layout", Json()) == batch.layout &&
         low.get<std::int64_t>() <= max_tokens(batch) && min_tokens(batch) <= high.get<std::int64_t>();
}

bool same_kind(const TunedCall& a, const TunedCall& b) { return a.operation == b.operation && a.staged == b.staged; }

/// Longest row for which the entry for `shorter` applies rather than that for `longer`.
std::int64_t border(std::int64_t shorter, std::int64_t longer) {
  return static_cast<std::int64_t>(std::sqrt(static_cast<double>(shorter) * static_cast<double>(longer)));
}

std::int64_t scaled(std::int64_t row_bytes, double factor) {
  return static_cast<std::int64_t>(static_cast<double>(row_bytes) * factor);
}

/// Refuses a file that groups would refuse as a whole, including its entries for other machines.
Status check_size(std::string_view what, std::size_t observed, std::size_t expected) {
  if (observed <= expected) return {};
  return Status(
      ErrorCode::kCapacity,
      fmt::format("the kernel settings would have {} {}, of which groups read at most {}; give --out a new file, "
                  "or remove layouts and batches that no program uses from this one",
                  observed, what, expected));
}

}  // namespace

bool TunedCall::is_better() const { return best_ns > 0 && gain() >= kMinGain; }

Result<Json> read_tuning_file(const std::string& path) {
  std::error_code ignored;
  if (!std::filesystem::exists(path, ignored)) return Json{{"ferry_tuning", kVersion}, {"tables", Json::array()}};
  auto text = read_file(path, "the kernel settings", kMaxFileBytes);
  if (!text) return text.status();
  Result<Json> parsed = parse_json(*text);
  if (!parsed) {
    return Status(ErrorCode::kInvalidArgument,
                  fmt::format("{}: {}; give --out another file, or remove this one", path, parsed.status().message()));
  }
  const Json& file = *parsed;
  const bool is_ours = file.is_object() && file.value("ferry_tuning", Json()) == kVersion && file.contains("tables") &&
                       file["tables"].is_array();
  if (is_ours) return parsed;
  return Status(ErrorCode::kInvalidArgument,
                fmt::format("{} holds no kernel settings of version {}, to which a table could be added; give --out "
                            "another file, or remove this one",
                            path, kVersion));
}

Result<Json> with_table(Json file, const TunedMachine& machine, const TunedBatch& batch, std::vector<TunedCall> calls) {
  std::sort(calls.begin(), calls.end(), [](const TunedCall& a, const TunedCall& b) {
    return std::tie(a.operation, a.staged, a.row_bytes) < std::tie(b.operation, b.staged, b.row_bytes);
  });
  const auto same_call = [](const TunedCall& a, const TunedCall& b) {
    return same_kind(a, b) && a.row_bytes == b.row_bytes;
  };
  calls.erase(std::unique(calls.begin(), calls.end(), same_call), calls.end());
  Json tables = Json::array();
  Json entries = Json::array();
  for (Json& table : file["tables"]) {
    const bool is_ours = table.is_object() && table.value("gpu", Json()) == machine.gpu &&
                         table.value("num_nodes", Json(1)) == machine.num_nodes &&
                         table.value("num_ranks", Json()) == machine.num_ranks;
    if (!is_ours) {
      tables.push_back(std::move(table));
      continue;
    }
    for (Json& entry : table["entries"]) {
      if (!serves(entry, batch)) entries.push_back(std::move(entry));
    }
  }
  for (std::size_t i = 0; i < calls.size(); ++i) {
    const TunedCall& call = calls[i];
    if (!call.is_better()) continue;
    const bool has_shorter = i > 0 && same_kind(calls[i - 1], call);
    const bool has_longer = i + 1 < calls.size() && same_kind(call, calls[i + 1]);
    const std::int64_t low =
        std::max(scaled(call.row_bytes, 1.0 / std::numbers::sqrt2),
                 has_shorter ? border(calls[i - 1].row_bytes, call.row_bytes) + 1 : std::int64_t{0});
    const std::int64_t high = has_longer ? std::min(scaled(call.row_bytes, std::numbers::sqrt2),
                                                    border(call.row_bytes, calls[i + 1].row_bytes))
                                         : scaled(call.row_bytes, std::numbers::sqrt2);
    entries.push_back(entry_of(call, batch, low, high));
  }
  if (Status fits = check_size("entries of a table", entries.size(), kMaxItems); !fits) return fits;
  Json ours = {{"gpu", machine.gpu},
               {"driver", machine.driver},
               {"num_nodes", machine.num_nodes},
               {"num_ranks", machine.num_ranks},
               {"entries", std::move(entries)}};
  if (!machine.network.empty()) ours["network"] = machine.network;
  tables.push_back(std::move(ours));
  if (Status fits = check_size("tables", tables.size(), kMaxItems); !fits) return fits;
  file["tables"] = std::move(tables);
  if (Status fits = check_size("bytes", file.dump(kJsonIndent).size() + 1, kMaxFileBytes); !fits) return fits;
  return file;
}

}  // namespace ferry::tools
