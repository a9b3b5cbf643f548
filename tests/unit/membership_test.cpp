/// Views of a Membership whose members are threads: members that leave, end, join, complete steps, or ask for what
/// cannot be.

#include "ferry/membership.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <barrier>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "ferry/group.hpp"
#include "support/rank_runner.hpp"
#include "support/sanitizers.hpp"

namespace ferry {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

/// A wait that is to end by what other members do.
constexpr std::int64_t kLongNs = 60 * kNsPerSecond;
/// A wait that is to end by its time.
constexpr std::int64_t kShortNs = (test::kSanitized ? 4 : 1) * kNsPerSecond / 2;

MembershipOptions options_of(std::int64_t timeout_ns = kLongNs) {
  return {.host = "127.0.0.1", .secret = "of the test", .timeout_ns = timeout_ns, .interrupted = {}};
}

JoinOptions joining(const std::string& contact, int id = -1) {
  return {
      .contacts = {contact}, .secret = "of the test", .id = id, .host = {}, .timeout_ns = kLongNs, .interrupted = {}};
}

using Members = std::vector<std::shared_ptr<Membership>>;

Members create_members(int num_ranks, const MembershipOptions& options = options_of()) {
  const auto bootstraps = create_in_process_bootstraps(num_ranks).value();
  Members members(bootstraps.size());
  std::vector<std::jthread> threads;
  for (std::size_t rank = 0; rank < members.size(); ++rank) {
    threads.emplace_back([&, rank] { members[rank] = Membership::create(bootstraps[rank], options).value(); });
  }
  return members;
}

using Views = std::vector<Result<MembershipView>>;

/// Every member asks for the next view; `options_for` gives each its options.
Views next_views(const Members& members, const std::function<NextViewOptions(std::size_t)>& options_for = {}) {
  Views views(members.size(), Result<MembershipView>(Status(ErrorCode::kInternal, "not asked")));
  std::vector<std::jthread> threads;
  for (std::size_t i = 0; i < members.size(); ++i) {
    threads.emplace_back(
        [&, i] { views[i] = members[i]->next_view(options_for ? options_for(i) : NextViewOptions{}); });
  }
  threads.clear();
  return views;
}

/// Forms a group of the members' view.
void expect_group(const Members& members) {
  std::vector<std::jthread> threads;
  std::atomic<int> num_ok{0};
  for (const auto& member : members) {
    threads.emplace_back([&] {
      Result<std::shared_ptr<Bootstrap>> bootstrap = member->bootstrap();
      ASSERT_TRUE(bootstrap.ok()) << bootstrap.status().to_string();
      Result<std::shared_ptr<Group>> group = Group::create(*bootstrap, {.backend = "cpu"});
      ASSERT_TRUE(group.ok()) << group.status().to_string();
      EXPECT_EQ((*group)->rank(), member->view().rank);
      EXPECT_EQ((*group)->num_ranks(), member->view().num_ranks());
      EXPECT_TRUE((*group)->destroy().ok());
      ++num_ok;
    });
  }
  threads.clear();
  EXPECT_EQ(num_ok.load(), static_cast<int>(members.size()));
}

TEST(Membership, BeginsWithTheRanksOfItsBootstrap) {
  const Members members = create_members(3);
  for (int rank = 0; rank < 3; ++rank) {
    const MembershipView& view = members[static_cast<std::size_t>(rank)]->view();
    EXPECT_EQ(view.epoch, 0U);
    EXPECT_EQ(view.rank, rank);
    EXPECT_THAT(view.ids, ElementsAre(0, 1, 2));
  }
  expect_group(members);
}

TEST(Membership, GoesOnWithoutAMemberThatHasEnded) {
  for (const std::size_t lost : {0U, 1U, 3U}) {
    Members members = create_members(4);
    members.erase(members.begin() + static_cast<std::ptrdiff_t>(lost));
    const Views views = next_views(members);
    for (std::size_t i = 0; i < views.size(); ++i) {
      ASSERT_TRUE(views[i].ok()) << views[i].status().to_string();
      const MembershipView& view = *views[i];
      EXPECT_EQ(view.epoch, 1U);
      EXPECT_EQ(view.rank, static_cast<int>(i));
      EXPECT_EQ(view.num_ranks(), 3);
      EXPECT_THAT(view.lost_ids, ElementsAre(static_cast<int>(lost)));
      EXPECT_EQ(view.kept_ranks, view.ids) << "in the first view ranks are ids";
      EXPECT_THAT(view.joined_ids, IsEmpty());
    }
    expect_group(members);
  }
}

TEST(Membership, AgreesOnTheStepThatAllHaveCompleted) {
  Members members = create_members(3);
  for (std::size_t i = 0; i < members.size(); ++i) members[i]->complete_steps(i == 1 ? 41 : 42);
  for (const auto& view : next_views(members)) EXPECT_EQ(view->num_complete_steps, 41U);
  // No member has completed more since.
  for (const auto& view : next_views(members)) EXPECT_EQ(view->num_complete_steps, 41U);
}

TEST(Membership, LetsMembersLeave) {
  Members members = create_members(4);
  // The coordinator, and another one.
  const Views views =
      next_views(members, [](std::size_t i) { return NextViewOptions{.reason = {}, .leave = i == 0 || i == 2}; });
  for (std::size_t i = 0; i < views.size(); ++i) {
    ASSERT_TRUE(views[i].ok()) << views[i].status().to_string();
    EXPECT_THAT(views[i]->ids, ElementsAre(1, 3));
    EXPECT_EQ(views[i]->rank, std::vector<int>({-1, 0, -1, 1})[i]);
  }
  expect_group({members[1], members[3]});
  EXPECT_THAT(std::string(members[0]->next_view().status().message()), HasSubstr("has left"));
}

TEST(Membership, LetsAProcessTakeALostOnesPlace) {
  Members members = create_members(3);
  members.erase(members.begin() + 1);
  for (const auto& view : next_views(members)) ASSERT_TRUE(view.ok()) << view.status().to_string();
  const std::string contact = members[1]->address();
  members.insert(members.begin() + 1, nullptr);
  {
    const std::jthread joiner([&] { members[1] = Membership::join(joining(contact, 1)).value(); });
    while (members[2]->num_waiting() == 0) std::this_thread::yield();
    EXPECT_EQ(members[0]->num_waiting(), 0) << "it has asked another member";
    for (const auto& view : next_views({members[0], members[2]})) {
      ASSERT_TRUE(view.ok()) << view.status().to_string();
      EXPECT_THAT(view->ids, ElementsAre(0, 1, 2));
      EXPECT_THAT(view->joined_ids, ElementsAre(1));
      EXPECT_THAT(view->kept_ranks, ElementsAre(0, 1)) << "their ranks in the view of two";
    }
  }
  EXPECT_EQ(members[1]->view().rank, 1);
  EXPECT_EQ(members[1]->view().epoch, 2U);
  expect_group(members);
  for (const auto& view : next_views(members)) EXPECT_THAT(view->ids, ElementsAre(0, 1, 2));
}

TEST(Membership, LetsSeveralProcessesInAtOnce) {
  Members members = create_members(2);
  const std::string first = members[0]->address();
  const std::string second = members[1]->address();
  members.resize(4);
  {
    const std::jthread a([&] { members[2] = Membership::join(joining(first)).value(); });
    const std::jthread b([&] { members[3] = Membership::join(joining(second)).value(); });
    while (members[0]->num_waiting() == 0 || members[1]->num_waiting() == 0) std::this_thread::yield();
    for (const auto& view : next_views({members[0], members[1]})) {
      ASSERT_TRUE(view.ok()) << view.status().to_string();
      EXPECT_THAT(view->ids, ElementsAre(0, 1, 2, 3));
    }
  }
  expect_group(members);
}

TEST(Membership, KeepsTheNumberOfALivingMember) {
  Members members = create_members(2);
  JoinOptions options = joining(members[0]->address(), 1);
  options.admission_timeout_ns = kShortNs;
  Result<std::shared_ptr<Membership>> joined = Status();
  {
    const std::jthread joiner([&] { joined = Membership::join(options); });
    while (members[0]->num_waiting() == 0) std::this_thread::yield();
    for (const auto& view : next_views(members)) EXPECT_THAT(view->joined_ids, IsEmpty());
  }
  EXPECT_EQ(joined.status().code(), ErrorCode::kTimeout);
  EXPECT_THAT(std::string(joined.status().message()), HasSubstr("a living member has that id"));
}

TEST(Membership, LeavesOutAMemberThatDoesNotCome) {
  const Members members = create_members(3, options_of(kShortNs));
  const Views views = next_views({members[0], members[2]});
  for (const auto& view : views) {
    ASSERT_TRUE(view.ok()) << view.status().to_string();
    EXPECT_THAT(view->ids, ElementsAre(0, 2));
  }
  EXPECT_EQ(members[0]->num_awaiting(), 0);
  // The others answer it when they say that they have completed a step.
  std::atomic<bool> is_done = false;
  Result<MembershipView> late = Status();
  {
    const std::jthread thread([&] {
      late = members[1]->next_view();
      is_done = true;
    });
    while (!is_done) {
      members[0]->complete_steps(1);
      members[2]->complete_steps(1);
      std::this_thread::yield();
    }
  }
  EXPECT_EQ(late.status().code(), ErrorCode::kPeerLost);
  EXPECT_EQ(late.status().peer(), 1);
  EXPECT_EQ(members[1]->view().epoch, 0U);
  EXPECT_EQ(members[1]->bootstrap().status().code(), ErrorCode::kPeerLost);
  expect_group({members[0], members[2]});
}

TEST(Membership, DoesNotWaitForAMemberThatATimeoutNames) {
  for (const int accused : {0, 2}) {
    Members members = create_members(4);
    const Status timeout(ErrorCode::kTimeout, "it did not come", accused);
    Members others = members;
    others.erase(others.begin() + accused);
    for (const auto& view : next_views(others, [&](std::size_t) { return NextViewOptions{.reason = timeout}; })) {
      ASSERT_TRUE(view.ok()) << view.status().to_string();
      EXPECT_THAT(view->lost_ids, ElementsAre(accused));
    }
  }
}

TEST(Membership, TakesAnAccusedMemberThatComes) {
  const Members members = create_members(3);
  // Each of two has waited for the other one in vain, and both have reported when rank 0 comes.
  std::vector<std::jthread> threads;
  std::vector<Result<MembershipView>> views(3, Result<MembershipView>(Status()));
  const auto ask = [&](std::size_t rank, int accused) {
    const Status timeout(ErrorCode::kTimeout, "it did not come", accused);
    threads.emplace_back([&, rank, timeout] { views[rank] = members[rank]->next_view({.reason = timeout}); });
    const int num_before = members[0]->num_awaiting();
    while (members[0]->num_awaiting() == num_before) std::this_thread::yield();
  };
  ask(1, 2);
  ask(2, 1);
  views[0] = members[0]->next_view();
  threads.clear();
  for (const auto& view : views) EXPECT_THAT(view->ids, ElementsAre(0, 1, 2));
}

TEST(Membership, OfTwoHalvesTheOneWithTheLowestIdGoesOn) {
  const Members members = create_members(2, options_of(kShortNs));
  const Result<MembershipView> without_first = members[1]->next_view();
  EXPECT_EQ(without_first.status().code(), ErrorCode::kTimeout);
  EXPECT_THAT(std::string(without_first.status().message()), HasSubstr("2 of the 2 members of view 0 are needed"));
  EXPECT_EQ(members[1]->view().epoch, 0U);
  const Result<MembershipView> without_second = members[0]->next_view();
  ASSERT_TRUE(without_second.ok()) << without_second.status().to_string();
  EXPECT_THAT(without_second->ids, ElementsAre(0));
}

TEST(Membership, GoesOnAloneWhenAllOthersHaveEnded) {
  Members members = create_members(3);
  members.erase(members.begin(), members.begin() + 2);
  const Views views = next_views(members);
  ASSERT_TRUE(views[0].ok()) << views[0].status().to_string();
  EXPECT_THAT(views[0]->ids, ElementsAre(2));
  expect_group(members);
}

TEST(Membership, BootstrapEndsWhenAMemberHasEnded) {
  for (const std::size_t lost : {0U, 2U}) {
    Members members = create_members(3);
    for (const auto& view : next_views(members)) ASSERT_TRUE(view.ok());
    members.erase(members.begin() + static_cast<std::ptrdiff_t>(lost));
    std::vector<std::jthread> threads;
    for (const auto& member : members) {
      threads.emplace_back([&] { EXPECT_EQ(member->bootstrap().status().code(), ErrorCode::kPeerLost); });
    }
    threads.clear();
    for (const auto& view : next_views(members)) EXPECT_EQ(view->num_ranks(), 2);
    expect_group(members);
  }
}

TEST(Membership, BootstrapEndsWhenAMemberAsksForTheNextView) {
  const Members members = create_members(3);
  Result<MembershipView> view = Status();
  {
    const std::jthread asking([&] { view = members[1]->next_view(); });
    EXPECT_EQ(members[0]->bootstrap().status().code(), ErrorCode::kPeerLost);
    const std::jthread second([&] { EXPECT_TRUE(members[0]->next_view().ok()); });
    EXPECT_TRUE(members[2]->next_view().ok());
  }
  EXPECT_TRUE(view.ok()) << view.status().to_string();
  expect_group(members);
}

TEST(Membership, BootstrapEndsWhenRankZeroAsksForTheNextView) {
  const Members members = create_members(3);
  Result<MembershipView> view = Status();
  {
    const std::jthread asking([&] { view = members[0]->next_view(); });
    EXPECT_EQ(members[1]->bootstrap().status().code(), ErrorCode::kPeerLost);
    const std::jthread second([&] { EXPECT_TRUE(members[1]->next_view().ok()); });
    EXPECT_TRUE(members[2]->next_view().ok());
  }
  EXPECT_TRUE(view.ok()) << view.status().to_string();
  expect_group(members);
}

TEST(Membership, GoesOnAfterAnAttemptThatHadTooFew) {
  Members members = create_members(4, options_of(kShortNs));
  for (const auto& view : next_views({members[2], members[3]})) {
    EXPECT_EQ(view.status().code(), ErrorCode::kTimeout);
  }
  // The first two have ended meanwhile: all that may live are there.
  members.erase(members.begin(), members.begin() + 2);
  for (const auto& view : next_views(members)) {
    ASSERT_TRUE(view.ok()) << view.status().to_string();
    EXPECT_THAT(view->ids, ElementsAre(2, 3));
  }
  expect_group(members);
}

TEST(Membership, EndsAWaitThatItsProgramInterrupts) {
  MembershipOptions options = options_of();
  options.interrupted = [] { return true; };
  const Members members = create_members(2, options);
  const Result<MembershipView> view = members[1]->next_view();
  EXPECT_EQ(view.status().code(), ErrorCode::kPeerLost);
  EXPECT_THAT(std::string(view.status().message()), HasSubstr("told to give up"));
}

TEST(Membership, RefusesAProcessWithAnotherSecret) {
  const Members members = create_members(1);
  JoinOptions options = joining(members[0]->address());
  options.secret = "another one";
  options.admission_timeout_ns = kShortNs;
  std::atomic<bool> is_done = false;
  Result<std::shared_ptr<Membership>> joined = Status();
  {
    const std::jthread joiner([&] {
      joined = Membership::join(options);
      is_done = true;
    });
    while (!is_done) EXPECT_EQ(members[0]->num_waiting(), 0);
  }
  EXPECT_EQ(joined.status().code(), ErrorCode::kTimeout);
  EXPECT_THAT(std::string(joined.status().message()), HasSubstr("secret"));
}

TEST(Membership, RefusesOptionsThatAreOutOfRange) {
  EXPECT_EQ(Membership::create(nullptr).status().code(), ErrorCode::kInvalidArgument);
  const auto bootstraps = create_in_process_bootstraps(1).value();
  EXPECT_THAT(std::string(Membership::create(bootstraps[0], options_of(0)).status().message()),
              HasSubstr("timeout_ns is 0"));
  const auto more = create_in_process_bootstraps(1).value();
  MembershipOptions elsewhere = options_of();
  elsewhere.host = "192.0.2.1";  // for documentation (RFC 5737), so of no host
  const Status status = Membership::create(more[0], elsewhere).status();
  EXPECT_EQ(status.code(), ErrorCode::kSystem);
  EXPECT_THAT(std::string(status.message()), HasSubstr("192.0.2.1"));

  for (const char* contact : {"", "nothing", "127.0.0.1:", "127.0.0.1:0", "127.0.0.1:65536", ":80"}) {
    EXPECT_EQ(Membership::join(joining(contact)).status().code(), ErrorCode::kInvalidArgument) << contact;
  }
  JoinOptions options = joining("127.0.0.1:9");
  options.secret.clear();
  EXPECT_EQ(Membership::join(options).status().code(), ErrorCode::kInvalidArgument);
  options = joining("127.0.0.1:9", -2);
  EXPECT_EQ(Membership::join(options).status().code(), ErrorCode::kInvalidArgument);
}

}  // namespace
}  // namespace ferry
