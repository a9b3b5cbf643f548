/// `ferry doctor` on a machine where the cpu backend works, as on all machines that run these tests.

#include <gtest/gtest.h>
#include <unistd.h>

#include <map>
#include <nlohmann/json.hpp>
#include <set>
#include <string>

#include "ferry/backends.hpp"
#include "ferry/group.hpp"
#include "ferry/transports.hpp"
#include "tools/running_command.hpp"

namespace ferry::testing {
namespace {

using nlohmann::json;

TEST(Doctor, ProvesTheCpuBackend) {
  const CommandEnd end = run_ferry({"doctor", "--json", "-"});
  ASSERT_EQ(end.exit_code, 0) << end.standard_output << end.standard_error;
  const json report = json::parse(end.standard_output);
  EXPECT_TRUE(report["works"].get<bool>());
  std::set<std::string> names;
  for (const json& finding : report["findings"]) {
    const auto status = finding["status"].get<std::string>();
    names.insert(finding["name"].get<std::string>());
    EXPECT_TRUE(status == "ok" || status == "warn" || status == "missing") << status;
    EXPECT_NE(finding["observed"], "") << finding;
    EXPECT_TRUE(status == "ok" || finding["advice"] != "") << finding;
    EXPECT_TRUE(status == "ok" || finding["name"] != "proof") << finding;
  }
  for (const char* name :
       {"cpu", "memory", "/dev/shm", "open files", "memfd_create", "futex", "unix sockets", "loopback TCP", "launcher",
        "backend cpu", "net ucx", "net loopback", "net devices", "net choice", "proof", "proof nodes"}) {
    EXPECT_TRUE(names.count(name)) << name;
  }
}

/// Names of the members of an object.
std::set<std::string> members_of(const json& object) {
  std::set<std::string> names;
  for (const auto& [name, unused] : object.items()) names.insert(name);
  return names;
}

TEST(Doctor, WritesAReportOfOneForm) {
  const CommandEnd end = run_ferry({"doctor", "--json", "-"}, {{"RANK", "3"}, {"WORLD_SIZE", "16"}});
  ASSERT_EQ(end.exit_code, 0) << end.standard_error;
  const json report = json::parse(end.standard_output);
  EXPECT_EQ(report["schema"], 1);
  EXPECT_EQ(report["version"], FERRY_VERSION);
  EXPECT_EQ(members_of(report),
            (std::set<std::string>{"command", "commit", "facts", "findings", "host", "schema", "version", "works"}));
  for (const json& finding : report["findings"]) {
    EXPECT_EQ(members_of(finding), (std::set<std::string>{"advice", "name", "observed", "status"}));
  }
  const json& facts = report["facts"];
  EXPECT_EQ(members_of(facts), (std::set<std::string>{"backends", "gpus", "launchers", "limits", "net_devices",
                                                      "nvidia_driver", "shared_memory", "transports"}));
  EXPECT_EQ(members_of(facts["limits"]),
            (std::set<std::string>{"address_space_bytes", "locked_memory_bytes", "open_files"}));
  EXPECT_EQ(facts["launchers"], json::parse(R"([{"launcher": "torchrun", "rank": "3", "num_ranks": "16"}])"));
  std::set<std::string> names;
  for (const json& backend : facts["backends"]) names.insert(backend["name"].get<std::string>());
  EXPECT_TRUE(names.count("cpu"));
  EXPECT_EQ(facts["transports"].size(), transports().size());
  EXPECT_EQ(facts["net_devices"].size(), net_devices().size());
}

TEST(Doctor, JoinsTwoNodesWhereThereIsANetwork) {
  const CommandEnd end = run_ferry({"doctor", "--json", "-"});
  ASSERT_EQ(end.exit_code, 0) << end.standard_error;
  std::map<std::string, json> findings;
  const json report = json::parse(end.standard_output);
  for (const json& finding : report["findings"]) {
    findings[finding["name"].get<std::string>()] = finding;
  }
  for (const TransportInfo& transport : transports()) {
    const json& finding = findings["net " + transport.name];
    EXPECT_EQ(finding["status"], transport.available ? "ok" : "missing");
    if (transport.name == "ucx") {
      EXPECT_EQ(findings["proof nodes"]["status"], finding["status"]);
      const auto observed = finding["observed"].get<std::string>();
      EXPECT_EQ(transport.available, observed.find("libucp.so") != std::string::npos) << observed;
      EXPECT_EQ(transport.available, observed.find(": works with ") != std::string::npos) << observed;
    }
  }
}

TEST(Doctor, ReadsTheRecordsOfAGroup) {
  // A group of one rank in this process.
  const auto bootstraps = create_in_process_bootstraps(1).value();
  const auto group = Group::create(bootstraps[0], {.backend = "cpu"}).value();
  const std::int64_t id = 0;
  ASSERT_TRUE(group->route({ConstTensorView(&id, DType::kInt64, {1, 1})}, {.num_experts = 1}).ok());
  const CommandEnd end = run_ferry({"doctor", "--attach", std::to_string(getpid()), "--json", "-"});
  ASSERT_EQ(end.exit_code, 0) << end.standard_error;
  const json report = json::parse(end.standard_output);
  EXPECT_EQ(report["schema"], 1);
  EXPECT_EQ(report["attached_pid"], getpid());
  ASSERT_EQ(report["groups"].size(), 1U);
  EXPECT_EQ(report["groups"][0]["diagnosis"]["kind"], "healthy");
  const json& rank = report["groups"][0]["ranks"][0];
  EXPECT_EQ(rank["process"], "running");
  EXPECT_EQ(rank["calls"][0]["operation"], "route");
  EXPECT_EQ(rank["calls"][0]["phase"], "returned");
  const CommandEnd text = run_ferry({"doctor", "--attach", std::to_string(getpid())});
  EXPECT_NE(text.standard_output.find("rank 0 returned from route (call 1)"), std::string::npos)
      << text.standard_output;
}

TEST(Doctor, RefusesAProcessWithoutAGroup) {
  const CommandEnd end = run_ferry({"doctor", "--attach", std::to_string(getpid())});
  EXPECT_EQ(end.exit_code, 1);
  EXPECT_NE(end.standard_error.find("holds no group"), std::string::npos) << end.standard_error;
}

/// Status of a finding about a variable with this value; "absent" if there is no such finding.
std::string health_of(const char* name, const char* variable, const char* value) {
  const CommandEnd end = run_ferry({"doctor", "--json", "-"}, {{variable, value}});
  EXPECT_EQ(end.exit_code, 0) << end.standard_error;
  const json report = json::parse(end.standard_output);
  for (const json& finding : report["findings"]) {
    if (finding["name"] == name) return finding["status"];
  }
  return "absent";
}

/// A build without the CUDA backend has no findings about GPUs.
bool is_built_with_cuda() {
  for (const BackendInfo& backend : backends()) {
    if (backend.name == "cuda") return true;
  }
  return false;
}

TEST(Doctor, WarnsOfFewConnectionsToAGpu) {
  constexpr const char* kVariable = "CUDA_DEVICE_MAX_CONNECTIONS";
  EXPECT_EQ(health_of("gpu connections", kVariable, "1"), is_built_with_cuda() ? "warn" : "absent");
  EXPECT_EQ(health_of("gpu connections", kVariable, "8"), is_built_with_cuda() ? "ok" : "absent");
}

TEST(Doctor, WarnsOfKernelsThatAreLoadedLate) {
  constexpr const char* kVariable = "CUDA_MODULE_LOADING";
  EXPECT_EQ(health_of("gpu loading", kVariable, "LAZY"), is_built_with_cuda() ? "warn" : "absent");
  EXPECT_EQ(health_of("gpu loading", kVariable, "EAGER"), is_built_with_cuda() ? "ok" : "absent");
}

TEST(Doctor, SaysWhichDevicesRanksWouldListenOn) {
  CommandEnd end = run_ferry({"doctor"}, {{"FERRY_NET_DEVICES", "lo"}});
  EXPECT_NE(end.standard_output.find("between hosts ranks listen on lo only (FERRY_NET_DEVICES)"), std::string::npos)
      << end.standard_output;
  end = run_ferry({"doctor"}, {{"FERRY_NET_DEVICES", "nonesuch0"}});
  EXPECT_NE(end.standard_output.find("FERRY_NET_DEVICES is \"nonesuch0\""), std::string::npos) << end.standard_output;
}

TEST(Doctor, NamesTheLauncherThatItSees) {
  const CommandEnd end = run_ferry({"doctor"}, {{"RANK", "3"}, {"WORLD_SIZE", "16"}});
  EXPECT_EQ(end.exit_code, 0);
  EXPECT_NE(end.standard_output.find("torchrun: RANK=3, WORLD_SIZE=16"), std::string::npos) << end.standard_output;
  EXPECT_NE(end.standard_output.find("The cpu backend works here."), std::string::npos) << end.standard_output;
}

}  // namespace
}  // namespace ferry::testing
