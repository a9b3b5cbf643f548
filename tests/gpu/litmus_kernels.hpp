#ifndef FERRY_TESTS_LITMUS_KERNELS_HPP
#define FERRY_TESTS_LITMUS_KERNELS_HPP

/// Kernels that check the guarantees of the device primitives (src/cuda/sync, src/cuda/copy, the words of latency mode)
/// one at a time: messages behind a flag, words that are their own flags, bulk copies behind a flag, progress of many
/// warps, waits that time out. The host launches them and reads their findings in a LitmusReport.

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>

#include "cuda/latency/params.hpp"
#include "plan/host_device.hpp"

namespace ferry::test {

/// Kind of error that a kernel found.
enum class Breach : std::int32_t {
  kNone = 0,
  kWord = 1,      ///< `seen` differs from the word that was sent, `expected`
  kFlag = 2,      ///< a flag ran ahead of its writer
  kWentBack = 3,  ///< progress decreased
  kRowCount = 4,  ///< progress counts rows that do not exist, or the end arrived before the last row
};

/// Report to which all kernels of a test add; `first` and the later fields describe the first breach.
struct LitmusReport {
  std::uint32_t num_breaches;
  std::uint32_t num_expired;    ///< waits that ended by their deadline
  std::uint32_t num_completed;  ///< blocks that ended normally
  std::uint32_t num_steps;      ///< distinct values of progress that watchers saw
  Breach first;
  std::int32_t where;  ///< kWord: index in its row; otherwise a rank
  std::uint64_t when;  ///< round or epoch
  std::uint64_t seen;
  std::uint64_t expected;
};

inline constexpr int kMaxRowBytes = 7168;
inline constexpr int kUnitBytes = 16;

/// Path of a row.
enum class Transfer {
  kStores,         ///< written with ordinary stores, read with ordinary loads
  kBulkThenLoads,  ///< through shared memory by bulk copies, read with ordinary loads
  kBulkThenBulk,   ///< through shared memory by bulk copies, both ways
};

/// One side of pairs of blocks that send each other rows in turn: side 1 writes round 1 into side 0's mailbox, side 0
/// writes round 2 into side 1's, and so on. A row has 16 to kMaxRowBytes bytes, with different contents in every round.
struct MailboxParams {
  int side = 0;
  int num_pairs = 1;
  std::uint32_t num_rounds = 0;
  std::uint64_t timeout_ns = 0;                  ///< of each wait
  std::byte* mailboxes[2] = {nullptr, nullptr};  ///< [side]: [pairs][kMaxRowBytes], written by the other side
  std::uint64_t* flags[2] = {nullptr, nullptr};  ///< [side]: [pairs][kFlagStride], latest round in the mailbox
  std::byte* sources = nullptr;                  ///< [pairs][kMaxRowBytes], rows that this side sends by bulk copies
  LitmusReport* report = nullptr;
};
/// Words between flags: flags of different pairs never share a line.
inline constexpr int kFlagStride = 16;

cudaError_t launch_mailbox(const MailboxParams& params, Transfer transfer, cudaStream_t stream);

/// One side of pairs of blocks that communicate like the halves of latency mode: side 0 sends calls; side 1 receives
/// them and grants sets. A call has words that are their own flags, and a row behind a word; its set is reused once
/// granted. Calls are received two at a time, in either order.
struct WordsParams {
  cuda::LatencyParams call;  ///< only the ranks are set; this side is rank `side`
  int side = 0;
  int num_pairs = 1;
  std::uint64_t first_number = 1;
  std::uint64_t num_calls = 0;      ///< even
  std::uint64_t* grants = nullptr;  ///< at side 0: [pairs][kFlagStride]
  std::uint64_t* words = nullptr;   ///< at side 1: [pairs][sets][kSetWords], the last word is the row's flag
  std::byte* rows = nullptr;        ///< at side 1: [pairs][sets][kMaxRowBytes]
  LitmusReport* report = nullptr;
};
inline constexpr int kSetWords = 33;

cudaError_t launch_words(const WordsParams& params, cudaStream_t stream);

/// One side of pairs of warps: side 0 sends rows as words, one call after another into the same memory, each after side
/// 1 has read the previous one.
struct RowWordsParams {
  cuda::LatencyParams call;  ///< as in WordsParams
  int side = 0;
  int num_pairs = 1;
  std::uint64_t first_number = 1;
  std::uint64_t num_calls = 0;
  bool short_steps = false;         ///< steps of kShortWordStepVectors
  bool checks_each = false;         ///< side 1 checks each word as soon as it has arrived
  std::uint64_t* grants = nullptr;  ///< at side 0: [pairs][kFlagStride]
  std::byte* words = nullptr;       ///< at side 1: [pairs][row_words_bytes of kMaxRowBytes in short steps]
  LitmusReport* report = nullptr;
};

cudaError_t launch_row_words(const RowWordsParams& params, cudaStream_t stream);

/// Rows of a call that many warps send and report in chunks.
struct ChunkShape {
  int num_blocks = 1;
  int num_chunks = 1;
  int rows_per_chunk = 1;  ///< for the rank with the most rows
  int row_bytes = kUnitBytes;
  int report_every = 1;  ///< chunks between two reports of a warp
};
inline constexpr int kSendWarps = 8;
inline constexpr int kMaxChunkRowBytes = 1024;
inline constexpr int kMaxLitmusRanks = 4;

/// Number of rows of a rank: they differ, and the last rank gets all rows.
FERRY_HOST_DEVICE constexpr int rows_for(const ChunkShape& shape, int rank, int num_ranks) {
  return shape.num_chunks * shape.rows_per_chunk * (rank + 1) / num_ranks;
}

struct SendChunksParams {
  cuda::RankParams ranks;  ///< of the sender
  ChunkShape shape;
  std::uint64_t epoch = 0;
  std::byte* sources = nullptr;                 ///< [ranks][rows][row_bytes], filled by the launch
  std::byte* rows[kMaxLitmusRanks] = {};        ///< [ranks]: [rows][row_bytes] on the receiver
  const std::uint64_t* num_watching = nullptr;  ///< [ranks][kFlagStride] epoch that the rank's watcher has begun
  LitmusReport* report = nullptr;
};

/// Runs the sender's part of one epoch: fills the sources, waits for all watchers, sends and reports.
cudaError_t launch_send_chunks(const SendChunksParams& params, cudaStream_t stream);

struct WatchChunksParams {
  cuda::RankParams ranks;  ///< of the receiver
  ChunkShape shape;
  int sender = 0;
  std::uint64_t epoch = 0;
  const std::byte* rows = nullptr;        ///< [rows][row_bytes]
  std::uint64_t* num_watching = nullptr;  ///< this rank's flag
  LitmusReport* report = nullptr;
};

/// Runs the receiver's part: watches the sender's progress until the sender is done, and checks each row once it is
/// counted.
cudaError_t launch_watch_chunks(const WatchChunksParams& params, cudaStream_t stream);

/// A wait for `ranks.control.progress[peer]`, by one thread of a separate block: kRows waits for that many rows of the
/// epoch, other values wait for the word itself.
struct PlannedWait {
  cuda::Awaited awaited = cuda::Awaited::kRows;
  std::int32_t peer = 0;
  std::uint64_t epoch = 0;
  std::uint64_t expected = 0;
};

struct WaitOutcome {
  std::uint32_t held;  ///< result of the wait
  std::uint64_t elapsed_ns;
};

/// Runs each wait twice in a row. `outcomes`: [waits][2].
cudaError_t launch_waits(const cuda::RankParams& ranks, const PlannedWait* waits, int num_waits, WaitOutcome* outcomes,
                         cudaStream_t stream);
/// Makes one warp wait until all ranks are done. `outcomes`: [lanes].
cudaError_t launch_wait_all(const cuda::RankParams& ranks, std::uint64_t epoch, WaitOutcome* outcomes,
                            cudaStream_t stream);
/// Makes one receiving warp request its next row `num_calls` times. `source_base`: [ranks + 1] rows of each source;
/// `rows`: [num_calls] answers.
cudaError_t launch_arrivals(const cuda::RankParams& ranks, std::uint64_t epoch, const std::int32_t* source_base,
                            int num_calls, std::int32_t* rows, cudaStream_t stream);
/// Makes one warp end the call. `outcomes`: [lanes].
cudaError_t launch_finish_call(const cuda::RankParams& ranks, std::uint64_t epoch, WaitOutcome* outcomes,
                               cudaStream_t stream);

}  // namespace ferry::test

#endif  // FERRY_TESTS_LITMUS_KERNELS_HPP
