#include <fmt/format.h>
#include <gtest/gtest.h>

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

/// Groups that are renewed after ranks were lost: all survivors mask the same ranks, and results are bit for bit the
/// oracle's for those that are present.

namespace ferry::test {
namespace {

constexpr int kNumRanks = 4;
constexpr std::int64_t kPatienceNs = 60 * kNsPerSecond;
/// Longer than a rank computes between two calls on a busy machine.
constexpr std::int64_t kMaskTimeoutNs = 4 * kNsPerSecond;
constexpr const char* kSecret = "of the test";

/// Waits, without group and members, until every rank has arrived; gives the text of `from` to all.
std::string meet(RankContext& context, std::string_view text = {}, std::size_t from = 0) {
  const auto all = context.bootstrap()->all_gather(std::as_bytes(std::span(text)), kPatienceNs);
  if (!context.expect_ok(all.status(), "meet")) return {};
  return {reinterpret_cast<const char*>((*all)[from].data()), (*all)[from].size()};
}

class LatencyRenew : public LatencyConformance {
 protected:
  /// A case for each set of absent ranks, in their order.
  std::vector<PreparedCase> cases(const std::vector<std::vector<int>>& absent) {
    std::vector<ExchangeCase> specs;
    for (const std::vector<int>& ranks : absent) {
      ExchangeCase spec = small_latency_case(kNumRanks, 83);
      spec.name = fmt::format("without ranks [{}]", fmt::join(ranks, ", "));
      spec.world.num_topk = 4;
      spec.world.counts = TokenCounts::kEven;
      spec.masked = ranks;
      specs.push_back(spec);
    }
    return prepare_latency(specs);
  }

  GroupOptions options_of(const RankContext& context) const {
    GroupOptions options = group_options(context);
    options.mask_lost_ranks = is_one_node();
    options.mask_timeout_ns = kMaskTimeoutNs;
    return options;
  }

  bool is_one_node() const { return ranks_per_node(kNumRanks) == kNumRanks; }
  /// Whether a new rank of this process can take the place of a lost one.
  bool replaces_threads() const { return !on_gpus() || GetParam().kind == RankKind::kProcesses; }
};

/// A rank of a test, which may be lost and come back.
class Rank {
 public:
  Rank(RankContext& context, const GroupOptions& options) : context_(context), options_(options) {
    MembershipOptions membership{.host = "127.0.0.1", .secret = kSecret, .timeout_ns = kPatienceNs, .interrupted = {}};
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
    TestTensor out(context_, *group_, MemoryKind::kPlain, TensorImage(dense(DType::kInt32, 1, kNumRanks)));
    TensorView view = out.view();
    view.num_dims = 1;
    view.shape[0] = kNumRanks;
    view.strides[0] = 1;
    context_.expect_ok(group_->latency_query_mask(view, stream_of(*group_)), "latency_query_mask");
    context_.expect_ok(group_->wait(stream_of(*group_)), "wait");
    std::vector<std::int32_t> values(kNumRanks, 0);
    for (const int rank : absent) values[static_cast<std::size_t>(rank)] = 1;
    TensorImage expected(dense(DType::kInt32, 1, kNumRanks));
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
    join.secret = kSecret;
    join.id = context_.rank();
    auto members = Membership::join(join);
    if (!context_.expect_ok(members.status(), "Membership::join")) return members.status();
    members_ = std::move(*members);
    const auto bootstrap = members_->bootstrap();
    if (!context_.expect_ok(bootstrap.status(), "bootstrap")) return bootstrap.status();
    GroupOptions options = options_;
    options.num_ranks = kNumRanks;
    options.present_ranks = members_->view().ids;
    auto group = Group::create(*bootstrap, options);
    if (group.ok()) group_ = std::move(*group);
    return group.status();
  }

  /// Returns when a process asks this one to be let in.
  void await_joiner() {
    const auto end = std::chrono::steady_clock::now() + std::chrono::nanoseconds(kPatienceNs);
    while (members_->num_waiting() == 0 && std::chrono::steady_clock::now() < end) std::this_thread::yield();
    context_.expect(members_->num_waiting() == 1, "a process waits to join");
  }

 private:
  RankContext& context_;
  GroupOptions options_;
  std::shared_ptr<Membership> members_;
  std::shared_ptr<Group> group_;
};

/// A rank ends between calls. The others call on without it, agree, and renew the group; then it comes back. Twice.
TEST_P(LatencyRenew, GoesOnWithoutARankAndWithTheOneThatTakesItsPlace) {
  constexpr int kVictim = 2;
  const std::vector<PreparedCase> prepared = cases({{}, {kVictim}});
  run_on_ranks(kNumRanks, [&](RankContext& context) {
    if (!is_one_node()) return;
    Rank rank(context, options_of(context));
    if (!rank.is_whole()) return;
    const bool is_victim = context.rank() == kVictim;
    for (int round = 0; round < 2; ++round) {
      rank.check(prepared[0], {});
      meet(context);
      if (is_victim) {
        rank.end();
      } else {
        // Each masks it by itself.
        check_latency_case(context, rank.group(), prepared[1], Halves::kTogether);
      }
      // A rank that is suspended before the others have its rows is masked by them too.
      meet(context);
      if (!is_victim) {
        if (!context.expect_ok(rank.renew({0, 1, 3}), "renew without it")) return;
        rank.check(prepared[1], {kVictim});
      }
      const std::string contact = meet(context, is_victim ? "" : rank.members().address());
      if (context.rank() == 0) rank.await_joiner();
      const Status status = is_victim ? rank.come_back(contact) : rank.renew({0, 1, 2, 3});
      if (!replaces_threads()) {
        context.expect_code(status, ErrorCode::kUnsupported, "a rank that is a thread of this process");
        context.expect(status.message().find("since it is a thread of this process") != std::string_view::npos,
                       status.to_string());
        if (is_victim) {
          rank.end();
        } else if (context.expect_ok(rank.agree_and_renew({0, 1, 3}), "renew again without it")) {
          rank.check(prepared[1], {kVictim});
        }
        meet(context);
        return;
      }
      if (!context.expect_ok(status, "renew with it")) return;
      if (is_victim) rank.capture(prepared[0]);
      rank.check_others(prepared[0]);
    }
    rank.check(prepared[0], {});
    context.expect_ok(rank.group().destroy(), "destroy");
  });
}

/// Two ranks are lost, and come back one after the other: the first while the other is absent.
TEST_P(LatencyRenew, TakesLostRanksBackOneByOne) {
  const std::vector<PreparedCase> prepared = cases({{}, {0, 3}, {0}});
  run_on_ranks(kNumRanks, [&](RankContext& context) {
    if (!is_one_node() || !replaces_threads()) return;
    Rank rank(context, options_of(context));
    if (!rank.is_whole()) return;
    const bool is_lost = context.rank() == 0 || context.rank() == 3;
    rank.check(prepared[0], {});
    meet(context);
    if (is_lost) rank.end();
    if (!is_lost && !context.expect_ok(rank.renew({1, 2}), "renew without both")) return;
    if (!is_lost) rank.check(prepared[1], {0, 3});
    for (const int back : {3, 0}) {
      const std::string contact = meet(context, context.rank() == 1 ? rank.members().address() : "", 1);
      if (context.rank() == 1) rank.await_joiner();
      const std::vector<int> present = back == 3 ? std::vector<int>{1, 2, 3} : std::vector<int>{0, 1, 2, 3};
      if (context.rank() == back) {
        if (!context.expect_ok(rank.come_back(contact), "come back")) return;
      } else if (rank.is_whole()) {
        if (!context.expect_ok(rank.renew(present), "renew with one more")) return;
      }
      if (rank.is_whole())
        rank.check(prepared[back == 3 ? 2 : 0], back == 3 ? std::vector<int>{0} : std::vector<int>{});
    }
    meet(context);
  });
}

/// A group that does not mask breaks when a rank is lost, and is whole again when a process has its place.
TEST_P(LatencyRenew, AGroupThatDoesNotMaskWaitsForTheOneThatTakesThePlace) {
  constexpr int kVictim = 1;
  const std::vector<PreparedCase> prepared = cases({{}});
  run_on_ranks(kNumRanks, [&](RankContext& context) {
    if (!is_one_node() || !replaces_threads()) return;
    GroupOptions options = options_of(context);
    options.mask_lost_ranks = false;
    Rank rank(context, options);
    if (!rank.is_whole()) return;
    const bool is_victim = context.rank() == kVictim;
    rank.check_exchanges(prepared[0]);
    meet(context);
    if (is_victim) {
      rank.end();
    } else {
      LatencyDispatchTensors tensors(context, rank.group(), prepared[0], 0);
      context.expect_code(call_dispatch(rank.group(), tensors), ErrorCode::kPeerLost, "a call that misses a rank");
      const Status refused = rank.renew({0, 2, 3});
      context.expect_code(refused, ErrorCode::kInvalidArgument, "renew without it");
      context.expect(refused.message().find("takes mask_lost_ranks") != std::string_view::npos, refused.to_string());
    }
    const std::string contact = meet(context, is_victim ? "" : rank.members().address());
    if (context.rank() == 0) rank.await_joiner();
    const Status status = is_victim ? rank.come_back(contact) : rank.agree_and_renew({0, 1, 2, 3});
    if (!context.expect_ok(status, "renew with it")) return;
    rank.check_exchanges(prepared[0]);
    rank.check_others(prepared[0]);
    context.expect_ok(rank.group().destroy(), "destroy");
  });
}

/// A suspended rank is masked at once by ranks whose deadline is far.
TEST_P(LatencyRenew, NoRankWaitsForASuspendedOne) {
  const std::vector<PreparedCase> prepared = cases({{}, {1}});
  run_on_ranks(kNumRanks, [&](RankContext& context) {
    if (!is_one_node()) return;
    GroupOptions options = options_of(context);
    options.mask_timeout_ns = 10 * kPatienceNs;
    Rank rank(context, options);
    if (!rank.is_whole()) return;
    rank.check(prepared[0], {});
    if (context.rank() == 1) {
      const auto silent = rank.group().suspend();
      context.expect(silent.ok() && silent->empty(), "no rank is silent");
      const Status refused = rank.group().latency_clear_mask();
      context.expect_code(refused, ErrorCode::kInvalidArgument, "a call of a suspended group");
      context.expect(refused.message().find("this group is suspended; call renew") != std::string_view::npos,
                     refused.to_string());
    } else {
      rank.check(prepared[1], {1});
    }
    if (!context.expect_ok(rank.agree_and_renew({0, 1, 2, 3}), "renew")) return;
    rank.check(prepared[0], {});
    context.expect_ok(rank.group().destroy(), "destroy");
  });
}

TEST_P(LatencyRenew, WrongArguments) {
  run_on_ranks(kNumRanks, [&](RankContext& context) {
    Rank rank(context, options_of(context));
    if (!rank.is_whole()) return;
    const auto expect_refusal = [&](const Status& status, ErrorCode code, std::string_view words) {
      context.expect_code(status, code, words);
      context.expect(status.message().find(words) != std::string_view::npos, status.to_string());
    };
    if (!is_one_node()) {
      expect_refusal(rank.group().suspend().status(), ErrorCode::kUnsupported, "suspend: the group has 2 nodes");
      expect_refusal(rank.group().renew(context.bootstrap(), {0, 1, 2, 3}), ErrorCode::kUnsupported,
                     "renew: the group has 2 nodes");
      return;
    }
    expect_refusal(rank.group().renew(nullptr, {0, 1, 2, 3}), ErrorCode::kInvalidArgument, "the bootstrap is null");
    expect_refusal(rank.group().renew(context.bootstrap(), {1, 0, 2, 3}), ErrorCode::kInvalidArgument,
                   "present_ranks is [1, 0, 2, 3]");
    expect_refusal(rank.group().renew(context.bootstrap(), {0, 1, 2}), ErrorCode::kInvalidArgument,
                   "expected the 4 ranks of the bootstrap");
    expect_refusal(rank.group().renew(context.bootstrap(), {0, 1, 2, 4}), ErrorCode::kInvalidArgument,
                   "below num_ranks, which is 4");
    GroupOptions options = options_of(context);
    options.mask_lost_ranks = false;
    options.ranks_per_node = 0;
    options.num_ranks = 5;
    options.present_ranks = {0, 1, 2, 4};
    expect_refusal(Group::create(context.bootstrap(), options).status(), ErrorCode::kInvalidArgument,
                   "takes mask_lost_ranks");
    options.mask_lost_ranks = true;
    options.num_ranks = context.rank() == 0 ? 4 : 5;
    options.present_ranks = {0, 1, 2, 3};
    expect_refusal(Group::create(context.bootstrap(), options).status(), ErrorCode::kInvalidArgument,
                   "rank 0 has num_ranks=4, rank 1 has num_ranks=5");
    options.num_ranks = 5;
    options.present_ranks = {};
    expect_refusal(Group::create(context.bootstrap(), options).status(), ErrorCode::kInvalidArgument,
                   "num_ranks is 5 and the bootstrap has 4 ranks");
    context.expect_ok(rank.group().renew(context.bootstrap(), {0, 1, 2, 3}), "renew");
  });
}

INSTANTIATE_TEST_SUITE_P(Backends, LatencyRenew, testing::ValuesIn(whole_configs()), config_name);

}  // namespace
}  // namespace ferry::test
