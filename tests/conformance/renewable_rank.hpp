#ifndef FERRY_TESTS_RENEWABLE_RANK_HPP
#define FERRY_TESTS_RENEWABLE_RANK_HPP

/// Ranks of conformance tests that are lost and come back, in groups that are renewed (Group::renew).

#include <fmt/format.h>

#include <chrono>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

#include "conformance/latency_conformance.hpp"
#include "ferry/membership.hpp"
#include "support/device_memory.hpp"

namespace ferry::test {

/// Ranks of each group.
inline constexpr int kRenewRanks = 4;
inline constexpr std::int64_t kRenewPatienceNs = 60 * kNsPerSecond;

/// Waits, without group and members, until every rank has arrived; gives the text of `from` to all.
inline std::string meet_all(RankContext& context, std::string_view text = {}, std::size_t from = 0) {
  const auto all = context.bootstrap()->all_gather(std::as_bytes(std::span(text)), kRenewPatienceNs);
  if (!context.expect_ok(all.status(), "meet_all")) return {};
  return {reinterpret_cast<const char*>((*all)[from].data()), (*all)[from].size()};
}

class RenewConformance : public LatencyConformance {
 protected:
  /// A case for each set of absent ranks, in their order: `spec` without them.
  std::vector<PreparedCase> cases_of(ExchangeCase spec, const std::vector<std::vector<int>>& absent) {
    std::vector<ExchangeCase> specs;
    for (const std::vector<int>& ranks : absent) {
      spec.name = fmt::format("without ranks [{}]", fmt::join(ranks, ", "));
      spec.masked = ranks;
      specs.push_back(spec);
    }
    return prepare_latency(specs);
  }
  std::vector<PreparedCase> cases(const std::vector<std::vector<int>>& absent) {
    ExchangeCase spec = small_latency_case(kRenewRanks, 83);
    spec.world.num_topk = 4;
    spec.world.counts = TokenCounts::kEven;
    spec.combines.push_back({.weighted = true, .order = CombineOrder::kRankSums, .own_weights = true});
    return cases_of(spec, absent);
  }

  bool is_one_node() const { return ranks_per_node(kRenewRanks) == kRenewRanks; }
  /// Whether a new rank of this process can take the place of a lost one.
  bool replaces_threads() const { return !on_gpus() || GetParam().kind == RankKind::kProcesses; }
};

/// A rank of a test, which may be lost and come back.
class RenewableRank {
 public:
  RenewableRank(RankContext& context, const GroupOptions& options) : context_(context), options_(options) {
    MembershipOptions membership{
        .host = "127.0.0.1", .secret = "of the test", .timeout_ns = kRenewPatienceNs, .interrupted = {}};
    auto members = Membership::create(context.bootstrap(), membership);
    if (!context.expect_ok(members.status(), "Membership::create")) return;
    members_ = std::move(*members);
    auto group = Group::create(context.bootstrap(), options);
    if (!context.expect_ok(group.status(), "Group::create")) return;
    group_ = std::move(*group);
  }

  bool is_whole() const { return group_ != nullptr; }
  Group& group() { return *group_; }
  Membership& members() { return *members_; }

  void check_exchanges(const PreparedCase& prepared) {
    check_latency_case(context_, *group_, prepared, Halves::kTogether);
    check_latency_case(context_, *group_, prepared, Halves::kSplit);
  }

  /// Calls, and the mask.
  void check(const PreparedCase& prepared, const std::vector<int>& absent) {
    check_exchanges(prepared);
    TestTensor out(context_, *group_, MemoryKind::kPlain, TensorImage(dense(DType::kInt32, 1, kRenewRanks)));
    TensorView view = out.view();
    view.num_dims = 1;
    view.shape[0] = kRenewRanks;
    view.strides[0] = 1;
    context_.expect_ok(group_->latency_query_mask(view, stream_of(*group_)), "latency_query_mask");
    context_.expect_ok(group_->wait(stream_of(*group_)), "wait");
    std::vector<std::int32_t> values(kRenewRanks, 0);
    for (const int rank : absent) values[static_cast<std::size_t>(rank)] = 1;
    TensorImage expected(dense(DType::kInt32, 1, kRenewRanks));
    expected.set_rows(values.data());
    out.expect_equal(context_, expected, prepared.spec.name + ": mask");
  }

  /// Calls for large batches, which all ranks make.
  void check_others(const PreparedCase& prepared) {
    const Routing routing = check_route(context_, *group_, prepared);
    if (!routing.present()) return;
    check_dispatch(context_, *group_, routing, prepared, 0);
    check_combine(context_, *group_, routing, prepared, 0);
  }

  /// Captures calls that the others do not make, as a process does that will replay a graph with them.
  void capture(const PreparedCase& prepared) {
    if (!uses_device(*group_)) return;
    const OwnedStream stream;
    CapturedGraph graph;
    const LatencyDispatchTensors dispatch(context_, *group_, prepared, 0);
    const LatencyCombineTensors combine(context_, *group_, prepared, 0);
    graph.begin(stream.get());
    const Result<Routing> routing = group_->latency_dispatch(dispatch.in, dispatch.out, dispatch.options, stream.get());
    Status status = routing.status();
    if (status.ok()) status = group_->latency_combine(*routing, combine.in, combine.out, stream.get());
    graph.end();
    context_.expect_ok(status, "capturing");
  }

  void end() {
    group_.reset();
    members_.reset();
  }

  /// Agrees with the others, and renews the group. `present`: expected ranks.
  Status renew(const std::vector<int>& present) {
    const auto silent = group_->suspend();
    if (!context_.expect_ok(silent.status(), "suspend")) return silent.status();
    return agree_and_renew(present, *silent);
  }
  /// The same in a group that is suspended, or idle.
  Status agree_and_renew(const std::vector<int>& present, const std::vector<int>& silent = {}) {
    const auto view = members_->next_view({.reason = {}, .silent_ids = silent, .leave = false});
    if (!context_.expect_ok(view.status(), "next_view")) return view.status();
    context_.expect(view->ids == present, fmt::format("members are [{}]", fmt::join(view->ids, ", ")));
    const auto bootstrap = members_->bootstrap();
    if (!context_.expect_ok(bootstrap.status(), "bootstrap")) return bootstrap.status();
    const std::vector<std::int64_t> waited_ns = group_->wait_times_ns();
    Status status = group_->renew(*bootstrap, view->ids);
    for (std::size_t rank = 0; rank < waited_ns.size(); ++rank) {
      context_.expect(group_->wait_times_ns()[rank] >= waited_ns[rank], "waits before the renewal still count");
    }
    return status;
  }

  /// Takes the place of this rank after `end`.
  Status come_back(const std::string& contact) {
    JoinOptions join;
    join.contacts = {contact};
    join.secret = "of the test";
    join.id = context_.rank();
    auto members = Membership::join(join);
    if (!context_.expect_ok(members.status(), "Membership::join")) return members.status();
    members_ = std::move(*members);
    const auto bootstrap = members_->bootstrap();
    if (!context_.expect_ok(bootstrap.status(), "bootstrap")) return bootstrap.status();
    GroupOptions options = options_;
    options.num_ranks = kRenewRanks;
    options.present_ranks = members_->view().ids;
    auto group = Group::create(*bootstrap, options);
    if (group.ok()) group_ = std::move(*group);
    return group.status();
  }

  /// Returns when a process asks this one to be let in.
  void await_joiner() {
    const auto end = std::chrono::steady_clock::now() + std::chrono::nanoseconds(kRenewPatienceNs);
    while (members_->num_waiting() == 0 && std::chrono::steady_clock::now() < end) std::this_thread::yield();
    context_.expect(members_->num_waiting() == 1, "a process waits to join");
  }

 private:
  RankContext& context_;
  GroupOptions options_;
  std::shared_ptr<Membership> members_;
  std::shared_ptr<Group> group_;
};

}  // namespace ferry::test

#endif  // FERRY_TESTS_RENEWABLE_RANK_HPP
