#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <optional>
#include <sstream>
#include <string>
#include <system_error>
#include <utility>
#include <vector>

#include "common/read_file.hpp"
#include "common/routing_source.hpp"
#include "ferry/routing.hpp"

namespace ferry::tools {

namespace {

using nlohmann::json;

/// Checks before conversion: numbers beyond 2^63 would wrap to negative ones.
bool is_whole(const json& value, std::int64_t low, std::int64_t high) {
  if (!value.is_number_integer()) return false;
  if (value.is_number_unsigned() && value.get<std::uint64_t>() > static_cast<std::uint64_t>(high)) return false;
  return value.get<std::int64_t>() >= low && value.get<std::int64_t>() <= high;
}

/// Reads a trace line by line; `error_` is the first fault.
class TraceReader {
 public:
  explicit TraceReader(const std::string& path) : path_(path) {}

  Result<Trace> read() {
    auto bytes = read_file(path_, "the trace", kMaxBytes + 1);
    if (!bytes) return bytes.status();
    if (bytes->size() > kMaxBytes) {
      return Status(ErrorCode::kInvalidArgument,
                    fmt::format("the trace {} has more than {} bytes; give a part of it", path_, kMaxBytes));
    }
    std::istringstream lines(std::move(*bytes));
    for (std::string line; std::getline(lines, line);) {
      ++line_number_;
      if (line.find_first_not_of(" \t\r") == std::string::npos) continue;
      if (Status status = take_line(line); !status) return status;
    }
    return finish();
  }

 private:
  Status wrong(const std::string& what) const {
    return {ErrorCode::kInvalidArgument, fmt::format("trace {} line {}: {}", path_, line_number_, what)};
  }

  Status take_line(const std::string& line) {
    const json object = json::parse(line, nullptr, false);
    if (object.is_discarded() || !object.is_object()) {
      return wrong("not a JSON object; expected {\"topk_ids\": [...], \"topk_weights\": [...]}");
    }
    if (object.contains("topk_ids")) return take_token(object);
    if (trace_.table.num_tokens == 0 && !has_meta_) return take_meta(object);
    return wrong("topk_ids is missing; expected {\"topk_ids\": [...], \"topk_weights\": [...]}");
  }

  Status take_meta(const json& meta) {
    has_meta_ = true;
    if (Status status = take_count(meta, "num_experts", kMaxExperts, &meta_num_experts_); !status) return status;
    if (Status status = take_count(meta, "topk", kMaxTopk, &meta_num_topk_); !status) return status;
    if (meta.contains("model") && meta["model"].is_string()) trace_.model = meta["model"].get<std::string>();
    if (!meta_num_experts_ && !meta_num_topk_ && trace_.model.empty()) {
      return wrong("neither a token (topk_ids) nor a meta line (num_experts, topk, model)");
    }
    return {};
  }

  Status take_count(const json& meta, const char* key, std::int64_t largest, std::optional<std::int64_t>* count) const {
    if (!meta.contains(key)) return {};
    const json& value = meta[key];
    if (!is_whole(value, 1, largest)) {
      return wrong(fmt::format("{} is {}; expected a whole number from 1 to {}", key, value.dump(), largest));
    }
    *count = value.get<std::int64_t>();
    return {};
  }

  Status take_token(const json& token) {
    const json& ids = token["topk_ids"];
    if (!token.contains("topk_weights")) return wrong("topk_weights is missing");
    const json& weights = token["topk_weights"];
    if (!ids.is_array() || !weights.is_array() || ids.empty() || ids.size() != weights.size()) {
      return wrong("topk_ids and topk_weights must be arrays of the same length, at least 1");
    }
    if (Status status = take_topk(static_cast<std::int64_t>(ids.size())); !status) return status;
    for (std::size_t k = 0; k < ids.size(); ++k) {
      if (Status status = take_entry(ids[k], weights[k]); !status) return status;
    }
    ++trace_.table.num_tokens;
    return {};
  }

  Status take_topk(std::int64_t num_topk) {
    if (trace_.table.num_topk == 0) {
      const std::int64_t largest = meta_num_topk_.value_or(kMaxTopk);
      if (num_topk > kMaxTopk || (meta_num_topk_ && num_topk != largest)) {
        return wrong(fmt::format("{} ids; expected {} {}", num_topk, meta_num_topk_ ? "exactly" : "at most", largest));
      }
      trace_.table.num_topk = static_cast<int>(num_topk);
    }
    if (num_topk != trace_.table.num_topk) {
      return wrong(fmt::format("{} ids; the lines before have {}", num_topk, trace_.table.num_topk));
    }
    return {};
  }

  Status take_entry(const json& id, const json& weight) {
    const std::int64_t end = meta_num_experts_.value_or(kMaxExperts);
    if (!is_whole(id, -1, end - 1)) {
      return wrong(fmt::format("expert id {} is not a whole number from -1 to {}", id.dump(), end - 1));
    }
    if (!weight.is_number() || !std::isfinite(weight.get<float>())) {
      return wrong(fmt::format("weight {} is not a finite number", weight.dump()));
    }
    largest_id_ = std::max(largest_id_, id.get<std::int64_t>());
    trace_.table.topk_idx.push_back(id.get<std::int64_t>());
    trace_.table.topk_weights.push_back(weight.get<float>());
    return {};
  }

  Result<Trace> finish() {
    if (line_number_ == 0) {
      return Status(
          ErrorCode::kInvalidArgument,
          fmt::format(R"(the trace {} is empty; expected lines like {{"topk_ids": [...], "topk_weights": [...]}})",
                      path_));
    }
    if (trace_.table.num_tokens == 0) return wrong("the trace ends without a token");
    trace_.table.num_experts = meta_num_experts_.value_or(std::max<std::int64_t>(largest_id_ + 1, 1));
    return std::move(trace_);
  }

  /// Millions of tokens; a larger source, such as a device, would only fill the memory.
  static constexpr std::size_t kMaxBytes = std::size_t{1} << 30;
  /// Far more than any model has; a larger number means that the trace is damaged.
  static constexpr std::int64_t kMaxExperts = 65536;

  const std::string& path_;
  std::int64_t line_number_ = 0;
  bool has_meta_ = false;
  std::optional<std::int64_t> meta_num_experts_;
  std::optional<std::int64_t> meta_num_topk_;
  std::int64_t largest_id_ = -1;
  Trace trace_;
};

/// Path of the trace: for a folder, its only trace. If a folder has several, the user must choose, so its own path is
/// kept and fails.
std::string file_of_trace(const std::string& path) {
  std::error_code error;
  std::vector<std::string> traces;
  std::filesystem::directory_iterator entry(path, error);
  for (; !error && entry != std::filesystem::directory_iterator() && traces.size() < 2; entry.increment(error)) {
    if (entry->path().extension() == ".jsonl") traces.push_back(entry->path().string());
  }
  return !error && traces.size() == 1 ? traces.front() : path;
}

}  // namespace

Result<Trace> read_trace(const std::string& path) { return TraceReader(file_of_trace(path)).read(); }

}  // namespace ferry::tools
