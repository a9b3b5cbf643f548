/// Variables that launchers set, and the options made from them.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <map>
#include <optional>
#include <string>
#include <vector>

#include "bootstrap/launcher_environment.hpp"
#include "bootstrap/ports.hpp"
#include "bootstrap/slurm.hpp"

namespace ferry::test {
namespace {

template <typename Case>
std::string case_name(const testing::TestParamInfo<Case>& info) {
  return info.param.name;
}

using bootstrap::first_host_of_node_list;
using bootstrap::kDefaultPort;
using bootstrap::kFirstDerivedPort;
using bootstrap::kNumDerivedPorts;
using testing::ElementsAre;
using testing::HasSubstr;
using testing::IsEmpty;

using Environment = std::map<std::string, std::string>;

bootstrap::EnvironmentLookup lookup_in(const Environment& environment) {
  return [&environment](const char* name) -> const char* {
    const auto found = environment.find(name);
    return found == environment.end() ? nullptr : found->second.c_str();
  };
}

Result<TcpBootstrapOptions> options_from(const Environment& environment) {
  return bootstrap::tcp_bootstrap_options_from(lookup_in(environment));
}

std::string text_of(const std::optional<EnvironmentVariable>& variable) {
  return variable ? variable->name + "=" + variable->value : "absent";
}

/// Returns one line for each launcher.
std::vector<std::string> launchers_in(const Environment& environment) {
  std::vector<std::string> lines;
  for (const LauncherVariables& found : bootstrap::launcher_variables_from(lookup_in(environment))) {
    lines.push_back(found.launcher + ": " + text_of(found.rank) + " " + text_of(found.num_ranks) + " " +
                    text_of(found.num_local_ranks) + " " + text_of(found.num_hosts));
  }
  return lines;
}

Environment with(Environment environment, const Environment& more) {
  for (const auto& [name, value] : more) environment[name] = value;
  return environment;
}

const Environment torchrun_variables = {{"RANK", "3"},           {"WORLD_SIZE", "8"},      {"LOCAL_WORLD_SIZE", "4"},
                                        {"MASTER_ADDR", "gpu1"}, {"MASTER_PORT", "29500"}, {"FERRY_SECRET", "s"}};
const Environment mpirun_variables = {{"OMPI_COMM_WORLD_RANK", "2"},
                                      {"OMPI_COMM_WORLD_SIZE", "4"},
                                      {"OMPI_COMM_WORLD_LOCAL_SIZE", "4"},
                                      {"PMIX_NAMESPACE", "prterun-a-17@1"}};
const Environment srun_variables = {{"SLURM_PROCID", "5"},
                                    {"SLURM_NTASKS", "16"},
                                    {"SLURM_NNODES", "2"},
                                    {"SLURM_JOB_ID", "4711"},
                                    {"SLURM_STEP_ID", "0"},
                                    {"SLURM_STEP_NODELIST", "gpu[03-04]"},
                                    {"SLURM_LAUNCH_NODE_IPADDR", "10.0.0.9"},
                                    {"FERRY_SECRET", "s"}};
const Environment by_hand_variables = {{"FERRY_RANK", "1"}, {"FERRY_NUM_RANKS", "2"}};

struct Expected {
  const char* name;
  Environment environment;
  int rank;
  int num_ranks;
  std::string host;
};

class LauncherTable : public testing::TestWithParam<Expected> {};

TEST_P(LauncherTable, GivesRanksAndHost) {
  const auto options = options_from(GetParam().environment);
  ASSERT_TRUE(options.ok()) << options.status().to_string();
  EXPECT_EQ(options->rank, GetParam().rank);
  EXPECT_EQ(options->num_ranks, GetParam().num_ranks);
  EXPECT_EQ(options->host, GetParam().host);
  EXPECT_NE(options->port, 0);
  EXPECT_FALSE(options->secret.empty());
}

INSTANTIATE_TEST_SUITE_P(
    Launchers, LauncherTable,
    testing::Values(
        Expected{"torchrun", torchrun_variables, 3, 8, "gpu1"}, Expected{"mpirun", mpirun_variables, 2, 4, "127.0.0.1"},
        Expected{"srun", srun_variables, 5, 16, "gpu03"},
        Expected{"srun_one_node", with(srun_variables, {{"SLURM_NNODES", "1"}}), 5, 16, "127.0.0.1"},
        Expected{"srun_odd_node_list", with(srun_variables, {{"SLURM_STEP_NODELIST", "gpu[x"}}), 5, 16, "10.0.0.9"},
        Expected{"pmi", {{"PMI_RANK", "0"}, {"PMI_SIZE", "2"}}, 0, 2, "127.0.0.1"},
        Expected{"pmi_under_slurm", with(srun_variables, {{"PMI_RANK", "1"}, {"PMI_SIZE", "2"}}), 1, 2, "gpu03"},
        Expected{"by_hand", by_hand_variables, 1, 2, "127.0.0.1"},
        Expected{"own_variables_win",
                 with(torchrun_variables, {{"FERRY_RANK", "6"}, {"FERRY_NUM_RANKS", "7"}, {"FERRY_HOST", "h"}}), 6, 7,
                 "h"},
        Expected{"mpirun_inside_slurm", with(mpirun_variables, with(srun_variables, {{"SLURM_PROCID", "0"}})), 2, 4,
                 "127.0.0.1"},
        Expected{"host_in_brackets", with(by_hand_variables, {{"FERRY_HOST", "[::1]"}}), 1, 2, "::1"},
        Expected{"master_in_brackets", with(torchrun_variables, {{"MASTER_ADDR", "[fd00::7]"}}), 3, 8, "fd00::7"},
        Expected{"last_step_of_srun", with(srun_variables, {{"SLURM_STEP_ID", "4294967280"}}), 5, 16, "gpu03"},
        Expected{"by_hand_in_a_batch_script",
                 with(by_hand_variables, with(srun_variables, {{"SLURM_STEP_ID", "4294967291"}})), 1, 2, "127.0.0.1"},
        Expected{"empty_means_unset", with(by_hand_variables, {{"RANK", ""}, {"WORLD_SIZE", ""}}), 1, 2, "127.0.0.1"}),
    case_name<Expected>);

struct Refused {
  const char* name;
  Environment environment;
  const char* mentioned;
};

class RefusedEnvironment : public testing::TestWithParam<Refused> {};

TEST_P(RefusedEnvironment, NamesTheVariable) {
  const Status status = options_from(GetParam().environment).status();
  EXPECT_EQ(status.code(), ErrorCode::kInvalidArgument) << status.to_string();
  EXPECT_THAT(std::string(status.message()), HasSubstr(GetParam().mentioned));
}

INSTANTIATE_TEST_SUITE_P(
    Each, RefusedEnvironment,
    testing::Values(
        Refused{"nothing", {}, "FERRY_NUM_RANKS"}, Refused{"size_missing", {{"RANK", "0"}}, "WORLD_SIZE"},
        Refused{"own_rank_missing", {{"FERRY_NUM_RANKS", "2"}}, "FERRY_RANK"},
        Refused{"not_a_number", with(by_hand_variables, {{"FERRY_RANK", "1x"}}), "FERRY_RANK='1x'"},
        Refused{"leading_space", with(by_hand_variables, {{"FERRY_RANK", " 1"}}), "FERRY_RANK=' 1'"},
        Refused{"plus_sign", with(by_hand_variables, {{"FERRY_RANK", "+1"}}), "FERRY_RANK='+1'"},
        Refused{"negative", with(by_hand_variables, {{"FERRY_RANK", "-1"}}), "FERRY_RANK='-1'"},
        Refused{"overflow", with(by_hand_variables, {{"FERRY_NUM_RANKS", "4294967298"}}), "FERRY_NUM_RANKS"},
        Refused{"rank_too_large", with(by_hand_variables, {{"FERRY_RANK", "2"}}), "FERRY_RANK=2, expected 0 to 1"},
        Refused{"zero_ranks", with(by_hand_variables, {{"FERRY_NUM_RANKS", "0"}}), "FERRY_NUM_RANKS='0'"},
        Refused{"port_zero", with(by_hand_variables, {{"FERRY_PORT", "0"}}), "FERRY_PORT='0'"},
        Refused{"port_too_large", with(by_hand_variables, {{"FERRY_PORT", "65536"}}), "FERRY_PORT='65536'"},
        Refused{"host_unknown", with(mpirun_variables, {{"OMPI_COMM_WORLD_LOCAL_SIZE", "2"}}), "FERRY_HOST"},
        Refused{"host_with_port", with(by_hand_variables, {{"FERRY_HOST", "a:1"}}), "FERRY_HOST='a:1'"},
        Refused{"address_with_port", with(by_hand_variables, {{"FERRY_HOST", "[::1]:1"}}), "FERRY_HOST='[::1]:1'"},
        Refused{"no_address_in_brackets", with(by_hand_variables, {{"FERRY_HOST", "[]"}}), "FERRY_HOST='[]'"},
        Refused{"launch_node_with_port",
                with(srun_variables, {{"SLURM_STEP_NODELIST", ""}, {"SLURM_LAUNCH_NODE_IPADDR", "a:1"}}),
                "SLURM_LAUNCH_NODE_IPADDR='a:1'"},
        Refused{"master_with_port", with(by_hand_variables, {{"MASTER_ADDR", "10.0.0.1:1"}}), "FERRY_PORT"},
        Refused{"secret_missing", with(by_hand_variables, {{"FERRY_HOST", "10.1.1.1"}}), "openssl rand -hex 32"}),
    case_name<Refused>);

TEST(LauncherPort, FollowsTheDocumentedRule) {
  EXPECT_EQ(options_from(torchrun_variables)->port, 29501);
  EXPECT_EQ(options_from(with(torchrun_variables, {{"MASTER_PORT", "65535"}}))->port, 1024);
  EXPECT_EQ(options_from(with(torchrun_variables, {{"FERRY_PORT", "7"}}))->port, 7);
  EXPECT_EQ(options_from(by_hand_variables)->port, kDefaultPort);
  const std::uint16_t derived = options_from(srun_variables)->port;
  EXPECT_GE(derived, kFirstDerivedPort);
  EXPECT_LT(derived, kFirstDerivedPort + kNumDerivedPorts);
  EXPECT_EQ(derived, options_from(with(srun_variables, {{"SLURM_PROCID", "0"}}))->port)
      << "all ranks must derive the same port";
  EXPECT_NE(derived, options_from(with(srun_variables, {{"SLURM_JOB_ID", "4712"}}))->port);
}

TEST(LauncherPort, HasSparePortsUnlessItWasGivenByHand) {
  EXPECT_GT(options_from(torchrun_variables)->num_spare_ports, 0);
  EXPECT_GT(options_from(srun_variables)->num_spare_ports, 0);
  EXPECT_EQ(options_from(with(torchrun_variables, {{"FERRY_PORT", "7"}}))->num_spare_ports, 0);
  EXPECT_EQ(options_from(by_hand_variables)->num_spare_ports, 0) << "a second rank 0 must find the port taken";
}

TEST(LauncherSecret, IsDerivedOnLoopbackOnlyAndDiffersByJob) {
  const std::string derived = options_from(mpirun_variables)->secret;
  EXPECT_EQ(derived, options_from(with(mpirun_variables, {{"OMPI_COMM_WORLD_RANK", "0"}}))->secret);
  EXPECT_NE(derived, options_from(with(mpirun_variables, {{"PMIX_NAMESPACE", "prterun-a-18@1"}}))->secret);
  EXPECT_EQ(options_from(with(mpirun_variables, {{"FERRY_SECRET", "mine"}}))->secret, "mine");
  for (const char* host : {"::1", "localhost", "127.8.8.8"}) {
    EXPECT_TRUE(options_from(with(mpirun_variables, {{"FERRY_HOST", host}})).ok()) << host;
  }
  EXPECT_FALSE(options_from(with(mpirun_variables, {{"FERRY_HOST", "localhost.example.org"}})).ok());
}

TEST(LauncherVariablesFrom, ListsEveryLauncherInOrderOfPrecedence) {
  EXPECT_THAT(launchers_in(torchrun_variables), ElementsAre("torchrun: RANK=3 WORLD_SIZE=8 LOCAL_WORLD_SIZE=4 absent"));
  EXPECT_THAT(launchers_in(with(mpirun_variables, with(srun_variables, by_hand_variables))),
              ElementsAre("FERRY_* variables: FERRY_RANK=1 FERRY_NUM_RANKS=2 absent absent",
                          "Open MPI's mpirun: OMPI_COMM_WORLD_RANK=2 OMPI_COMM_WORLD_SIZE=4 "
                          "OMPI_COMM_WORLD_LOCAL_SIZE=4 absent",
                          "srun: SLURM_PROCID=5 SLURM_NTASKS=16 absent SLURM_NNODES=2"));
}

TEST(LauncherVariablesFrom, NeedsBothRankAndNumberOfRanks) {
  EXPECT_THAT(launchers_in({}), IsEmpty());
  EXPECT_THAT(launchers_in({{"RANK", "0"}, {"SLURM_NTASKS", "2"}}), IsEmpty());
  EXPECT_THAT(launchers_in({{"RANK", "0"}, {"WORLD_SIZE", ""}}), IsEmpty());
}

/// Values of SLURM_STEP_ID where Slurm has set a rank and a number of tasks, and srun has started none of them.
class NoStep : public testing::TestWithParam<const char*> {};

TEST_P(NoStep, IsNoLauncher) {
  const Environment environment = with(srun_variables, {{"SLURM_STEP_ID", GetParam()}});
  EXPECT_THAT(launchers_in(environment), IsEmpty());
  const Status status = options_from(environment).status();
  EXPECT_EQ(status.code(), ErrorCode::kInvalidArgument) << status.to_string();
  EXPECT_THAT(std::string(status.message()), HasSubstr("no step of srun"));
}

// Steps of srun end at 4294967280. From 4294967290 on: an interactive shell, a batch script, processes outside of
// steps, a step that waits, and a batch script of older versions.
INSTANTIATE_TEST_SUITE_P(Ids, NoStep,
                         testing::Values("4294967281", "4294967290", "4294967291", "4294967292", "4294967293",
                                         "4294967294", "4294967295", "4294967296", "", "batch", "-1"));

TEST(LauncherVariablesFrom, LeavesTheTextUnchecked) {
  EXPECT_THAT(launchers_in({{"RANK", "x"}, {"WORLD_SIZE", "-1"}, {"LOCAL_WORLD_SIZE", ""}}),
              ElementsAre("torchrun: RANK=x WORLD_SIZE=-1 absent absent"));
}

TEST(NodeList, FirstHostOfWhatSlurmWrites) {
  EXPECT_EQ(first_host_of_node_list("node7"), "node7");
  EXPECT_EQ(first_host_of_node_list("a1,b2"), "a1");
  EXPECT_EQ(first_host_of_node_list("gpu[03-07,9],login"), "gpu03");
  EXPECT_EQ(first_host_of_node_list("r[1,3]n[10-12].x"), "r1n10.x");
  EXPECT_EQ(first_host_of_node_list(""), "");
  EXPECT_EQ(first_host_of_node_list("gpu[3"), "");
  EXPECT_EQ(first_host_of_node_list("gpu[]"), "");
  EXPECT_EQ(first_host_of_node_list("gpu 3"), "");
}

}  // namespace
}  // namespace ferry::test
