#include "conformance/latency_conformance.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <span>

namespace ferry::test {
namespace {

/// Deadline for all ranks to be refused.
constexpr std::int64_t kMeetTimeoutNs = 40 * kNsPerSecond;

}  // namespace

std::vector<PreparedCase> LatencyConformance::prepare_latency(const std::vector<ExchangeCase>& cases) {
  std::vector<PreparedCase> prepared;
  for (const ExchangeCase& spec : cases) prepared.push_back(prepare(spec));
  latency_bytes_ = std::max(latency_bytes_, latency_bytes_of(GetParam().backend, prepared));
  return prepared;
}

PreparedCase LatencyConformance::prepare_latency(const ExchangeCase& one) { return prepare_latency({{one}}).front(); }

void LatencyConformance::run_latency_cases(int num_ranks, const std::vector<ExchangeCase>& cases,
                                           const KernelOptions& kernel) {
  const std::vector<PreparedCase> prepared = prepare_latency(cases);
  run_with_group(num_ranks, [&](RankContext& context, Group& group) {
    for (const PreparedCase& one : prepared) {
      check_latency_case(context, group, one, Halves::kTogether, kernel);
      check_latency_case(context, group, one, Halves::kSplit, kernel);
    }
  });
}

std::vector<BackendConfig> configs_that_verify(bool verify) {
  std::vector<BackendConfig> configs = backend_configs();
  std::erase_if(configs, [verify](const BackendConfig& one) { return one.verify != verify; });
  return configs;
}

Status call_dispatch(Group& group, const LatencyDispatchTensors& tensors) {
  const Stream stream = stream_of(group);
  const Result<Routing> sent = group.latency_dispatch(tensors.in, tensors.out, tensors.options, stream);
  if (!sent.ok() || !tensors.options.split) return finish(group, sent.status());
  return finish(group, group.latency_receive(*sent, stream));
}

Status call_combine(Group& group, const Routing& routing, const LatencyCombineTensors& tensors) {
  const Stream stream = stream_of(group);
  const Status sent = group.latency_combine(routing, tensors.in, tensors.out, stream, tensors.options);
  if (!sent.ok() || !tensors.options.split) return finish(group, sent);
  return finish(group, group.latency_receive(routing, stream));
}

void expect_same_refusal(RankContext& context, const Status& status, ErrorCode code, const std::string& what,
                         std::string_view words) {
  context.expect_code(status, code, what);
  const std::string text = status.to_string();
  context.expect(text.find("latency_") != std::string::npos && text.find(words) != std::string::npos,
                 fmt::format("{}: expected \"{}\" in \"{}\"", what, words, text));
  const auto texts = context.bootstrap()->all_gather(std::as_bytes(std::span(text)), kMeetTimeoutNs);
  if (!context.expect_ok(texts.status(), what)) return;
  const auto as_text = [](const std::vector<std::byte>& bytes) {
    return std::string(reinterpret_cast<const char*>(bytes.data()), bytes.size());
  };
  for (std::size_t rank = 0; rank < texts->size(); ++rank) {
    context.expect((*texts)[rank] == texts->front(),
                   fmt::format("{}: rank 0 got \"{}\", rank {} \"{}\"", what, as_text(texts->front()), rank,
                               as_text((*texts)[rank])));
  }
}

void expect_own_refusals(RankContext& context, const Group& group, const Status& status, const OwnRefusals& refusals) {
  if (!uses_device(group)) {
    expect_same_refusal(context, status, refusals.code, refusals.what, refusals.words_of(0));
    return;
  }
  context.expect_code(status, refusals.code, refusals.what);
  const std::string words = refusals.words_of(context.rank());
  context.expect(status.to_string().find(words) != std::string::npos,
                 fmt::format("{}: expected \"{}\" in \"{}\"", refusals.what, words, status.to_string()));
}

ExchangeCase small_latency_case(int num_ranks, std::uint64_t seed) {
  ExchangeCase one;
  one.name = fmt::format("small case {}", seed);
  one.world = {.num_ranks = num_ranks, .num_topk = 3, .num_experts = 2 * num_ranks + 1, .max_tokens = 6};
  one.world.counts = TokenCounts::kUneven;
  one.world.layout = Layout::kSlab;
  one.world.spare_slab_rows = 2;
  one.world.seed = seed;
  one.dispatches = {{.hidden = 32, .num_scales = 2}};
  one.combines = {{.weighted = true}, {.weighted = true, .order = CombineOrder::kRankSums}};
  return one;
}

ExchangeCase replicated_latency_case(int num_ranks, ReplicaChoice choice) {
  ExchangeCase one = small_latency_case(num_ranks, 73 + static_cast<std::uint64_t>(choice));
  one.world.num_topk = 4;
  one.world.max_tokens = 9;
  one.world.counts = TokenCounts::kEven;
  one.world.num_experts = 9;
  one.world.num_replicas = 12;
  one.world.num_homeless = 2;
  one.world.replica_choice = choice;
  one.world.custom_placement = choice == ReplicaChoice::kNearest;
  one.world.spare_slab_rows = num_ranks * one.world.max_tokens;  // more tokens go to the remaining homes
  one.table_on_device = choice == ReplicaChoice::kRoundRobin;
  if (one.table_on_device) one.spare_max_tokens = kManyTokens;
  return one;
}

}  // namespace ferry::test
