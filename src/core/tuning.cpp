#include "core/tuning.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <initializer_list>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>
#include <tuple>

namespace ferry {
namespace {

using nlohmann::json;

constexpr std::int64_t kVersion = 2;
/// Far above any GPU, group or row: larger numbers are mistakes.
constexpr std::int64_t kMaxSms = 4096;
constexpr std::int64_t kMaxChunkTokens = std::int64_t{1} << 20;
constexpr std::int64_t kMaxRowBytes = std::int64_t{1} << 30;
constexpr std::int64_t kMaxTokens = std::int64_t{1} << 31;
constexpr std::int64_t kMaxNumRanks = 32767;
/// Largest number of tables, and of entries in a table: every pair is compared. `ferry tune` writes no more, and no
/// longer files.
constexpr std::size_t kMaxItems = 1024;
/// Ten times the size of the largest useful file.
constexpr std::size_t kMaxFileBytes = std::size_t{1} << 20;
constexpr std::size_t kMaxShownBytes = 60;
constexpr std::array kOperations = {Operation::kDispatch, Operation::kCombine, Operation::kLatencyDispatch,
                                    Operation::kLatencyCombine};
/// Names of layouts, by their number.
constexpr std::array<std::string_view, 3> kLayoutNames = {"tokens", "experts", "slab"};
constexpr std::string_view kAdvice = "write the file anew with `ferry tune --out`";

/// Parser of one file; keeps the first error.
class Reader {
 public:
  explicit Reader(std::string_view path) : path_(path) {}

  std::vector<TuningTable> tables(std::string_view text);
  const Status& status() const { return status_; }

 private:
  void refuse(const std::string& field, std::string_view observed, std::string_view expected) {
    if (!status_.ok()) return;
    status_ =
        Status(ErrorCode::kInvalidArgument, fmt::format("Group::create: tuning file {}: {} is {}, expected {}; {}",
                                                        path_, field, observed, expected, kAdvice));
  }
  static std::string shown(const json& value) {
    if (value.is_structured()) return std::string("an ") + value.type_name();  // its text would need recursion
    std::string text = value.dump(-1, ' ', true, json::error_handler_t::replace);
    if (text.size() > kMaxShownBytes) text = text.substr(0, kMaxShownBytes) + "...";
    return text;
  }
  /// `value`'s member; null if it is missing, which is an error if `needed`.
  const json* member(const json& value, const std::string& where, const char* name, bool needed = true);
  bool is_object(const json& value, const std::string& where, std::initializer_list<std::string_view> names);
  const json::array_t* array(const json& value, const std::string& where, const char* name);
  std::int64_t number(const json& value, const std::string& where, const char* name, std::int64_t low,
                      std::int64_t high);
  std::string string(const json& value, const std::string& where, const char* name);
  bool boolean(const json& value, const std::string& where, const char* name);
  void time(const json& value, const std::string& where, const char* name);
  Operation operation(const json& value, const std::string& where);
  Layout layout(const json& value, const std::string& where);
  TuningEntry entry(const json& value, const std::string& where, int num_nodes);
  void check_fit(const TuningEntry& entry, const std::string& where, int num_nodes);
  TuningTable table(const json& value, const std::string& where);

  std::string_view path_;
  Status status_;
};

std::string joined(const std::string& where, std::string_view name) {
  return where.empty() ? std::string(name) : fmt::format("{}.{}", where, name);
}

const json* Reader::member(const json& value, const std::string& where, const char* name, bool needed) {
  const auto found = value.find(name);
  if (found != value.end()) return &*found;
  if (needed) refuse(joined(where, name), "missing", "a value");
  return nullptr;
}

/// Checks for an object with no members but these.
bool Reader::is_object(const json& value, const std::string& where, std::initializer_list<std::string_view> names) {
  const std::string field = where.empty() ? "the whole" : where;
  if (!value.is_object()) {
    refuse(field, shown(value), "an object");
    return false;
  }
  for (const auto& [name, unused] : value.items()) {
    if (std::find(names.begin(), names.end(), name) != names.end()) continue;
    refuse(joined(where, shown(name)), "unknown", fmt::format("only {}", fmt::join(names, ", ")));
    return false;
  }
  return true;
}

const json::array_t* Reader::array(const json& value, const std::string& where, const char* name) {
  const json* found = member(value, where, name);
  if (found == nullptr) return nullptr;
  const auto* items = found->get_ptr<const json::array_t*>();
  if (items != nullptr && items->size() <= kMaxItems) return items;
  refuse(joined(where, name), items == nullptr ? shown(*found) : fmt::format("an array of {}", items->size()),
         fmt::format("an array of at most {}", kMaxItems));
  return nullptr;
}

std::int64_t Reader::number(const json& value, const std::string& where, const char* name, std::int64_t low,
                            std::int64_t high) {
  const json* found = member(value, where, name);
  if (found == nullptr) return low;
  const bool fits = found->is_number_unsigned() ? found->get<std::uint64_t>() <= static_cast<std::uint64_t>(high)
                                                : found->is_number_integer() && found->get<std::int64_t>() <= high;
  if (fits && found->get<std::int64_t>() >= low) return found->get<std::int64_t>();
  refuse(joined(where, name), shown(*found), fmt::format("a whole number of {} to {}", low, high));
  return low;
}

std::string Reader::string(const json& value, const std::string& where, const char* name) {
  const json* found = member(value, where, name);
  if (found == nullptr) return {};
  if (const auto* text = found->get_ptr<const json::string_t*>(); text != nullptr) return *text;
  refuse(joined(where, name), shown(*found), "a string");
  return {};
}

bool Reader::boolean(const json& value, const std::string& where, const char* name) {
  const json* found = member(value, where, name);
  if (found == nullptr) return false;
  if (found->is_boolean()) return found->get<bool>();
  refuse(joined(where, name), shown(*found), "true or false");
  return false;
}

/// Checks a time, which is only for people who read the file.
void Reader::time(const json& value, const std::string& where, const char* name) {
  const json* found = member(value, where, name, false);
  if (found != nullptr && !found->is_number()) refuse(joined(where, name), shown(*found), "a number");
}

Operation Reader::operation(const json& value, const std::string& where) {
  const std::string given = string(value, where, "operation");
  std::vector<std::string_view> names;
  for (const Operation operation : kOperations) {
    if (given == to_string(operation)) return operation;
    names.push_back(to_string(operation));
  }
  refuse(joined(where, "operation"), shown(given), fmt::format("one of {}", fmt::join(names, ", ")));
  return Operation::kDispatch;
}

Layout Reader::layout(const json& value, const std::string& where) {
  const std::string given = string(value, where, "layout");
  const auto known = std::find(kLayoutNames.begin(), kLayoutNames.end(), given);
  if (known != kLayoutNames.end()) return static_cast<Layout>(known - kLayoutNames.begin());
  refuse(joined(where, "layout"), shown(given), fmt::format("one of {}", fmt::join(kLayoutNames, ", ")));
  return Layout::kTokens;
}

TuningEntry Reader::entry(const json& value, const std::string& where, int num_nodes) {
  TuningEntry entry;
  if (!is_object(value, where,
                 {"operation", "layout", "staged", "min_tokens", "max_tokens", "min_row_bytes", "max_row_bytes",
                  "num_sms", "num_copy_sms", "chunk_tokens", "default_time_us", "time_us"})) {
    return entry;
  }
  entry.operation = operation(value, where);
  entry.layout = layout(value, where);
  entry.staged = boolean(value, where, "staged");
  entry.min_tokens = number(value, where, "min_tokens", 0, kMaxTokens);
  entry.max_tokens = number(value, where, "max_tokens", entry.min_tokens, kMaxTokens);
  entry.min_row_bytes = number(value, where, "min_row_bytes", 0, kMaxRowBytes);
  entry.max_row_bytes = number(value, where, "max_row_bytes", entry.min_row_bytes, kMaxRowBytes);
  entry.num_sms = static_cast<int>(number(value, where, "num_sms", 0, kMaxSms));
  entry.num_copy_sms = static_cast<int>(number(value, where, "num_copy_sms", 0, kMaxSms));
  entry.chunk_tokens = static_cast<int>(number(value, where, "chunk_tokens", 0, kMaxChunkTokens));
  time(value, where, "default_time_us");
  time(value, where, "time_us");
  check_fit(entry, where, num_nodes);
  return entry;
}

/// Refuses what calls of the entry's kind in such groups cannot be or follow.
void Reader::check_fit(const TuningEntry& entry, const std::string& where, int num_nodes) {
  const bool latency = entry.operation == Operation::kLatencyDispatch || entry.operation == Operation::kLatencyCombine;
  const bool dispatch = entry.operation == Operation::kDispatch || entry.operation == Operation::kLatencyDispatch;
  const bool over_nodes = num_nodes > 1;
  const std::string_view operation = to_string(entry.operation);
  const std::string_view nodes = over_nodes ? "over several nodes" : "inside a node";
  if (latency && entry.layout != Layout::kSlab) {
    refuse(joined(where, "layout"), kLayoutNames[static_cast<std::size_t>(entry.layout)],
           fmt::format("slab, which {} receives in", operation));
  }
  if (entry.staged && (over_nodes ? dispatch : latency)) {
    refuse(joined(where, "staged"), "true", fmt::format("false: {} {} is alike for all memory", operation, nodes));
  }
  const auto refuse_number = [&](const char* name, int number) {
    if (number == 0) return;
    refuse(joined(where, name), fmt::to_string(number), fmt::format("0: {} {} has no such setting", operation, nodes));
  };
  if (over_nodes ? !dispatch : latency) refuse_number("num_copy_sms", entry.num_copy_sms);
  if (!over_nodes && latency) refuse_number("chunk_tokens", entry.chunk_tokens);
  const std::int64_t least_sms = over_nodes ? 2 * (std::int64_t{num_nodes} - 1) + 1 : 0;
  if (entry.num_sms > 0 && entry.num_sms < least_sms) {
    refuse(joined(where, "num_sms"), fmt::to_string(entry.num_sms),
           fmt::format("0, or at least {}: two for each other node and one more", least_sms));
  }
}

bool serve_one_call(const TuningEntry& a, const TuningEntry& b) {
  return a.operation == b.operation && a.layout == b.layout && a.staged == b.staged && a.min_tokens <= b.max_tokens &&
         b.min_tokens <= a.max_tokens && a.min_row_bytes <= b.max_row_bytes && b.min_row_bytes <= a.max_row_bytes;
}

TuningTable Reader::table(const json& value, const std::string& where) {
  TuningTable table;
  if (!is_object(value, where, {"gpu", "driver", "network", "num_nodes", "num_ranks", "entries"})) return table;
  table.gpu = string(value, where, "gpu");
  for (const char* name : {"driver", "network"}) {
    if (member(value, where, name, false) != nullptr) (void)string(value, where, name);
  }
  if (member(value, where, "num_nodes", false) != nullptr) {
    table.num_nodes = static_cast<int>(number(value, where, "num_nodes", 1, kMaxNumRanks));
  }
  table.num_ranks = static_cast<int>(number(value, where, "num_ranks", 1, kMaxNumRanks));
  const json::array_t* entries = array(value, where, "entries");
  for (std::size_t i = 0; entries != nullptr && i < entries->size() && status_.ok(); ++i) {
    const std::string field = fmt::format("{}.entries[{}]", where, i);
    table.entries.push_back(entry((*entries)[i], field, table.num_nodes));
    for (std::size_t before = 0; before < i && status_.ok(); ++before) {
      if (!serve_one_call(table.entries[before], table.entries[i])) continue;
      refuse(field, fmt::format("for calls that entries[{}] also serves", before), "one entry for each call");
    }
  }
  return table;
}

/// Line number, from 1.
std::size_t line_of(std::string_view text, std::size_t position) {
  const std::string_view before = text.substr(0, std::min(position, text.size()));
  return 1 + static_cast<std::size_t>(std::count(before.begin(), before.end(), '\n'));
}

std::vector<TuningTable> Reader::tables(std::string_view text) {
  std::vector<TuningTable> all;
  json whole;
  try {
    whole = json::parse(text);
  } catch (const json::parse_error& error) {
    refuse(fmt::format("line {}", line_of(text, error.byte == 0 ? 0 : error.byte - 1)), "no JSON", "JSON");
    return all;
  } catch (const json::exception&) {
    refuse("a number", "out of range", "one that a double holds");
    return all;
  }
  if (!is_object(whole, "", {"ferry_tuning", "tables"})) return all;
  number(whole, "", "ferry_tuning", kVersion, kVersion);
  const json::array_t* tables = array(whole, "", "tables");
  for (std::size_t i = 0; tables != nullptr && i < tables->size() && status_.ok(); ++i) {
    const std::string field = fmt::format("tables[{}]", i);
    all.push_back(table((*tables)[i], field));
    for (std::size_t before = 0; before < i && status_.ok(); ++before) {
      if (std::tie(all[before].gpu, all[before].num_nodes, all[before].num_ranks) !=
          std::tie(all[i].gpu, all[i].num_nodes, all[i].num_ranks)) {
        continue;
      }
      refuse(field, fmt::format("for the GPU and the numbers of nodes and ranks of tables[{}]", before),
             "one table for each");
    }
  }
  return all;
}

Result<std::string> read_file(const std::string& path) {
  const auto refuse = [&path](std::string_view what) {
    return Status(ErrorCode::kInvalidArgument,
                  fmt::format("Group::create: tuning file {}: {}; see GroupOptions::tuning_file and the variable {}",
                              path, what, kTuningVariable));
  };
  const std::unique_ptr<std::FILE, int (*)(std::FILE*)> file(std::fopen(path.c_str(), "rbe"), std::fclose);
  if (file == nullptr) return refuse(fmt::format("cannot be opened: {}", std::strerror(errno)));
  std::string text(kMaxFileBytes + 1, '\0');
  text.resize(std::fread(text.data(), 1, text.size(), file.get()));
  if (std::ferror(file.get()) != 0) return refuse(fmt::format("cannot be read: {}", std::strerror(errno)));
  if (text.size() > kMaxFileBytes) return refuse(fmt::format("has more than {} bytes", kMaxFileBytes));
  return text;
}

}  // namespace

Result<std::vector<TuningTable>> parse_tuning(std::string_view text, std::string_view path) {
  Reader reader(path);
  std::vector<TuningTable> tables = reader.tables(text);
  if (!reader.status().ok()) return reader.status();
  return tables;
}

std::string tuning_path(const std::string& option) {
  std::string path = option;
  if (path.empty()) {
    const char* const value = std::getenv(kTuningVariable);
    if (value != nullptr) path = value;
  }
  return path == kBuiltinTuning ? std::string() : path;
}

Result<std::vector<TuningTable>> load_tuning(const std::string& option) {
  const std::string path = tuning_path(option);
  if (path.empty()) return std::vector<TuningTable>{};
  const Result<std::string> text = read_file(path);
  if (!text.ok()) return text.status();
  return parse_tuning(*text, path);
}

std::vector<TuningEntry> tuning_for(std::span<const TuningTable> tables, std::string_view gpu, int num_nodes,
                                    int num_ranks) {
  const auto found = std::find_if(tables.begin(), tables.end(), [&](const TuningTable& table) {
    return table.gpu == gpu && table.num_nodes == num_nodes && table.num_ranks == num_ranks;
  });
  return found == tables.end() ? std::vector<TuningEntry>() : found->entries;
}

KernelOptions tuned(const KernelOptions& options, std::span<const TuningEntry> entries, const TunedCall& call) {
  KernelOptions result = options;
  for (const TuningEntry& entry : entries) {
    const bool matches = entry.operation == call.operation && entry.layout == call.layout &&
                         entry.staged == call.staged && entry.min_tokens <= call.num_tokens &&
                         call.num_tokens <= entry.max_tokens && entry.min_row_bytes <= call.row_bytes &&
                         call.row_bytes <= entry.max_row_bytes;
    if (!matches) continue;
    if (options.num_sms <= 0) {
      result.num_sms = entry.num_sms;
      if (options.num_copy_sms <= 0) result.num_copy_sms = entry.num_copy_sms;
    }
    if (options.chunk_tokens <= 0) result.chunk_tokens = entry.chunk_tokens;
    break;
  }
  return result;
}

}  // namespace ferry
