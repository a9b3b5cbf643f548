/// `ferry plan` as a user runs it: files of rates, text and JSON, refusals.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <string>
#include <vector>

#include "planning/rates.hpp"
#include "tools/running_command.hpp"

namespace ferry::testing {
namespace {

using ::testing::HasSubstr;
using tools::Json;
using tools::Rates;

TEST(PlanRates, OfPresetsSayWhereTheyComeFrom) {
  for (const char* name : {"h100", "h200"}) {
    const Rates rates = tools::find_rates(name).value();
    for (const tools::RateField& field : tools::rate_fields()) {
      EXPECT_GT((rates.*(field.member)).value, 0) << name << ": " << field.key;
      EXPECT_FALSE((rates.*(field.member)).source.empty()) << name << ": " << field.key;
    }
  }
}

TEST(PlanRates, OfAReportCanBeGivenBack) {
  Rates rates = tools::find_rates("h200").value();
  rates.network_gbit = {123, tools::RateOrigin::kMeasured, "a cluster"};
  const TemporaryFile file(tools::to_json(rates).dump());
  const Result<Rates> again = tools::find_rates(file.path());
  ASSERT_TRUE(again.ok()) << again.status().to_string();
  EXPECT_EQ(tools::to_json(*again), tools::to_json(rates));
}

TEST(PlanRates, OfAFileReplaceThoseThatItNames) {
  const TemporaryFile file(R"({"ferry_rates": 1, "base": "h200", "rates":
      {"network_gbit": {"value": 200, "origin": "measured", "source": "ib_write_bw"}}})");
  const Rates rates = tools::find_rates(file.path()).value();
  EXPECT_EQ(rates.network_gbit.value, 200);
  EXPECT_EQ(rates.network_gbit.source, "ib_write_bw");
  EXPECT_EQ(rates.hbm_gbps.value, tools::find_rates("h200").value().hbm_gbps.value);
}

TEST(PlanRates, OfAMalformedFileAreRefused) {
  struct Case {
    const char* content;
    const char* complaint;
  };
  const auto rates_with = [](const std::string& rate) {
    return R"({"ferry_rates": 1, "base": "h100", "rates": {)" + rate + "}}";
  };
  const std::string share = rates_with(R"("network_share": {"value": 1.5, "origin": "assumed", "source": "x"})");
  const std::string zero = rates_with(R"("hbm_gbps": {"value": 0, "origin": "assumed", "source": "x"})");
  const std::string huge = rates_with(R"("hbm_gbps": {"value": 1e300, "origin": "assumed", "source": "x"})");
  const std::string origin = rates_with(R"("hbm_gbps": {"value": 1, "origin": "guessed", "source": "x"})");
  const std::string no_source = rates_with(R"("hbm_gbps": {"value": 1, "origin": "assumed"})");
  const std::string number = rates_with(R"("hbm_gbps": 3)");
  const std::string unknown = rates_with(R"("hbm": {"value": 1, "origin": "assumed", "source": "x"})");
  for (const Case& bad :
       {Case{"{\n\"a\" 1}", "parse error at line 2, column 5"}, Case{"[]", "the file holds array; expected an object"},
        Case{"{}", "\"ferry_rates\" is null; expected 1"},
        Case{R"({"ferry_rates": 1, "base": "a100"})", "\"base\" is \"a100\"; expected h100 or h200"},
        Case{R"({"ferry_rates": 1, "base": 3})", "\"base\" is 3; expected h100 or h200"},
        Case{R"({"ferry_rates": 1, "base": "h100"})", "\"rates\" is null; expected an object"},
        Case{share.c_str(), "expected a share from above 0 to 1"},
        Case{zero.c_str(), "\"hbm_gbps\" has the value 0; expected {\"value\": a number above 0"},
        Case{huge.c_str(), "\"hbm_gbps\" has the value 1e+300"},
        Case{origin.c_str(), "\"hbm_gbps\" has the origin \"guessed\""},
        Case{no_source.c_str(), "\"hbm_gbps\" has the source null"},
        Case{number.c_str(), "\"hbm_gbps\" is 3; expected"},
        Case{unknown.c_str(), "\"hbm\" is no rate; expected one of nvlink_push_gbps"}}) {
    const TemporaryFile file(bad.content);
    const CommandEnd end = run_ferry({"plan", "--rates", file.path()});
    EXPECT_EQ(end.exit_code, 2) << bad.content;
    EXPECT_THAT(end.standard_error, HasSubstr(file.path())) << bad.content;
    EXPECT_THAT(end.standard_error, HasSubstr(bad.complaint)) << bad.content;
  }
}

TEST(PlanCommand, RefusesWhatCannotBePlanned) {
  struct Case {
    std::vector<std::string> arguments;
    const char* complaint;
  };
  const TemporaryFile trace(R"({"type": "meta", "num_experts": 2, "topk": 1}
{"topk_ids": [0], "topk_weights": [1]}
)");
  const TemporaryFile no_json("{\n\"command\" 1}");
  const TemporaryFile no_report(R"({"command": "demo", "results": []})");
  const TemporaryFile empty_report(R"({"command": "bench", "results": []})");
  for (const Case& bad :
       {Case{{"--experts", "100"}, "--experts 100 over 8 ranks: expected a multiple of the ranks, such as 104"},
        Case{{"--nodes", "256"}, "--experts 256 over 2048 ranks: expected a multiple of the ranks, such as 2048"},
        Case{{"--topk", "16", "--experts", "8"},
             "--topk 16 of --experts 8: a token picks distinct experts, so give at most 8"},
        Case{{"--nodes", "512"}, "are 4096 ranks; expected at most 2048"},
        Case{{"--ranks-per-node", "1"}, "give 2 ranks or more"},
        Case{{"--node-limit", "4", "--nodes", "2"}, "--node-limit 4 of --nodes 2"},
        Case{{"--nodes", "8", "--node-limit", "1", "--experts", "64", "--topk", "9"},
             "that many nodes have 8 experts; raise the limit"},
        Case{{"--routing", "flat"}, "--routing flat: expected random, zipf, one-hot or trace:FILE"},
        Case{{"--routing", "zipf", "--node-limit", "1"}, "--node-limit with --routing zipf"},
        Case{{"--routing", "trace:/no/such"}, "/no/such"},
        Case{{"--routing", "trace:" + trace.path()}, "the trace has 1 of 2 experts a token; give --topk 1 --experts 2"},
        Case{{"--hidden", "100"}, "--hidden 100: rows are multiples of 16 bytes"},
        Case{{"--nodes", "8", "--sms", "4"}, "--sms 4 over 8 nodes: expected at least 15"},
        Case{{"--nodes", "2", "--memory", "plain"}, "--memory plain with several nodes is not modelled"},
        Case{{"--tokens", "0"}, "--tokens: 0 is not a whole number from 1"},
        Case{{"--dtype", "fp4"}, "fp4 not in {bf16,fp8}"},
        Case{{"--rates", "/no/such"}, "cannot read the rates /no/such"},
        Case{{"--compare", "/no/such"}, "cannot read the report /no/such"},
        Case{{"--compare", no_json.path()}, "parse error at line 2, column 11"},
        Case{{"--compare", no_report.path()}, "expected a report of ferry bench --json"},
        Case{{"--compare", empty_report.path()}, "none of its results is predicted"},
        Case{{"--compare", empty_report.path(), "--tokens", "5"}, "--tokens with --compare: shapes and topologies are"},
        Case{{"--json", "/no/such/folder"}, "/no/such/folder"}}) {
    std::vector<std::string> arguments = {"plan"};
    arguments.insert(arguments.end(), bad.arguments.begin(), bad.arguments.end());
    const CommandEnd end = run_ferry(arguments);
    EXPECT_NE(end.exit_code, 0) << ::testing::PrintToString(bad.arguments);
    EXPECT_THAT(end.standard_error, HasSubstr(bad.complaint)) << ::testing::PrintToString(bad.arguments);
    EXPECT_EQ(end.standard_output, "") << ::testing::PrintToString(bad.arguments);
  }
}

TEST(PlanCommand, SaysTimesLimitsAndOrigins) {
  const CommandEnd end = run_ferry({"plan", "--nodes", "1,8", "--network-gbit", "200", "--terms"});
  ASSERT_EQ(end.exit_code, 0) << end.standard_error;
  for (const char* part : {"one node of 8 ranks, EP8", "8 nodes of 8 ranks, EP64", "latency-pair, in a graph",
                           "host memory", "note: no run between hosts has been made",
                           "measured cuda-h100-x2/pair_bf16.json", "assumed  --network-gbit"}) {
    EXPECT_THAT(end.standard_output, HasSubstr(part));
  }
}

TEST(PlanCommand, WritesEveryTermAsJson) {
  const CommandEnd end = run_ferry({"plan", "--nodes", "2,256", "--experts", "2048", "--json", "-"});
  ASSERT_EQ(end.exit_code, 0) << end.standard_error;
  const Json report = Json::parse(end.standard_output);
  EXPECT_EQ(report["command"], "plan");
  EXPECT_EQ(report["shape"]["experts"], 2048);
  EXPECT_EQ(report["rates"]["rates"]["network_gbit"]["origin"], "assumed");
  ASSERT_EQ(report["plans"].size(), 2U);
  EXPECT_EQ(report["plans"][1]["ranks"], 2048);
  EXPECT_THAT(report["plans"][1]["notes"].dump(), HasSubstr("groups of GPU ranks have at most 32"));
  for (const Json& plan : report["plans"]) {
    ASSERT_EQ(plan["calls"].size(), 6U);
    EXPECT_GT(plan["memory"]["gpu_bytes"], 0);
    for (const Json& call : plan["calls"]) {
      double sum = 0;
      double longest = 0;
      for (const Json& term : call["terms"]) {
        const double us = term["time_us"];
        (term["overlaps"].get<bool>() ? longest : sum) =
            term["overlaps"].get<bool>() ? std::max(longest, us) : sum + us;
        for (const Json& rate : term["rates"]) EXPECT_TRUE(report["rates"]["rates"].contains(rate)) << rate;
      }
      EXPECT_NEAR(call["time_us"].get<double>(), sum + longest, 1e-6) << call["call"];
    }
  }
}

}  // namespace
}  // namespace ferry::testing
