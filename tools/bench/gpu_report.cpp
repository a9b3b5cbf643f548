#include "bench/gpu_report.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <optional>
#include <utility>

#include "bench/kernel_settings.hpp"
#include "report/host_facts.hpp"
#include "report/table.hpp"

namespace ferry::tools {

namespace {

constexpr double kNsPerUs = 1000.0;

Json microseconds(const std::optional<std::int64_t>& ns) {
  return ns ? Json(static_cast<double>(*ns) / kNsPerUs) : Json(nullptr);
}

Json nullable(const std::optional<double>& value) { return value ? Json(*value) : Json(nullptr); }

/// CUDA's version numbers are 1000 * major + 10 * minor.
std::string version_text(int version) { return fmt::format("{}.{}", version / 1000, version % 1000 / 10); }

const LimitResult* best_of(const std::vector<LimitResult>& limits) {
  const auto best = std::max_element(limits.begin(), limits.end(),
                                     [](const LimitResult& a, const LimitResult& b) { return a.gbps < b.gbps; });
  return best == limits.end() ? nullptr : &*best;
}

Json to_json(const LimitResult& limit) {
  return {{"method", name_of(limit.method)},
          {"num_sms", limit.num_sms},
          {"time_us_p50", static_cast<double>(limit.time_p50_ns) / kNsPerUs},
          {"gbps", limit.gbps}};
}

Json to_json(const KernelLaunch& kernel) {
  return {{"num_blocks", kernel.num_blocks},
          {"num_copy_blocks", kernel.num_copy_blocks},
          {"num_threads", kernel.num_threads},
          {"shared_bytes", kernel.shared_bytes}};
}

}  // namespace

std::string_view name_of(LimitMethod method) { return method == LimitMethod::kPush ? "push" : "pull"; }

std::string gpu_formulas() {
  return "GB/s           bytes / ranks / p50 time; a time lies between events around all kernels of the call, second-\n"
         "               level caches flushed, ranks lined up, the slowest rank counts; host call: to put it on the\n"
         "               stream after a wait; in a row: the same right after another such call, caches warm\n"
         "limit          the fastest raw exchange in the same run: as many rows as ranks send to others on average,\n"
         "               evenly over all ranks, pushed by bulk copies or pulled by loads; a row is as long as the\n"
         "               operation's (payload, scales, ids and weights: the bytes that count) and starts at a "
         "multiple\n"
         "               of 128 bytes; ratio = limit's time for the same wire bytes / operation's time; busiest: the\n"
         "               same for what the rank with most traffic sends or receives, which bounds skewed routing\n";
}

std::string limits_to_text(const std::vector<BenchReport>& reports) {
  const DeviceFacts& facts = reports.front().device.facts;
  std::string text =
      fmt::format("\n{} x {}, {} SMs, driver for CUDA {}, runtime {}\n", facts.num_devices, facts.name.data(),
                  facts.num_sms, version_text(facts.driver_version), version_text(facts.runtime_version));
  if (reports.front().device.limit_is_local) {
    text += "all ranks share one GPU: the limit is copies inside it, and the ratio compares logical bytes\n";
  }
  if (const std::int64_t ns = reports.front().device.flag_round_trip_ns; ns > 0) {
    text +=
        fmt::format("a flag to another GPU and back takes {}, which the limit of each call includes\n", format_ns(ns));
  }
  Table table({"raw exchange", "tokens", "rows of", "SMs", "p50", "GB/s a rank", ""});
  bool any = false;
  for (const BenchReport& report : reports) {
    for (const OpResult& result : report.results) {
      const LimitResult* best = best_of(result.limits);
      for (const LimitResult& limit : result.limits) {
        any = true;
        table.add_row({std::string(name_of(limit.method)), fmt::to_string(report.plan.num_tokens),
                       std::string(name_of(result.op)), fmt::to_string(limit.num_sms), format_ns(limit.time_p50_ns),
                       fmt::format("{:.2f}", limit.gbps), &limit == best ? "<- the limit" : ""});
      }
    }
  }
  return any ? text + table.to_string() : text;
}

void add_gpu_run(const BenchReport& report, Json* json) {
  const DeviceFacts& facts = report.device.facts;
  (*json)["gpu"] = {{"name", facts.name.data()},
                    {"compute_capability", fmt::format("{}.{}", facts.compute_major, facts.compute_minor)},
                    {"num_sms", facts.num_sms},
                    {"memory_bytes", facts.memory_bytes},
                    {"num_devices", facts.num_devices},
                    {"driver_version", version_text(facts.driver_version)},
                    {"driver_module_version", read_driver_module_version()},
                    {"cuda_runtime", version_text(facts.runtime_version)}};
  (*json)["run"]["kernel_options"] = to_json(report.plan.kernels.front());
  (*json)["run"]["tuning_file"] = report.plan.tuning_file;
  (*json)["run"]["limit_is_local"] = report.device.limit_is_local;
  if (report.plan.latency()) {
    const std::int64_t ns = report.device.flag_round_trip_ns;
    (*json)["run"]["flag_round_trip_us"] = microseconds(ns > 0 ? std::optional(ns) : std::nullopt);
  }
}

void add_gpu_result(const OpResult& result, Json* json) {
  (*json)["host_time_us_p50"] = microseconds(result.host_p50_ns);
  (*json)["in_row_host_time_us_p50"] = microseconds(result.in_row_p50_ns);
  (*json)["events_time_us_p50"] = microseconds(result.events_p50_ns);
  (*json)["busiest_limit_time_us"] = microseconds(result.busiest_limit_p50_ns);
  (*json)["ratio_to_busiest_limit"] = nullable(result.ratio_to_busiest_limit());
  const std::optional<int> num_sms = result.num_sms();
  (*json)["num_sms"] = num_sms ? Json(*num_sms) : Json(nullptr);
  (*json)["held_sm_us_p50"] = microseconds(result.held_sm_ns());
  Json kernels = Json::array();
  for (const KernelLaunch& kernel : result.kernels) kernels.push_back(to_json(kernel));
  (*json)["kernels"] = std::move(kernels);
  Json limits = Json::array();
  for (const LimitResult& limit : result.limits) limits.push_back(to_json(limit));
  (*json)["limits"] = std::move(limits);
  const LimitResult* best = best_of(result.limits);
  (*json)["limit"] = best == nullptr ? Json(nullptr) : to_json(*best);
}

}  // namespace ferry::tools
