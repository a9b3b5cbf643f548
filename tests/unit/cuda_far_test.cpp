/// Host code of latency mode between nodes: the way from a kernel's post to the network. Needs no GPU.

#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <vector>

#include "cuda/far/source.hpp"
#include "cuda/latency/far_message.hpp"
#include "cuda/latency/params.hpp"
#include "plan/to_size.hpp"

namespace ferry::cuda {
namespace {

using one_sided::NetworkRequest;
using Kind = NetworkRequest::Kind;

/// A rank of four in nodes of two, whose kernels post. In GPU memory: inboxes are there.
class FarPostsOf : public testing::Test {
 protected:
  static constexpr std::uint64_t kNumber = 5;

  explicit FarPostsOf(int rank, std::int64_t hold_grants_ns = 0, bool in_gpu = false)
      : rank_(rank),
        layout_(FarLayout::of({.num_ranks = 4,
                               .ranks_per_node = 2,
                               .rank = rank,
                               .front_bytes = 1024,
                               .rows_bytes = 1024,
                               .returns_bytes = 1024,
                               .weights_bytes = 1024,
                               .in_gpu = in_gpu})),
        posts_(to_size(kFarMessages * layout_.num_ranks)),
        staging_(FarSource::num_staging_bytes(layout_) / sizeof(std::uint64_t)),
        done_(to_size(kFarKinds) * kMaxCallBlocks, 0),
        left_(posts_.size(), 0),
        granted_(to_size(kFarKinds * kFarGrantSlots), 0),
        message_(2048, std::byte{7}),
        source_({.layout = layout_,
                 .rank = rank,
                 .posts = posts_.data(),
                 .staging = reinterpret_cast<std::byte*>(staging_.data()),
                 .done = done_.data(),
                 .left = left_.data(),
                 .granted = granted_.data(),
                 .copy_record =
                     [](std::int64_t number, CallRecord* record) {
                       *record = {};
                       record->num_fields = static_cast<std::int32_t>(number);
                       return number != 0;
                     },
                 .hold_grants_ns = hold_grants_ns}) {
    take_all();  // what connects
  }

  FarPost& post_at(int kind, int rank) { return posts_[to_size(kind * layout_.num_ranks + rank)]; }
  /// As the first block of a kernel does.
  void post(int kind, int rank, std::uint64_t number, std::uint64_t rows_bytes, std::size_t front_to, int set = 1) {
    FarPost& post = post_at(kind, rank);
    post.front = reinterpret_cast<std::uintptr_t>(message_.data());
    post.front_to = front_to;
    post.front_shape = FrontShape{kFarHeaderBytes, set, announced_ || !layout_.in_gpu, num_blocks_}.packed();
    post.rows = reinterpret_cast<std::uintptr_t>(message_.data() + kFarHeaderBytes);
    post.rows_to = offset(layout_.returns_at(1));
    post.rows_bytes = rows_bytes;
    std::atomic_ref(post.number).store(number, std::memory_order_release);
  }
  /// Offset of the network for one of an inbox.
  std::size_t offset(std::int64_t of_inbox) const { return (layout_.in_gpu ? net::kGpuOffset : 0) + to_size(of_inbox); }
  std::size_t front_to(int kind = 1, int set = 1) const { return offset(layout_.header_at(kind, set, 0)); }

  /// Takes what the source has for the network.
  std::vector<NetworkRequest> take_all(int blocked = -1) {
    std::vector<NetworkRequest> taken;
    const one_sided::CanIssue can_issue = [blocked](int peer) { return peer != blocked; };
    while (const NetworkRequest* request = source_.front(can_issue)) {
      taken.push_back(*request);
      source_.taken();
    }
    return taken;
  }

  const int rank_;
  const FarLayout layout_;
  std::vector<FarPost> posts_;
  std::vector<std::uint64_t> staging_;
  std::vector<std::uint64_t> done_;
  std::vector<std::uint64_t> left_;
  std::vector<std::uint64_t> granted_;
  std::vector<std::byte> message_;
  bool announced_ = false;  ///< of the next posts
  int num_blocks_ = 0;      ///< the same
  FarSource source_;
};

class FarPosts : public FarPostsOf {
 protected:
  FarPosts() : FarPostsOf(2) {}
};

class FarPostsOfTheNext : public FarPostsOf {
 protected:
  FarPostsOfTheNext() : FarPostsOf(3) {}
};

TEST_F(FarPosts, GoToTheFirstRankFirst) {
  for (const int rank : {0, 1}) post(1, rank, kNumber, 0, front_to());
  EXPECT_EQ(take_all().front().peer, 0);
}

TEST_F(FarPostsOfTheNext, GoToAnotherRankFirst) {
  for (const int rank : {0, 1}) post(1, rank, kNumber, 0, front_to());
  EXPECT_EQ(take_all().front().peer, 1);
}

TEST_F(FarPosts, RowsArriveBeforeTheNumberAndTheMessageLeavesWhenTheNetworkHasIt) {
  post(1, 0, kNumber, 512, front_to());
  EXPECT_TRUE(source_.has_news());
  const std::vector<NetworkRequest> requests = take_all();
  EXPECT_FALSE(source_.has_news());
  ASSERT_EQ(requests.size(), 3U);
  EXPECT_EQ(requests[0].kind, Kind::kPut);
  EXPECT_EQ(requests[0].local, message_.data() + kFarHeaderBytes);
  EXPECT_EQ(requests[0].offset, to_size(layout_.returns_at(1)));
  EXPECT_EQ(requests[0].num_bytes, 512U);
  EXPECT_EQ(requests[1].kind, Kind::kPutSignal);
  EXPECT_EQ(requests[1].offset, front_to());
  EXPECT_EQ(requests[1].num_bytes, to_size(kFarHeaderBytes));
  EXPECT_EQ(requests[1].op.kind, net::AtomicOp::Kind::kSet);
  EXPECT_EQ(requests[1].op.offset, to_size(layout_.arrived_at(1, rank_)));
  EXPECT_EQ(requests[1].op.operand, kNumber);
  EXPECT_EQ(requests[2].kind, Kind::kRelease);
  for (const NetworkRequest& request : requests) EXPECT_EQ(request.peer, 0);

  const std::uint64_t& left = left_[to_size(layout_.num_ranks)];
  EXPECT_EQ(left, 0U) << "the outbox is still read";
  ASSERT_NE(requests[2].completion, nullptr);
  requests[2].completion->done(0);
  EXPECT_EQ(left, kNumber);
  EXPECT_TRUE(take_all().empty());
  EXPECT_EQ(source_.traffic(0).sent_bytes, to_size(kFarHeaderBytes + 512));
  EXPECT_EQ(source_.traffic(0).num_messages, 3U) << "two puts and their number";
  EXPECT_EQ(source_.traffic(1).sent_bytes, 0U);
}

TEST_F(FarPosts, AMessageLeavesOnceAllBlocksAreDone) {
  num_blocks_ = 3;
  std::uint64_t* const done = done_.data() + kMaxCallBlocks;  // of combines
  std::atomic_ref(done[2]).store(kNumber, std::memory_order_release);
  post(1, 0, kNumber, 0, front_to());
  for (const int block : {0, 1}) {
    EXPECT_TRUE(take_all().empty());
    EXPECT_TRUE(source_.has_news()) << "a message that is not counted yet";
    EXPECT_TRUE(source_.needs_polling());
    EXPECT_TRUE(source_.all_left()) << "a message that does not leave without its blocks";
    std::atomic_ref(done[block]).store(kNumber, std::memory_order_release);
  }
  EXPECT_FALSE(source_.all_left());
  EXPECT_EQ(take_all().size(), 2U) << "the message, its end";
  EXPECT_FALSE(source_.has_news());

  post(1, 1, kNumber, 0, front_to());
  EXPECT_EQ(take_all().size(), 2U) << "of the same call";
  post(1, 0, kNumber + 1, 0, front_to());
  EXPECT_TRUE(take_all().empty()) << "words of the call before";
}

class FarPostsInGpuMemory : public FarPostsOf {
 protected:
  FarPostsInGpuMemory() : FarPostsOf(2, 0, true) {}
};

TEST_F(FarPostsInGpuMemory, WordsAreOnePutWithoutANumber) {
  post(1, 0, kNumber, 0, front_to());
  const std::vector<NetworkRequest> requests = take_all();
  ASSERT_EQ(requests.size(), 3U);
  EXPECT_EQ(requests[0].kind, Kind::kPut);
  EXPECT_EQ(requests[0].offset, front_to());
  EXPECT_EQ(requests[1].kind, Kind::kShow) << "on systems where writes must be read back";
  EXPECT_EQ(requests[2].kind, Kind::kRelease);
}

TEST_F(FarPostsInGpuMemory, ARecordIsThereBeforeItsMessage) {
  post_at(1, 0).record_number = 77;
  post(1, 0, kNumber, 0, front_to());
  const std::vector<NetworkRequest> requests = take_all();
  ASSERT_EQ(requests.size(), 5U);
  EXPECT_EQ(requests[0].offset, offset(layout_.record_at(1, 1, 0)));
  EXPECT_EQ(requests[1].kind, Kind::kOrder);
  EXPECT_EQ(requests[2].offset, front_to());
}

TEST_F(FarPostsInGpuMemory, TheNumberIsAPutBehindTheOthers) {
  announced_ = true;
  post(1, 0, kNumber, 512, front_to());
  const std::vector<NetworkRequest> requests = take_all();
  ASSERT_EQ(requests.size(), 6U);
  EXPECT_EQ(requests[0].kind, Kind::kPut);
  EXPECT_EQ(requests[0].offset, offset(layout_.returns_at(1)));
  EXPECT_EQ(requests[1].kind, Kind::kPut);
  EXPECT_EQ(requests[1].offset, front_to());
  EXPECT_EQ(requests[2].kind, Kind::kOrder);
  EXPECT_EQ(requests[3].kind, Kind::kPut);
  EXPECT_EQ(requests[3].offset, offset(layout_.arrived_at(1, rank_)));
  ASSERT_EQ(requests[3].num_bytes, sizeof kNumber);
  std::uint64_t number = 0;
  std::memcpy(&number, requests[3].local, sizeof number);
  EXPECT_EQ(number, kNumber);
  EXPECT_EQ(requests[4].kind, Kind::kShow);
  EXPECT_EQ(requests[5].kind, Kind::kRelease);
}

TEST_F(FarPostsInGpuMemory, GrantsArePutsInOrder) {
  const std::uint64_t word = std::uint64_t{4} << 32 | 2;
  std::atomic_ref(granted_[kFarGrantSlots + 4 % kFarGrantSlots]).store(word, std::memory_order_release);
  const std::vector<NetworkRequest> requests = take_all();
  ASSERT_EQ(requests.size(), 6U);
  for (const std::size_t first : {std::size_t{0}, std::size_t{3}}) {
    EXPECT_EQ(requests[first].kind, Kind::kOrder) << "a grant that is late must not replace the next one of its slot";
    EXPECT_EQ(requests[first + 1].kind, Kind::kPut);
    EXPECT_EQ(requests[first + 1].offset, offset(layout_.grant_at(1, rank_, 4)));
    EXPECT_EQ(*reinterpret_cast<const std::uint64_t*>(requests[first + 1].local), word);
  }
}

TEST_F(FarPosts, PutsTheRecordOfItsCallUnlessTheSetHasIt) {
  post_at(1, 0).record_number = 77;
  post(1, 0, kNumber, 0, front_to());
  std::vector<NetworkRequest> requests = take_all();
  ASSERT_EQ(requests.size(), 3U) << "the record, the message, its end";
  EXPECT_EQ(requests[0].kind, Kind::kPut);
  EXPECT_EQ(requests[0].offset, to_size(layout_.record_at(1, 1, 0)));
  FoundRecord record;
  ASSERT_EQ(requests[0].num_bytes, sizeof record);
  std::memcpy(&record, requests[0].local, sizeof record);
  EXPECT_EQ(record.present, 1U);
  EXPECT_EQ(record.record.num_fields, 77);

  post(1, 0, kNumber + 1, 0, front_to());
  EXPECT_EQ(take_all().size(), 2U) << "an equal call";
  post(1, 0, kNumber + 2, 0, front_to(1, 2), 2);
  EXPECT_EQ(take_all().size(), 3U) << "an equal call in another set";
  post_at(1, 0).record_number = 78;
  post(1, 0, kNumber + 3, 0, front_to());
  EXPECT_EQ(take_all().size(), 3U) << "another call";
  post_at(1, 0).record_number = 0;
  post(1, 0, kNumber + 4, 0, front_to());
  requests = take_all();
  ASSERT_EQ(requests.size(), 3U) << "a call whose record is gone";
  std::memcpy(&record, requests[0].local, sizeof record);
  EXPECT_EQ(record.present, 0U);
}

TEST_F(FarPosts, WeightsGoBeforeTheirCombineAndHaveNoRecord) {
  post(1, 0, kNumber, 0, front_to());
  post(kFarWeights, 0, kNumber, 0, to_size(layout_.weights_at(1, 0)));
  const one_sided::CanIssue can_issue = [](int /*peer*/) { return true; };
  const NetworkRequest first = *source_.front(can_issue);
  EXPECT_EQ(first.kind, Kind::kPutSignal);
  EXPECT_EQ(first.offset, to_size(layout_.weights_at(1, 0)));
  EXPECT_EQ(first.op.offset, to_size(layout_.arrived_at(kFarWeights, rank_)));
  source_.taken();
  EXPECT_EQ(take_all().size(), 3U) << "the end of both, and the combine";
}

TEST_F(FarPosts, ABlockedRankHoldsUpNoOther) {
  post(1, 0, kNumber, 512, front_to());
  post(1, 1, kNumber, 512, front_to());
  for (const NetworkRequest& request : take_all(0)) EXPECT_EQ(request.peer, 1);
  EXPECT_EQ(take_all().size(), 3U) << "those to rank 0, once it takes them";
}

TEST_F(FarPosts, ALostRankKeepsNoKernelWaiting) {
  post(0, 1, kNumber, 512, front_to());
  const std::vector<NetworkRequest> requests = take_all();
  requests.back().completion->lost(1);
  EXPECT_EQ(left_[1], kNumber);
}

TEST_F(FarPosts, NothingIsSentOutsideOfAnInbox) {
  post(1, 0, kNumber, 512, to_size(layout_.inbox_bytes));
  post(1, 1, kNumber, to_size(layout_.inbox_bytes), front_to());
  EXPECT_TRUE(take_all().empty());
}

class FarGrants : public FarPostsOf {
 protected:
  static constexpr std::uint64_t kWord = std::uint64_t{4} << 32 | 2;

  explicit FarGrants(std::int64_t hold_ns = 0) : FarPostsOf(2, hold_ns) {}

  void grant() {
    std::atomic_ref(granted_[kFarGrantSlots + 4 % kFarGrantSlots]).store(kWord, std::memory_order_release);
  }
  void expect_grant(const NetworkRequest& request, int rank) const {
    EXPECT_EQ(request.peer, rank);
    EXPECT_EQ(request.op.offset, to_size(layout_.grant_at(1, rank_, 4)));
    EXPECT_EQ(request.op.operand, kWord);
  }
};

class HeldFarGrants : public FarGrants {
 protected:
  HeldFarGrants() : FarGrants(std::int64_t{3600} * kNsPerSecond) {}
};

TEST_F(HeldFarGrants, WaitForAHeaderThatCarriesThem) {
  EXPECT_FALSE(source_.needs_polling());
  grant();
  EXPECT_TRUE(take_all().empty());
  EXPECT_TRUE(source_.needs_polling()) << "no kernel wakes the driver for them";
}

TEST_F(FarGrants, GoToAllRanksOfOtherNodes) {
  grant();
  const std::vector<NetworkRequest> requests = take_all();
  ASSERT_EQ(requests.size(), 2U);
  for (int rank = 0; rank < 2; ++rank) expect_grant(requests[to_size(rank)], rank);
}

TEST_F(FarGrants, AreNotSentWhereAHeaderHasCarriedThem) {
  post_at(0, 0).granted[1][4 % kFarGrantSlots] = kWord;
  grant();
  post(0, 0, kNumber, 0, front_to(0));
  const std::vector<NetworkRequest> requests = take_all();
  ASSERT_EQ(requests.size(), 3U) << "a message to rank 0 and its release, and a grant";
  EXPECT_EQ(requests[0].kind, Kind::kPutSignal);
  EXPECT_EQ(requests[1].kind, Kind::kRelease);
  expect_grant(requests[2], 1);
}

TEST_F(FarGrants, AreSentWhereHeadersHaveCarriedEarlierOnes) {
  for (const int rank : {0, 1}) post_at(0, rank).granted[1][4 % kFarGrantSlots] = std::uint64_t{0} << 32 | 1;
  grant();
  for (const int rank : {0, 1}) post(0, rank, kNumber, 0, front_to(0));
  std::vector<NetworkRequest> requests = take_all();
  std::erase_if(requests, [](const NetworkRequest& request) { return request.kind != Kind::kAtomic; });
  ASSERT_EQ(requests.size(), 2U);
  for (int rank = 0; rank < 2; ++rank) expect_grant(requests[to_size(rank)], rank);
}

TEST_F(FarGrants, OfTheBeginOfAnEraAreAlwaysSent) {
  const std::uint64_t word = kFarEra << 32 | 2;
  post_at(0, 0).granted[1][0] = word;
  std::atomic_ref(granted_[kFarGrantSlots]).store(word, std::memory_order_release);
  post(0, 0, kNumber, 0, front_to(0));
  std::vector<NetworkRequest> requests = take_all();
  std::erase_if(requests, [](const NetworkRequest& request) { return request.kind != Kind::kAtomic; });
  EXPECT_EQ(requests.size(), 2U);
}

TEST(FarGrantWords, AreComparedAcrossTheEndOfTheirNumbers) {
  const auto word = [](std::uint32_t number) { return std::uint64_t{number} << 32 | 1; };
  EXPECT_TRUE(is_later_grant(word(5), word(1)));
  EXPECT_FALSE(is_later_grant(word(5), word(5)));
  EXPECT_FALSE(is_later_grant(word(1), word(5)));
  EXPECT_TRUE(is_later_grant(word(2), word(0xffff'fffe)));
  EXPECT_FALSE(is_later_grant(word(0xffff'fffe), word(2)));
}

}  // namespace
}  // namespace ferry::cuda
