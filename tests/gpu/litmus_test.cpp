/// Assumptions of the CUDA backend about the GPU, tested alone: messages behind flags, bulk copies behind flags,
/// progress of many warps, waits that expire. On one GPU and, if there are two, between them.

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <ostream>
#include <string>

#include "cuda/latency/window.hpp"
#include "gpu/litmus_host.hpp"

namespace ferry::test {
namespace {

/// Timeout of every wait inside a kernel in tests that do not test expiry.
constexpr std::chrono::seconds kPatience{10};

/// GPUs that a test uses.
enum class Span { kOneGpu, kTwoGpus };

void PrintTo(Span span, std::ostream* out) { *out << (span == Span::kOneGpu ? "one GPU" : "two GPUs"); }
std::string name_of(Span span) { return span == Span::kOneGpu ? "one_gpu" : "two_gpus"; }

/// Skips the test if no second GPU is reachable; a test without any GPU fails.
class Litmus : public testing::TestWithParam<Span> {
 protected:
  void SetUp() override {
    ASSERT_GE(num_litmus_gpus(), 1) << "needs a GPU";
    if (GetParam() == Span::kOneGpu) return;
    if (num_litmus_gpus() < 2) GTEST_SKIP() << "needs two GPUs";
    if (!connect_gpus(0, 1)) GTEST_SKIP() << "GPU 0 and GPU 1 cannot reach each other's memory";
  }

  /// GPU of the i-th part of a test.
  static int gpu_of(int i) { return GetParam() == Span::kOneGpu ? 0 : i % 2; }
};

void expect_clean(const LitmusReport& report, std::uint32_t num_blocks, const std::string& what) {
  EXPECT_EQ(report.num_expired, 0U) << what << ": waits expired";
  EXPECT_EQ(report.num_breaches, 0U) << fmt::format(
      "{}: first breach: kind {} at {} in round or epoch {}: {:#x} for {:#x}", what, static_cast<int>(report.first),
      report.where, report.when, report.seen, report.expected);
  EXPECT_EQ(report.num_completed, num_blocks) << what << ": blocks that ended normally";
}

/// Two kernels, one per side, that send each other rows in turn.
void exchange_rows(const std::vector<int>& gpus, Transfer transfer, std::uint32_t num_rounds) {
  constexpr int kNumPairs = 8;
  constexpr std::size_t kRowsBytes = std::size_t{kNumPairs} * kMaxRowBytes;
  const GpuArray<LitmusReport> report(gpus[0], 1);
  std::vector<GpuBytes> mailboxes;
  std::vector<GpuBytes> sources;
  std::vector<GpuArray<std::uint64_t>> flags;
  std::vector<GpuStream> streams;
  MailboxParams params;
  params.num_pairs = kNumPairs;
  params.num_rounds = num_rounds;
  params.timeout_ns = static_cast<std::uint64_t>(std::chrono::nanoseconds(kPatience).count());
  params.report = report.data();
  for (std::size_t side = 0; side < 2; ++side) {
    params.mailboxes[side] = mailboxes.emplace_back(gpus[side], kRowsBytes).data();
    params.flags[side] = flags.emplace_back(gpus[side], std::size_t{kNumPairs} * kFlagStride).data();
    sources.emplace_back(gpus[side], kRowsBytes);
    streams.emplace_back(gpus[side]);
  }
  for (std::size_t side = 0; side < 2; ++side) {
    params.side = static_cast<int>(side);
    params.sources = sources[side].data();
    check_cuda(launch_mailbox(params, transfer, streams[side].enter()), "launch_mailbox");
  }
  finish({&streams[0], &streams[1]});
  expect_clean(report.read().front(), 2 * kNumPairs, "rows in turn");
}

class LitmusMailbox : public Litmus {
 protected:
  static constexpr std::uint32_t kNumRounds = 100'000;
  static void exchange(Transfer transfer) { exchange_rows({gpu_of(0), gpu_of(1)}, transfer, kNumRounds); }
};

TEST_P(LitmusMailbox, AFlagPublishesWhatTheBlockStored) { exchange(Transfer::kStores); }
TEST_P(LitmusMailbox, AFlagPublishesABulkCopyToOrdinaryLoads) { exchange(Transfer::kBulkThenLoads); }
TEST_P(LitmusMailbox, AFlagPublishesABulkCopyToBulkLoads) { exchange(Transfer::kBulkThenBulk); }

class LitmusWords : public Litmus {
 protected:
  static void send_and_receive(std::uint64_t first_number) {
    constexpr int kNumPairs = 8;
    constexpr std::uint64_t kNumCalls = 50'000;
    constexpr std::size_t kNumSets = std::size_t{kNumPairs} * cuda::kSets;
    const std::vector<int> gpus = {gpu_of(0), gpu_of(1)};
    const LitmusRanks ranks(gpus, kPatience);
    const GpuArray<LitmusReport> report(gpus[0], 1);
    const GpuArray<std::uint64_t> grants(gpus[0], std::size_t{kNumPairs} * kFlagStride);
    const GpuArray<std::uint64_t> words(gpus[1], kNumSets * kSetWords);
    const GpuBytes rows(gpus[1], kNumSets * kMaxRowBytes);
    const GpuStream streams[2] = {GpuStream(gpus[0]), GpuStream(gpus[1])};
    WordsParams params;
    params.num_pairs = kNumPairs;
    params.first_number = first_number;
    params.num_calls = kNumCalls;
    params.grants = grants.data();
    params.words = words.data();
    params.rows = rows.data();
    params.report = report.data();
    for (int side = 0; side < 2; ++side) {
      params.side = side;
      params.call.ranks = ranks.params(side);
      check_cuda(launch_words(params, streams[side].enter()), "launch_words");
    }
    finish({&streams[0], &streams[1]});
    expect_clean(report.read().front(), 2 * kNumPairs, "words of calls");
  }
};

TEST_P(LitmusWords, AreTheirOwnFlagsAndGrantSets) { send_and_receive(1); }
/// Words hold the lower half of a call's number, which wraps to 0 here.
TEST_P(LitmusWords, AreTheirOwnFlagsAfterVeryManyCalls) { send_and_receive((std::uint64_t{1} << 32) - 25'000); }

class LitmusRowWords : public Litmus {
 protected:
  struct How {
    bool short_steps = false;
    bool checks_each = true;
  };
  static void send_and_receive(std::uint64_t first_number, How how) {
    constexpr int kNumPairs = 32;
    const std::vector<int> gpus = {gpu_of(0), gpu_of(1)};
    const LitmusRanks ranks(gpus, kPatience);
    const GpuArray<LitmusReport> report(gpus[0], 1);
    const GpuArray<std::uint64_t> grants(gpus[0], std::size_t{kNumPairs} * kFlagStride);
    const GpuBytes words(gpus[1], kNumPairs * static_cast<std::size_t>(
                                                  cuda::row_words_bytes(kMaxRowBytes, cuda::kShortWordStepVectors)));
    const GpuStream streams[2] = {GpuStream(gpus[0]), GpuStream(gpus[1])};
    RowWordsParams params;
    params.num_pairs = kNumPairs;
    params.first_number = first_number;
    params.num_calls = 50'000;
    params.short_steps = how.short_steps;
    params.checks_each = how.checks_each;
    params.grants = grants.data();
    params.words = words.data();
    params.report = report.data();
    for (int side = 0; side < 2; ++side) {
      params.side = side;
      params.call.ranks = ranks.params(side);
      check_cuda(launch_row_words(params, streams[side].enter()), "launch_row_words");
    }
    finish({&streams[0], &streams[1]});
    expect_clean(report.read().front(), 2 * kNumPairs, "rows as words");
  }
};

TEST_P(LitmusRowWords, BringNumberAndDataTogetherInAnyOrder) { send_and_receive(1, {}); }
TEST_P(LitmusRowWords, DoSoInShortSteps) { send_and_receive(1, {.short_steps = true}); }
TEST_P(LitmusRowWords, DoSoAfterVeryManyCalls) { send_and_receive((std::uint64_t{1} << 32) - 25'000, {}); }
/// As the library's kernels read: an assembler may make shorter loads where bytes of a word are not used.
TEST_P(LitmusRowWords, AreReadAsAWhole) {
  for (const bool short_steps : {false, true}) send_and_receive(1, {.short_steps = short_steps, .checks_each = false});
}

class LitmusChunks : public Litmus {
 protected:
  static constexpr std::uint64_t kNumEpochs = 50;
  static constexpr int kSender = 1;

  /// One sender to `num_ranks` ranks, itself included, with a watcher on every rank. Returns the number of new progress
  /// values that the watchers saw.
  static std::uint32_t send_and_watch(const ChunkShape& shape, int num_ranks, std::uint64_t first_epoch = 1) {
    const std::string what = fmt::format("{} blocks, {} chunks of {} rows of {} bytes", shape.num_blocks,
                                         shape.num_chunks, shape.rows_per_chunk, shape.row_bytes);
    std::vector<int> gpus;
    for (int rank = 0; rank < num_ranks; ++rank) gpus.push_back(gpu_of(rank));
    const LitmusRanks ranks(gpus, kPatience);
    const int sender_gpu = gpu_of(kSender);
    const GpuArray<LitmusReport> report(gpus[0], 1);
    const GpuArray<std::uint64_t> num_watching(sender_gpu, static_cast<std::size_t>(num_ranks * kFlagStride));
    const auto rows_bytes = static_cast<std::size_t>(shape.num_chunks * shape.rows_per_chunk * shape.row_bytes);
    const GpuBytes sources(sender_gpu, static_cast<std::size_t>(num_ranks) * rows_bytes);
    const GpuStream sender_stream(sender_gpu);
    std::vector<GpuBytes> rows;
    std::vector<GpuStream> watcher_streams;
    SendChunksParams send;
    send.ranks = ranks.params(kSender);
    send.shape = shape;
    send.sources = sources.data();
    send.num_watching = num_watching.data();
    send.report = report.data();
    for (int rank = 0; rank < num_ranks; ++rank) {
      send.rows[rank] = rows.emplace_back(gpu_of(rank), rows_bytes).data();
      watcher_streams.emplace_back(gpu_of(rank));
    }
    std::vector<const GpuStream*> all_streams = {&sender_stream};
    for (const GpuStream& one : watcher_streams) all_streams.push_back(&one);

    std::uint32_t num_steps = 0;
    for (std::uint64_t i = 0; i < kNumEpochs && !testing::Test::HasFailure(); ++i) {
      const std::uint64_t epoch = first_epoch + i;
      for (int rank = 0; rank < num_ranks; ++rank) {
        WatchChunksParams watch;
        watch.ranks = ranks.params(rank);
        watch.shape = shape;
        watch.sender = kSender;
        watch.epoch = epoch;
        watch.rows = send.rows[rank];
        watch.num_watching = num_watching.data() + rank * kFlagStride;
        watch.report = report.data();
        const GpuStream& stream = watcher_streams[static_cast<std::size_t>(rank)];
        check_cuda(launch_watch_chunks(watch, stream.enter()), "launch_watch_chunks");
      }
      send.epoch = epoch;
      check_cuda(launch_send_chunks(send, sender_stream.enter()), "launch_send_chunks");
      finish(all_streams);
      const LitmusReport seen = report.read().front();
      expect_clean(seen, static_cast<std::uint32_t>(i + 1) * static_cast<std::uint32_t>(num_ranks + shape.num_blocks),
                   fmt::format("{}, epoch {}", what, epoch));
      expect_reset(ranks.local(kSender), what);
      num_steps = seen.num_steps;
    }
    return num_steps;
  }

  static void expect_reset(const cuda::LocalState& local, const std::string& what) {
    EXPECT_EQ(local.num_chunks_sent, 0U) << what;
    EXPECT_EQ(local.broken, 0U) << what;
    EXPECT_EQ(std::count(std::begin(local.chunk_arrivals), std::end(local.chunk_arrivals), 0U), cuda::kMaxChunks)
        << what;
  }
};

TEST_P(LitmusChunks, RowsThatProgressCountsAreThere) {
  constexpr int kNumRanks = 3;
  const std::vector<ChunkShape> shapes = {
      {.num_blocks = 1, .num_chunks = 1, .rows_per_chunk = 5, .row_bytes = 16},
      {.num_blocks = 4, .num_chunks = 20, .rows_per_chunk = 64, .row_bytes = 1024},
      {.num_blocks = 16, .num_chunks = 100, .rows_per_chunk = 16, .row_bytes = 272, .report_every = 3},
      {.num_blocks = 8, .num_chunks = cuda::kMaxChunks, .rows_per_chunk = 1, .row_bytes = 512},
  };
  for (const ChunkShape& shape : shapes) {
    const std::uint32_t num_steps = send_and_watch(shape, kNumRanks);
    // Watchers that see only the end prove nothing.
    if (shape.num_chunks > 1) {
      EXPECT_GT(num_steps, static_cast<std::uint32_t>(kNumEpochs * kNumRanks));
    }
    if (HasFailure()) return;
  }
}

/// Progress words hold the lower half of an epoch, which wraps to 0 here.
TEST_P(LitmusChunks, RowsThatProgressCountsAreThereAfterVeryManyEpochs) {
  constexpr int kNumRanks = 3;
  constexpr std::uint64_t kWrap = std::uint64_t{1} << 32;
  (void)send_and_watch({.num_blocks = 4, .num_chunks = 20, .rows_per_chunk = 64, .row_bytes = 1024}, kNumRanks,
                       kWrap - kNumEpochs / 2);
}

INSTANTIATE_TEST_SUITE_P(Gpus, LitmusMailbox, testing::Values(Span::kOneGpu, Span::kTwoGpus),
                         [](const auto& test) { return name_of(test.param); });
INSTANTIATE_TEST_SUITE_P(Gpus, LitmusWords, testing::Values(Span::kOneGpu, Span::kTwoGpus),
                         [](const auto& test) { return name_of(test.param); });
INSTANTIATE_TEST_SUITE_P(Gpus, LitmusRowWords, testing::Values(Span::kOneGpu, Span::kTwoGpus),
                         [](const auto& test) { return name_of(test.param); });
INSTANTIATE_TEST_SUITE_P(Gpus, LitmusChunks, testing::Values(Span::kOneGpu, Span::kTwoGpus),
                         [](const auto& test) { return name_of(test.param); });

}  // namespace
}  // namespace ferry::test
