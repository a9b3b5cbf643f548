#ifndef FERRY_CUDA_INTRANODE_EXCHANGE_COUNTS_CUH
#define FERRY_CUDA_INTRANODE_EXCHANGE_COUNTS_CUH

/// Counts between ranks: the exchanging block posts this rank's counts and reads those of all ranks.

#include <cstdint>

#include "cuda/intranode/entries.cuh"
#include "cuda/intranode/exchange_scratch.cuh"
#include "cuda/sync/entry.cuh"
#include "cuda/sync/word_pair.cuh"

namespace ferry::cuda::device {

/// Sources whose counts a thread loads together: one load latency for up to 8 ranks.
inline constexpr int kSourceBatch = 8;

/// Warp that waits for the flags of all ranks, and warp that lets the ranks write into the source table. In small calls
/// they have no other work.
inline constexpr int kFlagWarp = kExchangeWarps / 2 - 1;
inline constexpr int kSourceWarp = kFlagWarp - 1;

/// Position of this rank's headers and counts of `epoch`, the same in every rank's memory.
struct PostedSlot {
  std::size_t first_rank;  ///< slots are [2][R]
  std::size_t stride;      ///< stride of counts

  __device__ PostedSlot(const RankParams& ranks, std::uint64_t epoch)
      : first_rank(static_cast<std::size_t>(epoch % 2) * static_cast<std::size_t>(ranks.num_ranks)),
        stride(Control::counts_stride(static_cast<std::size_t>(ranks.num_ranks))) {}
};

/// Address of the same word in another rank's control block.
__device__ inline std::uint64_t* on_rank(const RankParams& ranks, std::byte* base, std::uint64_t* own) {
  return reinterpret_cast<std::uint64_t*>(base + (reinterpret_cast<std::byte*>(own) - ranks.peer_bases[ranks.rank]));
}

/// Passes a count to the host in a 64-bit word of RouteWords, if the host asks for it. The word holds 32 bits of the
/// count, enough in valid routes.
__device__ inline void tell_host(const RouteParams& params, std::uint64_t* word, std::int64_t count) {
  if (params.host_words.words == nullptr) return;
  store_relaxed_system(word, RouteWords::kThere | static_cast<std::uint32_t>(count));
}

/// Fills in this rank's header. One thread calls it, after sum_blocks.
__device__ inline void make_header(const RouteParams& params, Shared& shared, std::uint64_t epoch) {
  const bool counted = params.agreement != 0;
  const bool bad = counted && shared.bad_entry != kNoEntry;
  CountsHeader& header = shared.header;
  header.epoch = epoch;
  header.agreement = params.agreement;
  header.record_number = params.record_number;
  header.max_recv_rows = params.max_recv_rows;
  header.num_tokens = params.num_tokens;
  header.bad_entry = bad ? static_cast<std::int64_t>(shared.bad_entry) : -1;
  header.bad_id = bad ? load_id(params, static_cast<std::int64_t>(shared.bad_entry)) : 0;
  note_bad_homes(params.placement, header.bad_entry, header.bad_id);
  header.homes_hash = hash_of_homes(params.placement);
  header.repeats = counted && shared.repeats != 0 ? 1 : 0;
  header.source_rows = params.source_rows;
  header.unused = 0;
}

/// Payload bits of a word; the other bits hold the epoch.
inline constexpr int kPayloadBits = 32;

/// Packs two payloads into two words, each tagged with the epoch.
__device__ inline WordPair tagged(std::uint64_t epoch, std::uint32_t first, std::uint32_t second) {
  return {half_of(epoch) << kPayloadBits | first, half_of(epoch) << kPayloadBits | second};
}

/// Words of a header that are sent separately: the location of the source table.
inline constexpr int kSourceOffsetWords = sizeof(std::int64_t) / sizeof(std::uint32_t);
static_assert(offsetof(CountsHeader, source_offset) == 0, "the first two words");

/// Lets every rank write into this rank's source table: the fence orders all uses of that memory by previous calls
/// before the words sent here. Only this warp waits for the fence; headers and counts are sent by other warps at once.
/// All lanes of kSourceWarp call it.
__device__ inline void publish_source_offset(const RouteParams& params, const Shared& shared, std::uint64_t epoch) {
  const RankParams& ranks = params.ranks;
  const std::size_t mine = PostedSlot(ranks, epoch).first_rank + static_cast<std::size_t>(ranks.rank);
  const auto offset = static_cast<std::uint64_t>(params.source_offset);
  const WordPair words =
      tagged(epoch, static_cast<std::uint32_t>(offset), static_cast<std::uint32_t>(offset >> kPayloadBits));
  fence_system();
#pragma unroll 1
  for (int rank = lane_idx(); rank < ranks.num_ranks; rank += kWarpLanes) {
    store_pair_relaxed_system(on_rank(ranks, shared.bases[rank], ranks.control.headers + mine * kCountsHeaderWords),
                              words);
  }
}

/// Sends every rank the rest of this rank's header, and the flag that this rank routes. All lanes of the first warp
/// call it.
__device__ inline void publish_header(const RouteParams& params, Shared& shared, std::uint64_t epoch) {
  const RankParams& ranks = params.ranks;
  if (lane_idx() == 0) make_header(params, shared, epoch);
  __syncwarp();
  constexpr int kPairs = kCountsHeaderWords / 2;
  static_assert(kPairs <= kWarpLanes, "one lane per pair");
  const std::size_t mine = PostedSlot(ranks, epoch).first_rank + static_cast<std::size_t>(ranks.rank);
  std::uint64_t* const own = ranks.control.headers + mine * kCountsHeaderWords + 2 * lane_idx();
  const auto* const payload = reinterpret_cast<const std::uint32_t*>(&shared.header) + 2 * lane_idx();
  if (lane_idx() >= kSourceOffsetWords / 2 && lane_idx() < kPairs) {
    const WordPair words = tagged(epoch, payload[0], payload[1]);
#pragma unroll 1
    for (int rank = 0; rank < ranks.num_ranks; ++rank) {
      store_pair_relaxed_system(on_rank(ranks, shared.bases[rank], own), words);
    }
  }
#pragma unroll 1
  for (int rank = lane_idx(); rank < ranks.num_ranks; rank += kWarpLanes) {
    store_relaxed_system(&on_rank(ranks, shared.bases[rank], ranks.control.counts_ready)[ranks.rank], epoch);
  }
}

/// Sends this rank's counts to every rank. All threads call it.
__device__ inline void publish_counts(const RouteParams& params, const Scratch& scratch, const Shared& shared,
                                      std::uint64_t epoch) {
  const RankParams& ranks = params.ranks;
  const PostedSlot slot(ranks, epoch);
  const std::size_t mine = slot.first_rank + static_cast<std::size_t>(ranks.rank);
  const auto* const counts = reinterpret_cast<const int2*>(scratch.totals);
  const int num_pairs = plan::CountColumns::of(ranks.num_ranks, params.num_experts).size / 2;
  // Work begins with the second warp: the first one sends the header.
  const int thread = (static_cast<int>(threadIdx.x) + kExchangeThreads - kWarpLanes) % kExchangeThreads;
#pragma unroll 1
  for (int i = thread; i < ranks.num_ranks * num_pairs; i += kExchangeThreads) {
    const int rank = i / num_pairs;
    const int pair = i - rank * num_pairs;
    const int2 payload = counts[pair];
    store_pair_relaxed_system(
        on_rank(ranks, shared.bases[rank], ranks.control.counts + mine * slot.stride + 2 * pair),
        tagged(epoch, static_cast<std::uint32_t>(payload.x), static_cast<std::uint32_t>(payload.y)));
  }
}
static_assert(kMaxRanks <= kExchangeThreads, "one thread per rank");

/// Value in place of a deadline: the host has stopped the wait. No clock reads this early a time.
inline constexpr std::uint64_t kStopFound = 1;

/// Occasional checks of a thread that polls words and has not found all: the time, `broken` and the host's stop word.
/// Returns the thread's deadline; 0 when the wait is over. A stop ends the wait at the next check, after the thread has
/// read the words again. Not inlined, nor is the code after a failed wait.
__device__ __noinline__ inline std::uint64_t look_around(const RankParams& ranks, int peer, std::uint64_t epoch,
                                                         unsigned spins, std::uint64_t deadline_ns) {
  if (is_broken(ranks)) return 0;
  if (deadline_ns == kStopFound) {
    declare_lost(ranks, {Awaited::kCounts, peer, epoch}, {0, epoch, true});
    return 0;
  }
  const std::uint64_t now = now_ns();
  if (spins % kSpinsPerStopCheck == 0) {
    if (deadline_ns != 0) show_wait(ranks, Awaited::kCounts, peer, now);
    if (is_stopped(ranks)) return kStopFound;
  }
  if (deadline_ns == 0) return now + ranks.timeout_ns;
  if (now < deadline_ns) return deadline_ns;
  declare_lost(ranks, {Awaited::kCounts, peer, epoch}, {0, epoch, false});
  return 0;
}

/// Waits for the flags of all ranks, on behalf of all threads that poll words meanwhile: they see in `shared` that some
/// words will not arrive. All lanes of kFlagWarp call it; a barrier follows.
__device__ inline void await_flags(const RankParams& ranks, Shared& shared, std::uint64_t epoch) {
  // A rank that dispatches or combines instead of routing posts an entry.
  const bool here = wait_all_ranks(ranks, Awaited::kCounts, count_flags(ranks), epoch, entry_flags(ranks, epoch));
  bool others = !here;
#pragma unroll 1
  for (int rank = lane_idx(); rank < ranks.num_ranks; rank += kWarpLanes) {
    others = others || count_flags(ranks).load(rank) < epoch;
  }
  if (!here) shared.here = false;
  if (others) *static_cast<volatile bool*>(&shared.others) = true;
}

/// Words that every rank posts in this epoch. Each thread waits for the words that it reads. A word that will not
/// arrive reads as 0: its rank makes another call, or a route with other counts or none.
class Posted {
 public:
  __device__ Posted(const RouteParams& params, Shared& shared, std::uint64_t epoch)
      : first_expert(plan::CountColumns::of(params.ranks.num_ranks, params.num_experts).first_expert),
        num_ranks(params.ranks.num_ranks),
        ranks_(&params.ranks),
        shared_(&shared),
        epoch_(epoch) {
    const PostedSlot slot(params.ranks, epoch);
    headers_ = params.ranks.control.headers + slot.first_rank * kCountsHeaderWords;
    counts_ = params.ranks.control.counts + slot.first_rank * slot.stride;
    stride_ = slot.stride;
  }

  int first_expert;  ///< column of the first expert
  int num_ranks;

  __device__ std::int32_t count(int source, int column) const {
    const std::uint64_t* const address = counts_ + static_cast<std::size_t>(source) * stride_ + column;
    return static_cast<std::int32_t>(await(source, [address] { return load_relaxed_system(address); }));
  }
  /// Ends the waits of all threads: some of the words may not arrive.
  __device__ void stop_waiting() const { *static_cast<volatile bool*>(&shared_->others) = true; }
  /// Word `idx` of the headers of all ranks.
  __device__ std::uint32_t header_word(int idx) const {
    const std::uint64_t* const address = headers_ + idx;
    return static_cast<std::uint32_t>(
        await(idx / kCountsHeaderWords, [address] { return load_acquire_system(address); }));
  }
  /// Offset of a rank's source table, once this rank may write there.
  __device__ std::int64_t source_offset(int rank) const {
    const std::uint64_t low = header_word(rank * kCountsHeaderWords);
    return static_cast<std::int64_t>(static_cast<std::uint64_t>(header_word(rank * kCountsHeaderWords + 1)) << 32 |
                                     low);
  }
  /// Calls use(source, count) for every source in order; if not `exists`, with counts of 0.
  template <typename Use>
  __device__ void for_each_source(int column, bool exists, Use use) const {
    const std::uint64_t* from = counts_ + column;
#pragma unroll 1
    for (int first = 0; first < num_ranks; first += kSourceBatch) {
      const int num = !exists ? 0 : num_ranks - first < kSourceBatch ? num_ranks - first : kSourceBatch;
      std::uint64_t words[kSourceBatch];
      Look look;
      int missing = num;
      do {
        const std::uint64_t* address = from;
#pragma unroll
        for (int i = 0; i < kSourceBatch; ++i) {
          words[i] = i < num ? load_relaxed_system(address) : 0;
          address += stride_;
        }
        missing = num;
#pragma unroll
        for (int i = kSourceBatch - 1; i >= 0; --i) missing = i < num && !is_here(words[i]) ? i : missing;
      } while (missing < num && goes_on(first + missing, look));
#pragma unroll
      for (int i = 0; i < kSourceBatch; ++i) {
        if (first + i < num_ranks)
          use(first + i, is_here(words[i]) && i < num ? static_cast<std::int32_t>(words[i]) : 0);
      }
      from += kSourceBatch * stride_;
    }
  }

 private:
  struct Look {
    unsigned spins = 0;
    std::uint64_t deadline_ns = 0;
  };
  __device__ bool is_here(std::uint64_t word) const { return word >> 32 == half_of(epoch_); }
  template <typename Load>
  __device__ std::uint64_t await(int source, Load load) const {
    Look look;
    std::uint64_t word = load();
    while (!is_here(word)) {
      if (!goes_on(source, look)) return 0;
      word = load();
    }
    return word;
  }
  __device__ bool goes_on(int source, Look& look) const {
    if (*static_cast<volatile bool*>(&shared_->others)) return false;
    if (++look.spins % kSpinsPerCheck != 0) return true;
    look.deadline_ns = look_around(*ranks_, source, epoch_, look.spins, look.deadline_ns);
    if (look.deadline_ns == 0) shared_->here = false;
    return look.deadline_ns != 0;
  }

  const RankParams* ranks_;
  Shared* shared_;
  std::uint64_t epoch_;
  const std::uint64_t* headers_;
  const std::uint64_t* counts_;
  std::size_t stride_;
};

/// Copies the headers of all ranks, except the locations of their source tables, to shared memory, and looks for a
/// header of another call. All threads call it.
__device__ inline void load_headers(const RouteParams& params, const Posted& posted, const Scratch& scratch) {
  auto* const to = reinterpret_cast<std::uint32_t*>(scratch.headers);
  constexpr int kAgreementWord = offsetof(CountsHeader, agreement) / sizeof(std::uint32_t);
  // Work begins with threads in the middle: the first and the last warps wait for words of their own.
  constexpr int kFirst = kExchangeThreads / 2;
  const int thread = (static_cast<int>(threadIdx.x) + kFirst) % kExchangeThreads;
#pragma unroll 1
  for (int i = thread; i < posted.num_ranks * kCountsHeaderWords; i += kExchangeThreads) {
    const int idx = i % kCountsHeaderWords;
    if (idx < kSourceOffsetWords) continue;
    const std::uint32_t word = posted.header_word(i);
    to[i] = word;
    if (idx == kAgreementWord && word != static_cast<std::uint32_t>(params.agreement)) posted.stop_waiting();
    if (idx == kAgreementWord + 1 && word != static_cast<std::uint32_t>(params.agreement >> 32)) posted.stop_waiting();
  }
}

}  // namespace ferry::cuda::device

#endif  // FERRY_CUDA_INTRANODE_EXCHANGE_COUNTS_CUH
