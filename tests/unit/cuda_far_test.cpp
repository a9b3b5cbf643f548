/// Host code of latency mode between nodes: the memory of its messages, and the way from a kernel's post to the
/// network. Needs no GPU.

#include <gtest/gtest.h>

#include <atomic>
#include <cstring>
#include <vector>

#include "cuda/far/source.hpp"
#include "cuda/latency/far_message.hpp"
#include "net/ucx/message.hpp"
#include "plan/to_size.hpp"

namespace ferry::cuda {
namespace {

using one_sided::NetworkRequest;
using Kind = NetworkRequest::Kind;

/// Whether rows are in GPU memory.
class FarLayoutOf : public testing::TestWithParam<bool> {};

INSTANTIATE_TEST_SUITE_P(Rows, FarLayoutOf, testing::Bool(),
                         [](const auto& instance) { return instance.param ? "in_gpu" : "in_host"; });

TEST_P(FarLayoutOf, RanksAgreeOnPlacesThatDoNotOverlap) {
  constexpr int kNumRanks = 6;
  constexpr int kPerNode = 2;
  std::vector<FarLayout> layouts;
  for (int rank = 0; rank < kNumRanks; ++rank) {
    layouts.push_back(FarLayout::of({.num_ranks = kNumRanks,
                                     .ranks_per_node = kPerNode,
                                     .rank = rank,
                                     .front_bytes = 1280,
                                     .rows_bytes = 640,
                                     .returns_bytes = 256,
                                     .weights_bytes = 128,
                                     .rows_in_gpu = GetParam()}));
  }
  const FarLayout& first = layouts.front();
  for (int rank = 0; rank < kNumRanks; ++rank) {
    const FarLayout& own = layouts[to_size(rank)];
    EXPECT_EQ(own.inbox_bytes, first.inbox_bytes);
    EXPECT_EQ(own.gpu.size_bytes, first.gpu.size_bytes);
    EXPECT_EQ(own.num_far(), kNumRanks - kPerNode);
    for (int idx = 0; idx < own.num_far(); ++idx) {
      const int source = own.far_rank(idx);
      EXPECT_TRUE(own.is_far(source));
      EXPECT_EQ(own.far_idx(source), idx);
      EXPECT_EQ(layouts[to_size(source)].far_idx_at(rank, source), idx) << "where the source puts its message";
    }
  }
  // Every byte of the inbox belongs to one place at most.
  std::vector<bool> taken(to_size(first.inbox_bytes), false);
  const auto take = [&taken](std::int64_t offset, std::int64_t bytes) {
    for (std::int64_t at = offset; at < offset + bytes; ++at) {
      ASSERT_LT(to_size(at), taken.size());
      ASSERT_FALSE(taken[to_size(at)]);
      taken[to_size(at)] = true;
    }
  };
  for (int rank = 0; rank < kNumRanks; ++rank) take(first.arrived_at(kFarWeights, rank), 8);
  for (int kind = 0; kind < kFarKinds; ++kind) {
    for (int rank = 0; rank < kNumRanks; ++rank) {
      take(first.arrived_at(kind, rank), 8);
      take(first.rows_arrived_at(kind, rank), 8);
      for (std::uint64_t number = 1; number <= kFarGrantSlots; ++number) take(first.grant_at(kind, rank, number), 8);
    }
    for (int set = 0; set < kFarHeaderSets; ++set) {
      for (int idx = 0; idx < first.num_far(); ++idx) {
        const bool whole = kind == 0 && set < kFarSets;
        const bool joined = GetParam() && kind == 1 && set < kFarSets;
        take(first.front_at(kind, set, idx), whole    ? first.message_bytes
                                             : joined ? kFarMostJoinedBytes
                                                      : std::int64_t{kFarHeaderBytes});
      }
    }
  }
  for (int set = 0; set < kFarSets; ++set) {
    if (!GetParam()) take(first.returns_at(set), first.returns_bytes);
    for (int idx = 0; idx < first.num_far(); ++idx) take(first.weights_at(set, idx), first.weights_bytes);
  }
}

TEST(FarLayout, WhatIsNotInGpuMemoryGoesAsOneMessageOfTheNetwork) {
  EXPECT_LE(to_size(kFarMostJoinedBytes), net::ucx::kMaxOneMessageBytes);
}

TEST(FarLayout, RowsInGpuMemoryHavePlacesThatDoNotOverlap) {
  const FarLayout layout = FarLayout::of({.num_ranks = 6,
                                          .ranks_per_node = 2,
                                          .rank = 3,
                                          .front_bytes = 1280,
                                          .rows_bytes = 640,
                                          .returns_bytes = 256,
                                          .weights_bytes = 128,
                                          .rows_in_gpu = true});
  std::vector<bool> taken(to_size(layout.gpu.size_bytes), false);
  const auto take = [&taken](std::int64_t offset, std::int64_t bytes) {
    for (std::int64_t at = offset; at < offset + bytes; ++at) {
      ASSERT_LT(to_size(at), taken.size());
      ASSERT_FALSE(taken[to_size(at)]);
      taken[to_size(at)] = true;
    }
  };
  for (int set = 0; set < kFarSets; ++set) {
    take(layout.gpu_returned_at(set), layout.returns_bytes);
    for (int idx = 0; idx < layout.num_far(); ++idx) take(layout.gpu_dispatched_at(set, idx), layout.gpu.rows_bytes);
  }
  for (int idx = 0; idx < layout.num_far(); ++idx) take(layout.gpu_leaving_at(idx), layout.gpu.rows_bytes);
}

TEST(FarMessage, FitsWhereItsCallFitsTheWindow) {
  constexpr int kNumRanks = 8;
  for (const std::int64_t max_tokens : {1, 7, 128, 1000}) {
    for (const int num_topk : {1, 2, 7, 8, 15, 16, 32}) {
      for (const std::int64_t row_bytes : {16, 7168 + 224, 14336}) {
        const SetNeed dispatch = SetNeed::of_dispatch(kNumRanks, max_tokens, num_topk, row_bytes);
        const SetNeed combine = SetNeed::of_combine(max_tokens, num_topk, num_topk, row_bytes);
        const LatencyLayout window = LatencyLayout::of(
            0, std::max(LatencyLayout::bytes_for(dispatch, kNumRanks), LatencyLayout::bytes_for(combine, kNumRanks)),
            kNumRanks);
        const FarLayout far = far_layout(window, kNumRanks, 2, 0);
        const FarMessage message = FarMessage::of(kMaxExperts, num_topk);
        EXPECT_LE(message.rows_at(max_tokens), far.front_bytes);
        EXPECT_LE(far.front_bytes + max_tokens * round_up_row(row_bytes), far.message_bytes);
        EXPECT_LE(max_tokens * num_topk * round_up_row(row_bytes), far.returns_bytes);
        EXPECT_LE(max_tokens * num_topk * 4, far.weights_bytes);

        const FarLayout gpu = far_layout(window, kNumRanks, 2, 0, true);
        const std::int64_t rows_bytes = max_tokens * round_up_row(row_bytes);
        if (message.rows_apart(gpu, max_tokens, round_up_row(row_bytes))) {
          EXPECT_LE(rows_bytes, gpu.gpu.rows_bytes);
        } else {
          EXPECT_LE(message.rows_at(max_tokens) + rows_bytes, gpu.message_bytes);
        }
        EXPECT_LE(max_tokens * num_topk * round_up_row(row_bytes), gpu.returns_bytes);
      }
    }
  }
}

/// A rank of four in nodes of two, whose kernels post.
class FarPostsOf : public testing::Test {
 protected:
  static constexpr std::uint64_t kNumber = 5;

  explicit FarPostsOf(int rank, std::int64_t hold_grants_ns = 0)
      : rank_(rank),
        layout_(FarLayout::of({.num_ranks = 4,
                               .ranks_per_node = 2,
                               .rank = rank,
                               .front_bytes = 1024,
                               .rows_bytes = 1024,
                               .returns_bytes = 1024,
                               .weights_bytes = 1024,
                               .rows_in_gpu = true})),
        posts_(to_size(kFarMessages * layout_.num_ranks)),
        left_(posts_.size(), 0),
        granted_(to_size(kFarKinds * kFarGrantSlots), 0),
        message_(2048, std::byte{7}),
        source_({.layout = layout_,
                 .rank = rank,
                 .posts = posts_.data(),
                 .left = left_.data(),
                 .granted = granted_.data(),
                 .copy_record =
                     [](std::int64_t number, CallRecord* record) {
                       *record = {};
                       record->num_fields = 3;
                       return number == 77;
                     },
                 .hold_grants_ns = hold_grants_ns}) {
    take_all();  // what connects
  }

  /// As the last block of a kernel does.
  void post(int kind, int rank, std::uint64_t number, std::uint64_t rows_bytes, std::uint64_t front_to) {
    FarPost& post = posts_[to_size(kind * layout_.num_ranks + rank)];
    post.record_number = 77;
    post.front = reinterpret_cast<std::uintptr_t>(message_.data());
    post.front_to = front_to;
    post.front_bytes = kFarHeaderBytes;
    post.rows = reinterpret_cast<std::uintptr_t>(message_.data() + kFarHeaderBytes);
    post.rows_to = net::kGpuOffset + static_cast<std::uint64_t>(layout_.gpu_returned_at(1));
    post.rows_bytes = rows_bytes;
    std::atomic_ref(post.number).store(number, std::memory_order_release);
  }
  std::uint64_t front_to() const { return static_cast<std::uint64_t>(layout_.front_at(1, 1, 0)); }

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
  std::vector<std::uint64_t> left_;
  std::vector<std::uint64_t> granted_;
  std::vector<std::byte> message_;
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

TEST_F(FarPosts, APartArrivesBeforeItsNumberAndTheMessageLeavesWhenTheNetworkHasIt) {
  post(1, 0, kNumber, 512, front_to());
  EXPECT_TRUE(source_.has_news());
  const std::vector<NetworkRequest> requests = take_all();
  EXPECT_FALSE(source_.has_news());
  ASSERT_EQ(requests.size(), 3U);
  EXPECT_EQ(requests[0].kind, Kind::kPutSignal);
  EXPECT_EQ(requests[0].offset, front_to());
  EXPECT_EQ(requests[0].num_bytes, kFarHeaderBytes);
  EXPECT_EQ(requests[0].op.kind, net::AtomicOp::Kind::kSet);
  EXPECT_EQ(requests[0].op.offset, to_size(layout_.arrived_at(1, rank_)));
  EXPECT_EQ(requests[0].op.operand, kNumber);
  EXPECT_EQ(requests[1].kind, Kind::kPutSignal);
  EXPECT_EQ(requests[1].local, message_.data() + kFarHeaderBytes);
  EXPECT_EQ(requests[1].offset, net::kGpuOffset + to_size(layout_.gpu_returned_at(1)));
  EXPECT_EQ(requests[1].num_bytes, 512U);
  EXPECT_EQ(requests[1].op.kind, net::AtomicOp::Kind::kSet);
  EXPECT_EQ(requests[1].op.offset, to_size(layout_.rows_arrived_at(1, rank_)));
  EXPECT_EQ(requests[1].op.operand, kNumber);
  EXPECT_EQ(requests[2].kind, Kind::kRelease);
  for (const NetworkRequest& request : requests) EXPECT_EQ(request.peer, 0);

  const std::uint64_t& left = left_[to_size(layout_.num_ranks)];
  EXPECT_EQ(left, 0U) << "the outbox is still read";
  ASSERT_NE(requests[2].completion, nullptr);
  requests[2].completion->done(0);
  EXPECT_EQ(left, kNumber);
  EXPECT_TRUE(take_all().empty());
  EXPECT_EQ(source_.traffic(0).sent_bytes, kFarHeaderBytes + 512);
  EXPECT_EQ(source_.traffic(0).num_messages, 4U) << "two puts and their numbers";
  EXPECT_EQ(source_.traffic(1).sent_bytes, 0U);
}

TEST_F(FarPosts, CarriesTheRecordOfItsCall) {
  post(1, 0, kNumber, 0, front_to());
  const std::vector<NetworkRequest> requests = take_all();
  ASSERT_EQ(requests.size(), 2U) << "one put, with the number, where there are no rows";
  EXPECT_EQ(requests[0].kind, Kind::kPutSignal);
  CallRecord record;
  std::memcpy(&record, message_.data() + kFarRecordOffset, sizeof(record));
  EXPECT_EQ(record.num_fields, 3);
  EXPECT_EQ(reinterpret_cast<const FarHeader*>(message_.data())->has_record, 1);
}

TEST_F(FarPosts, WeightsGoBeforeTheirCombineAndHaveNoRecord) {
  post(1, 0, kNumber, 0, front_to());
  post(kFarWeights, 0, kNumber, 0, static_cast<std::uint64_t>(layout_.weights_at(1, 0)));
  const std::vector<std::byte> before = message_;
  const one_sided::CanIssue can_issue = [](int /*peer*/) { return true; };
  const NetworkRequest first = *source_.front(can_issue);
  EXPECT_EQ(first.kind, Kind::kPutSignal);
  EXPECT_EQ(first.offset, to_size(layout_.weights_at(1, 0)));
  EXPECT_EQ(first.op.offset, to_size(layout_.arrived_at(kFarWeights, rank_)));
  source_.taken();
  EXPECT_EQ(take_all().size(), 3U) << "the end of both, and the combine";

  post(kFarWeights, 0, kNumber + 1, 0, static_cast<std::uint64_t>(layout_.weights_at(1, 0)));
  message_ = before;
  take_all();
  EXPECT_EQ(message_, before) << "weights are sent as they are";
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
  post(1, 0, kNumber, 512, static_cast<std::uint64_t>(layout_.inbox_bytes));
  post(1, 1, kNumber, static_cast<std::uint64_t>(layout_.gpu.size_bytes), front_to());
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
  reinterpret_cast<FarHeader*>(message_.data())->granted[1][4 % kFarGrantSlots] = kWord;
  grant();
  post(0, 0, kNumber, 0, static_cast<std::uint64_t>(layout_.front_at(0, 1, 0)));
  const std::vector<NetworkRequest> requests = take_all();
  ASSERT_EQ(requests.size(), 3U) << "a message to rank 0 and its release, and a grant";
  EXPECT_EQ(requests[0].kind, Kind::kPutSignal);
  EXPECT_EQ(requests[1].kind, Kind::kRelease);
  expect_grant(requests[2], 1);
}

TEST_F(FarGrants, AreSentWhereHeadersHaveCarriedEarlierOnes) {
  reinterpret_cast<FarHeader*>(message_.data())->granted[1][4 % kFarGrantSlots] = std::uint64_t{0} << 32 | 1;
  grant();
  for (const int rank : {0, 1}) post(0, rank, kNumber, 0, static_cast<std::uint64_t>(layout_.front_at(0, 1, 0)));
  std::vector<NetworkRequest> requests = take_all();
  std::erase_if(requests, [](const NetworkRequest& request) { return request.kind != Kind::kAtomic; });
  ASSERT_EQ(requests.size(), 2U);
  for (int rank = 0; rank < 2; ++rank) expect_grant(requests[to_size(rank)], rank);
}

TEST_F(FarGrants, OfTheBeginOfAnEraAreAlwaysSent) {
  const std::uint64_t word = kFarEra << 32 | 2;
  reinterpret_cast<FarHeader*>(message_.data())->granted[1][0] = word;
  std::atomic_ref(granted_[kFarGrantSlots]).store(word, std::memory_order_release);
  post(0, 0, kNumber, 0, static_cast<std::uint64_t>(layout_.front_at(0, 1, 0)));
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
