#include "doctor/attach.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <vector>

#include "ferry/recorded_calls.hpp"
#include "ferry/version.hpp"
#include "report/json_report.hpp"
#include "report/output.hpp"
#include "run/exit_code.hpp"

namespace ferry::tools {

namespace {

/// Calls of each rank that the text shows; the JSON has all.
constexpr std::size_t kNumShownCalls = 4;
constexpr double kNsPerMillisecond = 1e6;
/// Version of the report's form (docs/doctor.md).
constexpr int kSchema = 1;

std::string shape_of(const RecordedCall& call) {
  std::string text;
  if (call.num_tokens >= 0) text += fmt::format(" T={}", call.num_tokens);
  if (call.num_topk >= 0) text += fmt::format(" K={}", call.num_topk);
  if (call.row_bytes > 0) {
    const auto hidden = static_cast<std::size_t>(call.row_bytes) / size_bytes(call.dtype);
    text += fmt::format(" H={} {}", hidden, to_string(call.dtype));
  }
  return text;
}

std::string to_text(const RecordedCall& call, std::int64_t now_ns) {
  const auto milliseconds = [](std::int64_t from_ns, std::int64_t to_ns) {
    return static_cast<double>(std::max<std::int64_t>(to_ns - from_ns, 0)) / kNsPerMillisecond;
  };
  std::string text = fmt::format("    call {:<6} {:<16} {:<9} called {:.0f} ms ago", call.number, call.operation,
                                 to_string(call.phase), milliseconds(call.called_ns, now_ns));
  if (call.ended_ns != 0) text += fmt::format(", took {:.0f} ms", milliseconds(call.called_ns, call.ended_ns));
  if (call.code != ErrorCode::kOk) {
    text += fmt::format(", {}", to_string(call.code));
    if (call.peer >= 0) text += fmt::format(" about rank {}", call.peer);
  }
  return text + shape_of(call) + "\n";
}

std::string to_text(const RecordedGroup& group) {
  std::string text =
      fmt::format("group {}: {} ranks, {} in a node, deadline {:.1f} s\n", group.id, group.num_ranks,
                  group.ranks_per_node, static_cast<double>(group.timeout_ns) / (kNsPerMillisecond * 1000));
  for (const RecordedRank& rank : group.ranks) {
    text += fmt::format("  {} [process {}, {}{}]\n", rank.describe(group.now_ns), rank.pid, to_string(rank.process),
                        rank.has_left ? ", has left the group" : "");
    const std::size_t num_shown = std::min(rank.calls.size(), kNumShownCalls);
    for (std::size_t i = rank.calls.size() - num_shown; i < rank.calls.size(); ++i) {
      text += to_text(rank.calls[i], group.now_ns);
    }
  }
  return text + fmt::format("  diagnosis: {}: {}\n\n", to_string(group.diagnosis.kind), group.diagnosis.text);
}

}  // namespace

int print_recorded_calls(std::int64_t pid, const std::string& json_path) {
  const Result<std::vector<RecordedGroup>> groups = recorded_calls(pid);
  if (!groups.ok()) return report_failure("doctor", groups.status(), kExitFailed);
  if (groups->empty()) {
    const Status none(ErrorCode::kInvalidArgument,
                      fmt::format("process {} holds no group of this build ({}); give the id of a rank's process, not "
                                  "of its launcher",
                                  pid, version()));
    return report_failure("doctor", none, kExitFailed);
  }
  if (json_path != "-") {
    std::string text;
    for (const RecordedGroup& group : *groups) text += to_text(group);
    if (Status status = print(stdout, text); !status) return report_failure("doctor", status, kExitFailed);
  }
  if (json_path.empty()) return kExitOk;
  Json json;
  json["schema"] = kSchema;
  json["command"] = "doctor";
  json["version"] = version();
  json["commit"] = commit();
  json["attached_pid"] = pid;
  json["groups"] = Json::array();
  for (const RecordedGroup& group : *groups) json["groups"].push_back(Json::parse(group.to_json()));
  if (Status status = write_json(json_path, json); !status) return report_failure("doctor", status, kExitFailed);
  return kExitOk;
}

}  // namespace ferry::tools
