#include "doctor/doctor.hpp"

#include <fmt/format.h>

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "doctor/attach.hpp"
#include "doctor/facts.hpp"
#include "doctor/finding.hpp"
#include "ferry/backends.hpp"
#include "ferry/version.hpp"
#include "report/host_facts.hpp"
#include "report/json_report.hpp"
#include "report/output.hpp"
#include "run/exit_code.hpp"
#include "run/option_types.hpp"

namespace ferry::tools {

namespace {

const char* to_string(Health health) {
  switch (health) {
    case Health::kOk:
      return "ok";
    case Health::kWarn:
      return "warn";
    case Health::kMissing:
      return "missing";
  }
  return "?";
}

/// PID_MAX_LIMIT of Linux on 64-bit machines.
constexpr std::int64_t kMaxPid = std::int64_t{1} << 22;

struct DoctorOptions {
  std::string json_path;
  std::int64_t attached_pid = 0;  ///< 0: none
};

std::vector<Finding> examine_all() {
  std::vector<Finding> all;
  for (const auto examine :
       {examine_host, examine_kernel, examine_launchers, examine_backends, examine_networks, examine_gpus}) {
    for (Finding& finding : examine()) all.push_back(std::move(finding));
  }
  return all;
}

std::string to_text(const Finding& finding) {
  std::string text = fmt::format("  {:<8} {:<13} {}\n", to_string(finding.health), finding.name, finding.observed);
  if (!finding.advice.empty()) text += fmt::format("  {:<8} {:<13} -> {}\n", "", "", finding.advice);
  return text;
}

/// Version of the report's form (docs/doctor.md): greater where a member has gone or means something else.
constexpr int kSchema = 1;

Json to_json(const std::vector<Finding>& findings, bool works) {
  Json json;
  json["schema"] = kSchema;
  json["command"] = "doctor";
  json["version"] = version();
  json["commit"] = commit();
  json["host"] = ferry::tools::to_json(read_host_facts());
  json["facts"] = read_facts();
  json["works"] = works;
  json["findings"] = Json::array();
  for (const Finding& finding : findings) {
    json["findings"].push_back({{"status", to_string(finding.health)},
                                {"name", finding.name},
                                {"observed", finding.observed},
                                {"advice", finding.advice}});
  }
  return json;
}

int run_doctor(const DoctorOptions& options) {
  if (Status status = check_writable(options.json_path, "the report"); !status) {
    return report_failure("doctor", status, kExitUsage);
  }
  if (options.attached_pid != 0) return print_recorded_calls(options.attached_pid, options.json_path);
  std::vector<Finding> findings = examine_all();
  bool works = true;
  std::string verdict;
  for (const BackendInfo& backend : backends()) {
    if (!backend.available) continue;
    findings.push_back(prove_backend(backend.name));
    const bool proven = findings.back().health == Health::kOk;
    works = works && proven;
    verdict += fmt::format("The {} backend {} here.\n", backend.name, proven ? "works" : "does not work");
  }
  findings.push_back(prove_nodes());
  verdict += findings.back().health == Health::kOk ? "Ranks of several nodes exchange here (tried with CPU ranks).\n"
                                                   : "Ranks of several nodes do not exchange here.\n";
  if (options.json_path != "-") {
    std::string text = fmt::format("Ferry {} ({}) on {}\n\n", version(), commit(), read_host_facts().kernel);
    for (const Finding& finding : findings) text += to_text(finding);
    if (Status status = print(stdout, text + "\n" + verdict); !status) {
      return report_failure("doctor", status, kExitFailed);
    }
  }
  if (!options.json_path.empty()) {
    if (Status status = write_json(options.json_path, to_json(findings, works)); !status) {
      return report_failure("doctor", status, kExitFailed);
    }
  }
  return works ? kExitOk : kExitFailed;
}

}  // namespace

void add_doctor_command(CLI::App& app, int* exit_code) {
  auto options = std::make_shared<DoctorOptions>();
  CLI::App* command = app.add_subcommand("doctor", "Report what this machine offers, what is missing, and what to do");
  command->add_option("--json", options->json_path, "Write the findings to this file as JSON (-: only JSON, to stdout)")
      ->check(path());
  command
      ->add_option("--attach", options->attached_pid,
                   "Print instead what the ranks of this process's groups are doing, or did before they ended")
      ->type_name("PID")
      ->check(whole_number<std::int64_t>(1, kMaxPid));
  command->callback([options, exit_code] { *exit_code = run_doctor(*options); });
}

}  // namespace ferry::tools
