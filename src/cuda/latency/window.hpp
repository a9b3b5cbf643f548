#ifndef FERRY_CUDA_LATENCY_WINDOW_HPP
#define FERRY_CUDA_LATENCY_WINDOW_HPP

/// Memory in which a rank receives calls of latency mode: GroupOptions::latency_bytes of its arena, right behind the
/// control words, so that it has the same place and the same parts on every rank.
///
/// There are two kinds of calls, dispatch and combine. The device counts the calls of each kind from 1, apart from the
/// epochs of other calls, so that graph replays count too: the *number* of a call. A rank receives a call in one of the
/// kSets *sets* of its kind. Everything but rows travels as 8-byte words, half payload, half the lower half of the
/// call's number, so that a word is its own flag (like `entries` in sync/control.hpp): one trip, no fence.
///
///   field                     writer     order              publishes
///   grants[kind][r][n % 4]    rank r     relaxed / acquire  r's set for call n; r has read the set's earlier contents
///   headers[kind][set][s]     rank s     relaxed / relaxed  LatencyHeader: s has entered the call
///   counts[set][s][e]         rank s     relaxed / relaxed  dispatch: s's distinct tokens for expert e
///   done[set][s][b]           rank s     relaxed / acquire  combine: all stores of block b of s's send half
///   words and rows of a set   rank s     relaxed; flags of rows acquire, after a fence of the writer
///   row words[set][s]         rank s     relaxed / relaxed  combine: rows of small calls, as words
///   local                     this rank  device scope       see LatencyLocal
///   mask words                rank s     see there          see LatencyMaskWords
///
/// Ranks may receive calls in different orders, so a peer cannot know which set of a rank is free: each rank grants its
/// sets itself. At the start it grants them to the first kSets calls; later, when it has received a call, it grants
/// that call's set to the next number without a set. A kernel that makes a whole call leaves this to the next kernel of
/// its kind: no peer can wait for the grant before. So the next call of a rank has a set, whatever the rank has in
/// flight. It may have none after replays of graphs that send without receiving; then the rank refuses the call and
/// grants kNoSet: its peers send it a header, in a place of its own, and nothing else.
///
/// Slot n % kGrantSlots is free again when r grants n: every block of every peer p has read r's grant of n - 4.
///
///   - A set: r has then seen p's headers of n - 3 calls, so of call n - 3 or a later one; p sends that header in a
///     kernel behind all of call n - 4.
///   - kNoSet: r is at call n, so it has waited for p's grant of n - 1. p grants that once it has received or refused
///     n - 4 calls, so call n - 4 or a later one, in a kernel behind all that has sent them.
///
/// The division of a set into words and rows is the same for calls of all shapes: otherwise bytes of a row could pass
/// for a word. The parts of the sources are the same too, except in a combine's rows. Within the part of a source,
/// stores are in the order of the sender's kernels, so a set can be granted again without a wait for stores that no
/// thread reads.
///
///   words of a set, for each source s (its slot)         rows of a set
///   dispatch  row_flags[M] entries[M][K] weights[M][K]   [s][M] row stride: x, then its scales; each s has R-th part
///   combine   weights[M][K]                              [M][K], or [M][ranks of a token], by all; flags are done[][]
///
/// Row words: sums of a few tokens (CombineRows::words) travel as words of 16 bytes, with a third more bytes, into
/// memory of their own behind the sets. The rank that adds them up waits for them alone: no fence, no flag behind them,
/// and the sender has no blocks to wait for (LatencyHeader). Each source has its own row words, so a word without a
/// waiting reader is overwritten by its sender's next one or by none.

#include <cstddef>
#include <cstdint>

#include "cuda/sync/control.hpp"
#include "ferry/latency.hpp"
#include "plan/carver.hpp"
#include "plan/host_device.hpp"

namespace ferry::cuda {

enum class LatencyKind : int { kDispatch = 0, kCombine = 1 };
inline constexpr int kLatencyKinds = 2;

/// Sets of each kind: for the calls that a rank has in flight, and for the call that it is making.
inline constexpr int kSets = kMaxLatencyCallsInFlight + 1;
/// Value in place of a set if the rank refuses the call. Also the index of the headers that it receives in that case.
inline constexpr int kNoSet = kSets;
inline constexpr int kHeaderSets = kSets + 1;
inline constexpr int kGrantSlots = 4;

/// Bound on M: an entry's ordinal has 20 bits (pack_entry).
inline constexpr std::int64_t kMaxLatencyTokens = (std::int64_t{1} << 20) - 1;

/// A rank's part in a call, which it sends to every peer.
struct LatencyHeader {
  std::uint64_t agreement = 0;     ///< hash of arguments that must agree; 0: this rank refuses the call
  std::int64_t record_number = 0;  ///< number of the call's record in the host's CallLog
  std::int64_t num_tokens = 0;     ///< T of that rank
  /// Combine: blocks of the send half, that is, words of `done`; 0 if the rank refuses, or sends rows as words.
  /// Dispatch: hash of a placement in GPU memory, else 0.
  std::uint64_t blocks_or_homes = 0;
  std::int64_t bad_entry = -1;  ///< dispatch: index in [T, K] of the first id that is no expert, -1: all are good
  std::int64_t bad_id = 0;      ///< if no id is bad: number of entries whose expert has no home
};
/// Words of 4 bytes, one per lane of a warp.
inline constexpr int kLatencyHeaderWords = sizeof(LatencyHeader) / sizeof(std::uint32_t);
inline constexpr int kLatencyHeaderSlotWords = 16;
static_assert(kLatencyHeaderWords <= kLatencyHeaderSlotWords);

/// This rank's own words, by kind.
struct LatencyLocal {
  std::uint64_t sent[kLatencyKinds];            ///< number of calls that have been sent
  std::uint64_t granted[kLatencyKinds];         ///< last number that this rank has granted a set to
  std::uint64_t cleared[kLatencyKinds][kSets];  ///< era (see era_of) in which the set's words were cleared
  std::uint32_t owed[kLatencyKinds];  ///< 1 + set of the whole call, or receive half, before, which is not granted yet
  std::uint32_t arrivals[kLatencyKinds];  ///< blocks of the sending kernel that are done
  /// [b] by helper b of a combine: twice the call's number, and 1 more if it adds up its share (combine_receive.cuh)
  std::uint64_t helpers[kMaxCallBlocks];
  /// Ranks without a process, one bit each, and their number; 0 in groups that mask them. See absent_ranks.cuh.
  std::uint32_t absent[kMaxRanks / 32];
  std::uint32_t num_absent;
  std::uint32_t padding;
};

/// Words between peers in groups that mask lost ranks (GroupOptions::mask_lost_ranks), behind LatencyLocal. System
/// scope; they publish no other memory.
struct LatencyMaskWords {
  std::uint64_t masked_by[kMaxRanks];  ///< [s] by rank s, st.relaxed / ld.acquire. 1: it masks this rank
  std::uint64_t beats[kMaxRanks];      ///< [s] by rank s, st.relaxed / ld.relaxed. Changes while s waits
};

/// Parts whose size depends on R alone, as offsets from their start.
struct LatencyControl {
  std::int64_t grants = 0;   ///< [kinds][R][kGrantSlots]
  std::int64_t headers = 0;  ///< [kinds][kHeaderSets][R][kLatencyHeaderSlotWords]
  std::int64_t counts = 0;   ///< [kSets][R][kMaxExperts]
  std::int64_t done = 0;     ///< [kSets][R][kMaxCallBlocks]
  std::int64_t local = 0;    ///< LatencyLocal
  std::int64_t size_bytes = 0;

  static constexpr LatencyControl of(std::size_t num_ranks) {
    plan::Carver carver(nullptr);
    const auto take = [&carver](std::size_t num_words) {
      const auto at = static_cast<std::int64_t>(carver.used_bytes());
      carver.take<std::uint64_t>(num_words);
      return at;
    };
    LatencyControl control;
    control.grants = take(kLatencyKinds * num_ranks * kGrantSlots);
    control.headers = take(kLatencyKinds * kHeaderSets * num_ranks * kLatencyHeaderSlotWords);
    control.counts = take(kSets * num_ranks * kMaxExperts);
    control.done = take(kSets * num_ranks * kMaxCallBlocks);
    static_assert(sizeof(LatencyLocal) % sizeof(std::uint64_t) == 0);
    control.local = take((sizeof(LatencyLocal) + sizeof(LatencyMaskWords)) / sizeof(std::uint64_t));
    control.size_bytes = static_cast<std::int64_t>(carver.used_bytes());
    return control;
  }

  FERRY_HOST_DEVICE constexpr std::int64_t mask_words() const {
    return local + static_cast<std::int64_t>(sizeof(LatencyLocal));
  }
  /// Bytes at the start, grants and headers, that ranks also write to a rank that grants no set.
  FERRY_HOST_DEVICE constexpr std::int64_t unset_bytes() const { return counts; }
};

/// Rows begin at multiples of this: a line of the GPU's caches.
inline constexpr std::int64_t kRowAlignment = 128;
/// Share of a set that is words: 1 / kWordsShare. A token with K = 8 has 136 bytes of words; rows mostly have several
/// thousand.
inline constexpr std::int64_t kWordsShare = 16;

/// Bytes that the lanes of a warp move at once, 16 each.
inline constexpr int kWordLineBytes = 512;
/// Vectors of 16 bytes that a lane moves in a step of a row that travels as words; one word more holds them. Steps of
/// three cost a third more bytes. For few tokens, where bytes hardly count, steps of one have a warp do less in turn.
inline constexpr int kWordStepVectors = 3;
inline constexpr int kShortWordStepVectors = 1;
/// Offset of the words of the step that begins at `begin` bytes of its row.
FERRY_HOST_DEVICE constexpr int word_offset(int begin, int step_vectors) {
  return begin / step_vectors * (step_vectors + 1);
}
FERRY_HOST_DEVICE constexpr std::int64_t row_words_bytes(std::int64_t row_bytes, int step_vectors) {
  const std::int64_t step_bytes = std::int64_t{step_vectors} * kWordLineBytes;
  return (row_bytes + step_bytes - 1) / step_bytes * (step_bytes + kWordLineBytes);
}

/// Most tokens of a rank whose sums travel as words inside a node. Words of 128 took less time between two GPUs in
/// whole calls, but not in halves, and would take 35 MB more of each of eight ranks (docs/experiments-latency.md).
inline constexpr int kWordTokens = 64;
/// Most tokens whose sums travel in short steps.
inline constexpr int kShortStepTokens = 8;
/// Most ranks of calls that have kernels for few tokens, among them those with short steps.
inline constexpr int kSmallRanks = 8;
/// Most row words of a source in a set: for kWordTokens rows of 16 KiB.
inline constexpr std::int64_t kMostRowWordsBytes = kWordTokens * row_words_bytes(16384, kWordStepVectors);
/// Row words take at most 1 / kRowWordsShare of all memory: the need of groups for so few tokens.
inline constexpr std::int64_t kRowWordsShare = 2;

FERRY_HOST_DEVICE constexpr std::int64_t round_up_row(std::int64_t bytes) {
  return (bytes + kRowAlignment - 1) / kRowAlignment * kRowAlignment;
}

/// Rows of a token that come back: one for each of its entries, or for each of its ranks.
FERRY_HOST_DEVICE constexpr int num_returned_rows(CombineOrder order, int num_topk, int num_ranks) {
  return order == CombineOrder::kExact || num_topk < num_ranks ? num_topk : num_ranks;
}

/// Parts of a set that a call needs.
struct SetNeed {
  std::int64_t slot_words = 0;  ///< of each source
  std::int64_t rows_bytes = 0;

  static constexpr SetNeed of_dispatch(std::int64_t num_ranks, std::int64_t max_tokens, std::int64_t num_topk,
                                       std::int64_t row_bytes) {
    return {max_tokens * (1 + 2 * num_topk), num_ranks * max_tokens * round_up_row(row_bytes)};
  }
  /// `rows_per_token`: see num_returned_rows().
  static constexpr SetNeed of_combine(std::int64_t max_tokens, std::int64_t num_topk, std::int64_t rows_per_token,
                                      std::int64_t row_bytes) {
    return {max_tokens * num_topk, max_tokens * rows_per_token * round_up_row(row_bytes)};
  }
};

/// Places of all parts, as offsets: the same on every rank. Trivial, so that kernels take it by value.
struct LatencyLayout {
  std::int64_t offset = 0;           ///< offset of the memory in every rank's arena
  LatencyControl control;            ///< at its start
  std::int64_t set_bytes = 0;        ///< bytes of each set; [kinds][kSets] follow the control part
  std::int64_t slot_bytes = 0;       ///< words of one source, at the start of a set: [R]
  std::int64_t words_bytes = 0;      ///< words of a set; its rows follow
  std::int64_t source_bytes = 0;     ///< rows of one source of dispatch
  std::int64_t row_words = 0;        ///< offset from the start: [kSets][R]
  std::int64_t row_words_bytes = 0;  ///< of each source in a set

  /// Layout of a group that has `bytes`; all sizes are 0 if that is too little for any call.
  static constexpr LatencyLayout of(std::int64_t offset, std::int64_t bytes, std::int64_t num_ranks) {
    LatencyLayout layout;
    layout.offset = offset;
    layout.control = LatencyControl::of(static_cast<std::size_t>(num_ranks));
    if (bytes <= layout.control.size_bytes) return layout;
    const std::int64_t room = bytes - layout.control.size_bytes;
    const std::int64_t share = room / kRowWordsShare / (kSets * num_ranks);
    layout.row_words_bytes = round_down(share < kMostRowWordsBytes ? share : kMostRowWordsBytes);
    layout.set_bytes = round_down((room - kSets * num_ranks * layout.row_words_bytes) / kNumSets);
    layout.row_words = layout.control.size_bytes + kNumSets * layout.set_bytes;
    layout.slot_bytes = round_down(layout.set_bytes / kWordsShare / num_ranks);
    layout.words_bytes = layout.slot_bytes * num_ranks;
    layout.source_bytes = round_down((layout.set_bytes - layout.words_bytes) / num_ranks);
    return layout;
  }

  constexpr std::int64_t rows_bytes() const { return set_bytes - words_bytes; }
  /// Vectors of a step in which a combine's sums of `row_bytes` travel as words, or 0: they do not. The same on every
  /// rank of a call.
  constexpr int word_step_vectors(std::int64_t row_bytes, std::int64_t max_tokens, std::int64_t num_ranks) const {
    const auto fits = [this, row_bytes, max_tokens](int step_vectors) {
      return max_tokens * cuda::row_words_bytes(row_bytes, step_vectors) <= row_words_bytes;
    };
    if (max_tokens > kWordTokens) return 0;
    if (max_tokens <= kShortStepTokens && num_ranks <= kSmallRanks && fits(kShortWordStepVectors)) {
      return kShortWordStepVectors;
    }
    return fits(kWordStepVectors) ? kWordStepVectors : 0;
  }
  constexpr bool holds(const SetNeed& need, std::int64_t num_ranks) const {
    return need.slot_words * kWordBytes <= slot_bytes && need.rows_bytes <= source_bytes * num_ranks;
  }

  /// Bytes of a group whose calls need at most this.
  static constexpr std::int64_t bytes_for(const SetNeed& need, std::int64_t num_ranks) {
    // Each source rounds down to kRowAlignment, once in the words and once in the rows.
    const std::int64_t slot_bytes = (need.slot_words * kWordBytes + kRowAlignment);
    const std::int64_t of_words = slot_bytes * num_ranks * kWordsShare;
    const std::int64_t rows = need.rows_bytes + num_ranks * kRowAlignment;
    const std::int64_t of_rows = (rows * kWordsShare + kWordsShare - 2) / (kWordsShare - 1);
    const std::int64_t set_bytes = (of_words > of_rows ? of_words : of_rows) + kRowAlignment;
    const std::int64_t sets = kNumSets * set_bytes;
    const std::int64_t most_row_words = kSets * num_ranks * kMostRowWordsBytes;
    const std::int64_t share = sets / (kRowWordsShare - 1);
    return LatencyControl::of(static_cast<std::size_t>(num_ranks)).size_bytes + sets +
           (share < most_row_words ? share : most_row_words);
  }

  static constexpr std::int64_t kNumSets = std::int64_t{kLatencyKinds} * kSets;
  static constexpr std::int64_t kWordBytes = sizeof(std::uint64_t);
  static constexpr std::int64_t round_down(std::int64_t bytes) { return bytes / kRowAlignment * kRowAlignment; }
};

/// Addresses of the parts on one rank.
struct LatencyWindow {
  std::byte* base = nullptr;

  FERRY_HOST_DEVICE static constexpr LatencyWindow at(std::byte* arena_base, const LatencyLayout& layout) {
    return {arena_base + layout.offset};
  }

  FERRY_HOST_DEVICE std::uint64_t* words(std::int64_t offset) const {
    return reinterpret_cast<std::uint64_t*>(base + offset);
  }
  FERRY_HOST_DEVICE constexpr std::byte* set(const LatencyLayout& layout, LatencyKind kind, int set_idx) const {
    return base + layout.control.size_bytes + (static_cast<int>(kind) * kSets + set_idx) * layout.set_bytes;
  }
  /// Words that `source` writes.
  FERRY_HOST_DEVICE std::uint64_t* slot(const LatencyLayout& layout, LatencyKind kind, int set_idx, int source) const {
    return reinterpret_cast<std::uint64_t*>(set(layout, kind, set_idx) + source * layout.slot_bytes);
  }
  FERRY_HOST_DEVICE constexpr std::byte* rows(const LatencyLayout& layout, LatencyKind kind, int set_idx) const {
    return set(layout, kind, set_idx) + layout.words_bytes;
  }
  /// Row words that `source` writes; those of the next source of the set follow.
  FERRY_HOST_DEVICE constexpr std::byte* row_words(const LatencyLayout& layout, int num_ranks, int set_idx,
                                                   int source) const {
    return base + layout.row_words + (set_idx * num_ranks + source) * layout.row_words_bytes;
  }
};

/// Parts of a dispatch's slot.
struct DispatchSlot {
  std::uint64_t* row_flags = nullptr;  ///< [M] the row is there
  std::uint64_t* entries = nullptr;    ///< [M][K] pack_entry
  std::uint64_t* weights = nullptr;    ///< [M][K] bits of f32, if the call has weights

  FERRY_HOST_DEVICE static constexpr DispatchSlot at(std::uint64_t* slot, std::int64_t max_tokens, int num_topk) {
    return {slot, slot + max_tokens, slot + max_tokens * (1 + num_topk)};
  }
};

/// Parts of a combine's slot. M and K are those of the Routing.
struct CombineSlot {
  std::uint64_t* weights = nullptr;  ///< [M][K] bits of f32, if this combine was given weights

  FERRY_HOST_DEVICE static constexpr CombineSlot at(std::uint64_t* slot) { return {slot}; }
};

/// Payload of an entry's word: the expert, and the ordinal of the token among its source's tokens for that expert.
inline constexpr int kEntryExpertBits = 12;
static_assert(kMaxExperts <= 1 << kEntryExpertBits);
inline constexpr std::uint32_t kNoExpert = 0xFFFFFFFFU;
FERRY_HOST_DEVICE constexpr std::uint32_t pack_entry(int expert, int ordinal) {
  return static_cast<std::uint32_t>(ordinal) << kEntryExpertBits | static_cast<std::uint32_t>(expert);
}
FERRY_HOST_DEVICE constexpr int entry_expert(std::uint32_t payload) {
  return static_cast<int>(payload & ((1U << kEntryExpertBits) - 1));
}
FERRY_HOST_DEVICE constexpr int entry_ordinal(std::uint32_t payload) {
  return static_cast<int>(payload >> kEntryExpertBits);
}

}  // namespace ferry::cuda

#endif  // FERRY_CUDA_LATENCY_WINDOW_HPP
