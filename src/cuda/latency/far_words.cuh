#ifndef FERRY_CUDA_LATENCY_FAR_WORDS_CUH
#define FERRY_CUDA_LATENCY_FAR_WORDS_CUH

/// Turns and messages of calls between nodes (cuda/far/params.hpp).
///
/// The part of a call inside a node knows far ranks only as ranks without a set: what it sends such ranks, a header and
/// grants, lands in this rank's own window, in places that hold the same words, and what far ranks have sent is written
/// into the window as if they had written it there. A refusal has kernels of its own for that; before it is sent, one
/// posts kNoSet in the window for each far rank.

#include <cstddef>
#include <cstdint>

#include "cuda/latency/far_message.hpp"
#include "cuda/latency/far_post.cuh"
#include "cuda/latency/far_records.cuh"
#include "cuda/latency/far_word.cuh"
#include "cuda/latency/turns.cuh"

namespace ferry::cuda::device {

static_assert(kFarKinds == kLatencyKinds && kFarSets == kSets && kFarGrantSlots == kGrantSlots);
static_assert(kLatencyHeaderWords + kNumFarFields <= kFarGrantWords * kFarWordPayloads);
static_assert(era_of(kFarEra - 1) == 0 && era_of(kFarEra) == 1);

__device__ inline const std::uint64_t* inbox_word(const FarParams& far, std::int64_t offset) {
  return reinterpret_cast<const std::uint64_t*>(far.inbox + offset);
}

/// Reports data that no rank of this build sends. One thread.
__device__ __noinline__ inline void refuse_message(const LatencyParams& call, int source, std::uint64_t number) {
  declare_lost(call.ranks, {Awaited::kRailProtocol, source, number}, {});
}

/// Tells far ranks which sets this rank has granted, unless they have been told. All lanes of one warp.
__device__ inline void publish_grants(const LatencyParams& call, const FarParams& far) {
  if (lane_idx() >= kLatencyKinds * kGrantSlots) return;
  const auto kind = static_cast<LatencyKind>(lane_idx() / kGrantSlots);
  const auto slot = static_cast<std::uint64_t>(lane_idx() % kGrantSlots);
  const std::uint64_t* const own = grant_word(call, call.ranks.rank, kind, call.ranks.rank, slot);
  std::uint64_t& published = far.state->published[lane_idx()];
  std::uint64_t word = load_relaxed_system(&published);
  // Until it is the latest: a kernel of another stream may have granted and published a set meanwhile.
#pragma unroll 1
  for (std::uint64_t latest = load_relaxed_system(own); latest != word; latest = load_relaxed_system(own)) {
    word = latest;
    store_relaxed_system(far.granted + lane_idx(), word);
    fence_system();
    store_relaxed_system(&published, word);
  }
}

/// grant_owed_set(), also to far ranks, while other blocks send. All lanes of one warp of the first block of a kernel
/// that sends.
__device__ inline void grant_far_owed_set(const LatencyParams& call, const FarParams& far, LatencyKind kind,
                                          std::uint64_t number) {
  grant_owed_set(call, kind, number);
  __syncwarp();
  publish_grants(call, far);
}

/// Tells far ranks what they may wait for, before this rank waits for them. If this call or the next may be the one to
/// get the owed set, grants that too, so that the header of this call carries the grant. All lanes of one warp of one
/// block, before the barrier that the warp which writes headers passes.
__device__ inline void begin_far_grants(const LatencyParams& call, const FarParams& far, LatencyKind kind) {
  const TurnLook turn(call, kind);
  const bool urgent = turn.granted <= turn.number;  // only while other calls are in flight
  if (__any_sync(kAllLanes, static_cast<int>(urgent)) != 0) grant_owed_set(call, kind, turn.number);
  __syncwarp();
  publish_grants(call, far);
}

/// Clears the counts of places for dispatch `number` + 1, which dispatch `number` - 1 has used. Threads `first`,
/// `first` + `step`, … of one block of each kernel that uses up a number of a dispatch.
__device__ inline void clear_next_places(const FarParams& far, std::uint64_t number, int first, int step) {
  FarPlaces& next = far.state->places[(number + 1) % 2];
#pragma unroll 1
  for (int rank = first; rank < far.layout.num_ranks; rank += step) next.rows[rank] = next.returns[rank] = 0;
}

/// Clears the words of an inbox's set once per era, as clear_words() does: makes them words of the call that was just
/// received. All lanes of one warp.
__device__ __noinline__ inline void clear_far_words(const FarParams& far, LatencyKind kind, const SentCall& sent) {
  const FarLayout& layout = far.layout;
  const auto set = static_cast<int>(sent.set);
  const bool combines = kind == LatencyKind::kCombine;
  const auto clear = [&far, &sent](std::int64_t at, std::int64_t num_bytes) {
#pragma unroll 1
    for (std::int64_t i = lane_idx(); i < num_bytes / kFarWordBytes; i += kWarpLanes) {
      // Grants in headers, which are the lower halves of words, remain.
      reinterpret_cast<WideWord*>(far.inbox + at)[i].high = make_word(sent.number, 0);
    }
  };
#pragma unroll 1
  for (int idx = 0; idx < layout.num_far(); ++idx) {
    const std::int64_t before = combines ? 0 : layout.words_before_header();
    const std::int64_t behind = combines ? layout.sum_words_bytes : 0;
    clear(layout.header_at(static_cast<int>(kind), set, idx) - before, before + kFarHeaderBytes + behind);
    if (combines) clear(layout.weights_at(set, idx), layout.weights_bytes);
  }
  if (combines) clear(layout.return_words_at(set), layout.return_words_bytes);
  fence_device();  // a kernel of another stream may grant the set
  __syncwarp();
  if (lane_idx() == 0) far.state->cleared[static_cast<int>(kind)][set] = era_of(sent.number);
}

/// Whether the words of a set are to be cleared at the end of a receive half: once per era. The same in all blocks
/// until the last of them clears.
__device__ inline bool clears_far_set(const FarParams& far, LatencyKind kind, const SentCall& sent) {
  return *static_cast<volatile std::uint64_t*>(&far.state->cleared[static_cast<int>(kind)][sent.set]) !=
         era_of(sent.number);
}

/// Leaves the set of a receive half to the next kernel that sends a call of its kind, so that none waits for the grant
/// to arrive. Grants the set that another receive half has left since, if there is one. All lanes of one warp of the
/// last block.
__device__ inline void leave_far_set(const LatencyParams& call, const FarParams& far, LatencyKind kind,
                                     const SentCall& sent) {
  if (clears_far_set(far, kind, sent)) [[unlikely]]
    clear_far_words(far, kind, sent);
  std::uint32_t left = 0;
  if (lane_idx() == 0) left = atomicExch(&local_of(call).owed[static_cast<int>(kind)], sent.set + 1);
  left = __shfl_sync(kAllLanes, left, 0);
  if (left == 0) return;
  grant_set(call, kind, sent.number, static_cast<int>(left) - 1);
  __syncwarp();
  publish_grants(call, far);
}

/// The same in a half of a small call, which as a rule does not wait for its last block: the next kernel that sends a
/// call of its kind comes behind this one, as inside a node (leave_receive_half). All threads of all blocks.
/// `clears`: clears_far_set(). Not in the first block: enter_receive_half() comes before, unless it clears.
__device__ inline void leave_small_far_half(const LatencyParams& call, const FarParams& far, LatencyKind kind,
                                            SentCall& words, const SentCall& sent, bool clears) {
  if (!clears) {
    if (blockIdx.x == 0 && warp_idx() == 0 && leave_receive_half(call, kind, words, sent)) publish_grants(call, far);
    return;
  }
  if (!is_last_block(words.arrivals)) return;
  if (threadIdx.x == 0) {
    words.pending = 0;
    words.arrivals = 0;
  }
  if (warp_idx() == 0) leave_far_set(call, far, kind, sent);
}

/// Word in which this GPU keeps the latest grant of a far rank.
__device__ inline std::uint64_t* heard_word(const FarParams& far, LatencyKind kind, int rank, std::uint64_t number) {
  return &far.state->heard[static_cast<int>(kind)][rank][number % kGrantSlots];
}

/// Keeps a grant in heard_word(), which had `seen` in it, unless a later one is there: headers may be imported out of
/// order, by kernels of several streams. One thread.
__device__ inline void keep_grant(std::uint64_t* heard, unsigned long long seen, std::uint64_t granted) {
#pragma unroll 1
  while (is_later_grant(granted, seen)) {
    const unsigned long long found = atomicCAS(reinterpret_cast<unsigned long long*>(heard), seen, granted);
    if (found == seen) break;
    seen = found;
  }
}

/// Keeps the number of a message that has left. Other kernels may have seen a later one. One thread.
__device__ inline void keep_left(const FarParams& far, int message, int rank, std::uint64_t number) {
  atomicMax(reinterpret_cast<unsigned long long*>(&far.state->seen_left[message][rank]), number);
}

/// Words that await_far_turn() needs, loaded before the number of the call is known, together with those for which
/// GrantsLook waits. All lanes of one warp.
struct FarLook {
  static constexpr int kRanks = kWarpLanes / kGrantSlots;
  std::uint64_t heard = 0;  ///< of far rank lane / kGrantSlots, in slot lane % kGrantSlots
  std::uint64_t left = 0;   ///< of far rank `lane`

  __device__ FarLook() {}
  __device__ FarLook(const FarParams& far, LatencyKind kind) {
    const FarLayout& layout = far.layout;
    const int lane = lane_idx();
    if (lane / kGrantSlots < layout.num_far()) {
      const auto slot = static_cast<std::uint64_t>(lane % kGrantSlots);
      heard = load_relaxed_system(heard_word(far, kind, layout.far_rank(lane / kGrantSlots), slot));
    }
    if (lane < layout.num_far()) {
      left = load_relaxed_system(&far.state->seen_left[static_cast<int>(kind)][layout.far_rank(lane)]);
    }
  }
  /// Lane i gets the grant of far rank i, for the first kRanks. All lanes.
  __device__ std::uint64_t grant_of(std::uint64_t number) const {
    return __shfl_sync(kAllLanes, heard, lane_idx() % kRanks * kGrantSlots + static_cast<int>(number % kGrantSlots));
  }
};

/// Waits for a word in memory of the GPU that the first block of this kernel passes on. One thread of another block.
template <typename Read>
__device__ inline bool await_passed(const LatencyParams& call, std::uint64_t number, Read read,
                                    std::uint64_t expected) {
  return wait_until(call.ranks, {Awaited::kOwn, call.ranks.rank, number}, read, expected);
}

__device__ inline const std::byte* header_in(const FarParams& far, LatencyKind kind, int set, int source) {
  const FarLayout& layout = far.layout;
  return far.inbox + layout.header_at(static_cast<int>(kind), set, layout.far_idx(source));
}
/// Word of a header that holds a grant.
__device__ inline const WideWord* granted_in(const std::byte* header, LatencyKind kind, std::uint64_t number) {
  return reinterpret_cast<const WideWord*>(header) + kFarGrantWords + static_cast<int>(kind) * kFarGrantSlots +
         static_cast<int>(number % kFarGrantSlots);
}

/// Grant of a far rank for a call in the headers of its latest messages, which no kernel may have imported yet: with
/// several calls under way that may happen only after this one. 0: it is not there. One thread.
__device__ inline std::uint64_t grant_in_headers(const LatencyParams& call, const FarParams& far, LatencyKind kind,
                                                 int rank, std::uint64_t number) {
#pragma unroll 1
  for (int i = 0; i < kLatencyKinds * kGrantSlots; ++i) {
    const auto of = static_cast<LatencyKind>(i / kGrantSlots);
    const auto slot = static_cast<std::uint64_t>(i % kGrantSlots);
    const std::uint64_t own = load_relaxed_system(grant_word(call, call.ranks.rank, of, call.ranks.rank, slot));
    if (own == 0) continue;
    const std::byte* const header = header_in(far, of, static_cast<int>(payload_of(own)), rank);
    const WideWord* const granted = granted_in(header, kind, number);
    // Only that of the latest call in that set: an older one's grant may be of an earlier era. Acquired, since half of
    // a word is used (load_wide_relaxed_system).
    if (load_acquire_system(&granted->high) >> 32 != own >> 32) continue;
    const std::uint64_t word = load_relaxed_system(&granted->low);
    if (is_word_of(word, number)) return word;
  }
  return 0;
}

/// Waits for the grant of a far rank for a call. One thread.
__device__ __noinline__ inline Payload await_far_grant(const LatencyParams& call, const FarParams& far,
                                                       LatencyKind kind, int rank, std::uint64_t number) {
  std::uint64_t* const heard = heard_word(far, kind, rank, number);
  std::uint64_t word = load_relaxed_system(heard);
  const auto read_heard = [&word, heard, number] {
    word = load_relaxed_system(heard);
    return is_word_of(word, number) ? number : 0;
  };
  if (is_word_of(word, number)) return {payload_of(word), true};
  if (blockIdx.x != 0) {
    const bool came = await_passed(call, number, read_heard, number);
    return {payload_of(word), came};
  }
  const std::uint64_t* const grant = inbox_word(far, far.layout.grant_at(static_cast<int>(kind), rank, number));
  const auto read = [&] {
    if (read_heard() == number) return number;
    word = load_relaxed_system(grant);
    if (!is_word_of(word, number)) word = grant_in_headers(call, far, kind, rank, number);
    return is_word_of(word, number) ? number : 0;
  };
  if (!wait_until(call.ranks, {Awaited::kDone, rank, number}, read, number, CallCount(call, rank))) return {};
  keep_grant(heard, load_relaxed_system(heard), word);
  return {payload_of(word), true};
}

/// Waits until message `wanted` of this kind to a far rank has left, for the turn of call `number`. One thread.
__device__ __noinline__ inline bool await_left(const LatencyParams& call, const FarParams& far, int message, int rank,
                                               std::uint64_t number, std::uint64_t wanted) {
  const std::uint64_t* const seen_left = &far.state->seen_left[message][rank];
  const auto read_seen = [seen_left] { return load_acquire_system(seen_left); };
  if (read_seen() >= wanted) return true;
  if (blockIdx.x != 0) return await_passed(call, number, read_seen, wanted);
  const std::uint64_t* const left = far.left + message * far.layout.num_ranks + rank;
  std::uint64_t last = 0;
  const auto read = [&last, left] { return last = load_acquire_system(left); };
  if (!wait_until(call.ranks, {Awaited::kDone, rank, number}, read, wanted, CallCount(call, rank))) return false;
  keep_left(far, message, rank, last);
  return true;
}

/// Waits for the sets in which far ranks receive this call, `sets` [R], and until the messages of the call before have
/// left; with `weighs` also the weights that were sent last. `look`: words loaded before. All lanes of one warp of each
/// block; false in all of them when the group broke. The first block, which alone looks at words in host memory, is the
/// first that runs: blocks that read one line there wait for each other (kFarWordStride).
__device__ inline bool await_far_turn(const LatencyParams& call, const FarParams& far, LatencyKind kind,
                                      std::uint64_t number, int* sets, const FarLook& look, bool weighs = false) {
  const FarLayout& layout = far.layout;
  bool all = !is_broken(call.ranks);
  const std::uint64_t looked = look.grant_of(number);
#pragma unroll 1
  for (int idx = lane_idx(); idx < layout.num_far() && all; idx += kWarpLanes) {
    const int rank = layout.far_rank(idx);
    const bool has_grant = idx < FarLook::kRanks && is_word_of(looked, number);
    const bool has_left = idx < kWarpLanes && look.left >= number - 1;
    const Payload set = has_grant ? Payload{payload_of(looked), true} : await_far_grant(call, far, kind, rank, number);
    if (set.came && set.value > kNoSet) {
      declare_lost(call.ranks, {Awaited::kRailProtocol, rank, number}, {});
      all = false;
      break;
    }
    all = set.came && (has_left || await_left(call, far, static_cast<int>(kind), rank, number, number - 1)) &&
          (!weighs || await_left(call, far, kFarWeights, rank, number, far.state->weighed[rank]));
    sets[rank] = static_cast<int>(set.value);
  }
  const bool every = __all_sync(kAllLanes, static_cast<int>(all)) != 0;
  __syncwarp();
  return every;
}

/// Lets the half that follows take far ranks for ranks without a set. All lanes of one warp of one block.
__device__ inline void hide_far_ranks(const LatencyParams& call, const FarParams& far, LatencyKind kind,
                                      std::uint64_t number) {
#pragma unroll 1
  for (int idx = lane_idx(); idx < far.layout.num_far(); idx += kWarpLanes) {
    post_word(grant_word(call, call.ranks.rank, kind, far.layout.far_rank(idx), number), number, kNoSet);
  }
}

/// Header of this rank's message to far rank `idx`, in the outbox.
__device__ inline std::byte* header_out(const FarParams& far, LatencyKind kind, int idx) {
  return far.outbox + far.header_out(static_cast<int>(kind), idx);
}

/// Writes this rank's header and its grants to its messages; FarFields are 0. All lanes of one warp of one block.
__device__ inline void write_far_headers(const LatencyParams& call, const FarParams& far, LatencyKind kind,
                                         std::uint64_t number, const LatencyHeader& header) {
  static_assert(kLatencyHeaderWords % kFarWordPayloads == 0);
  if (lane_idx() >= kFarHeaderWords) return;
  const int grant = lane_idx() - kFarGrantWords;
  const int granted_kind = grant / kGrantSlots;
  const int slot = grant % kGrantSlots;
  WideWord word = make_far_word(number, 0, 0, 0);
  if (grant >= 0) {
    word.low = load_relaxed_system(grant_word(call, call.ranks.rank, static_cast<LatencyKind>(granted_kind),
                                              call.ranks.rank, static_cast<std::uint64_t>(slot)));
  } else if (lane_idx() < kLatencyHeaderWords / kFarWordPayloads) {
    const auto* const payloads = reinterpret_cast<const std::uint32_t*>(&header) + lane_idx() * kFarWordPayloads;
    word = make_far_word(number, payloads[0], payloads[1], payloads[2]);
  }
#pragma unroll 1
  for (int idx = 0; idx < far.layout.num_far(); ++idx) {
    store_wide_relaxed_system(reinterpret_cast<WideWord*>(header_out(far, kind, idx)) + lane_idx(), word);
    if (grant < 0) continue;
    post_of(far, static_cast<int>(kind), far.layout.far_rank(idx)).granted[granted_kind][slot] = word.low;
  }
}

/// The fields of a dispatch's header that has come. All lanes of one warp.
__device__ inline FarFields fields_of(const LaneFarWords& header) {
  FarFields fields{};
  auto* const payloads = reinterpret_cast<std::uint32_t*>(&fields);
#pragma unroll
  for (int i = 0; i < kNumFarFields; ++i) payloads[i] = header.payload(kLatencyHeaderWords + i);
  return fields;
}

/// Whether a rank of this build sends such fields with so many tokens.
__device__ inline bool are_sound(const LatencyParams& call, const FarFields& fields, std::int64_t num_tokens) {
  const auto [num_rows, num_returns, first_return, first_sum] = fields;
  const std::int64_t most_returns = call.max_tokens * call.num_topk;
  const std::int64_t most_sums =
      call.max_tokens * num_returned_rows(CombineOrder::kRankSums, call.num_topk, call.ranks.num_ranks);
  return num_tokens >= 0 && num_tokens <= call.max_tokens && num_rows >= 0 && num_rows <= num_tokens &&
         num_returns >= 0 && first_return >= 0 && num_returns <= most_returns &&
         first_return <= most_returns - num_returns && first_sum >= 0 && first_sum <= most_sums - num_rows;
}

/// Writes the fields of a dispatch's header. One thread, behind write_far_headers().
__device__ inline void write_far_fields(std::byte* header, std::uint64_t number, const FarFields& fields) {
  constexpr int kFirst = kLatencyHeaderWords / kFarWordPayloads;
  const auto* const payloads = reinterpret_cast<const std::uint32_t*>(&fields);
  const auto payload_at = [payloads](int idx) { return idx < kNumFarFields ? payloads[idx] : 0; };
  std::byte* const words = header + kFirst * kFarWordBytes;
  store_far_word(words, 0, number, payload_at);
  store_far_word(words, 1, number, payload_at);
}

/// The part of this call's message to far rank `idx` that has the header: from `begin` to `end`, offsets from it.
__device__ inline FarPart part_with_header(const LatencyParams& call, const FarParams& far, LatencyKind kind, int idx,
                                           int set, std::int64_t begin, std::int64_t end) {
  const FarLayout& layout = far.layout;
  const int own_idx = layout.far_idx_at(layout.far_rank(idx), call.ranks.rank);
  return far.part(far.header_out(static_cast<int>(kind), idx) + begin,
                  layout.header_at(static_cast<int>(kind), set, own_idx) + begin, end - begin);
}

/// The exclusive prefix sum of `value` over the lanes of a warp, and the sum in `total`.
__device__ inline std::int32_t prefix_sum(std::int32_t value, std::int32_t& total) {
  std::int32_t sum = value;
#pragma unroll 1
  for (int distance = 1; distance < kWarpLanes; distance *= 2) {
    const std::int32_t below = __shfl_up_sync(kAllLanes, sum, static_cast<unsigned>(distance));
    if (lane_idx() >= distance) sum += below;
  }
  total = __shfl_sync(kAllLanes, sum, kWarpLanes - 1);
  return sum - value;
}

/// Waits until all of a far rank's message for call `number` is there; false when the group broke. One thread, which
/// then sees it.
__device__ __noinline__ inline bool await_message(const LatencyParams& call, const FarParams& far, LatencyKind kind,
                                                  std::uint64_t number, int source) {
  const std::uint64_t* const word = inbox_word(far, far.layout.arrived_at(static_cast<int>(kind), source));
  const auto read = [word] { return load_acquire_system(word); };
  return wait_until(call.ranks, {Awaited::kEntry, source, number}, read, number, CallCount(call, source));
}

/// The same for all lanes of one warp.
__device__ inline bool await_arrived(const LatencyParams& call, const FarParams& far, LatencyKind kind,
                                     std::uint64_t number, int source) {
  const bool came = lane_idx() != 0 || await_message(call, far, kind, number, source);
  const bool all = __all_sync(kAllLanes, static_cast<int>(came)) != 0;
  __syncwarp();
  return all;
}

/// The same for the messages of all far ranks.
__device__ inline bool await_all_arrived(const LatencyParams& call, const FarParams& far, LatencyKind kind,
                                         std::uint64_t number) {
  bool came = true;
#pragma unroll 1
  for (int idx = lane_idx(); came && idx < far.layout.num_far(); idx += kWarpLanes) {
    came = await_message(call, far, kind, number, far.layout.far_rank(idx));
  }
  const bool all = __all_sync(kAllLanes, static_cast<int>(came)) != 0;
  __syncwarp();
  return all;
}

/// Waits for the header of a far rank's message of a call, which `words` then holds; in memory of the host for all of
/// the message. False when the group broke. All lanes of one warp.
__device__ inline bool await_far_header(const LatencyParams& call, const FarParams& far, LatencyKind kind,
                                        const SentCall& sent, int source, LaneFarWords& words) {
  if (!far.layout.in_gpu && !await_arrived(call, far, kind, sent.number, source)) return false;
  const std::byte* const header = header_in(far, kind, static_cast<int>(sent.set), source);
  words = LaneFarWords(header, kFarHeaderWords);
  return await_part(call, {Awaited::kEntry, source, sent.number}, header, kFarHeaderWords, words);
}

/// Writes a far rank's header into this rank's window. Returns whether that rank makes the same call. `header`: its
/// words. All lanes of one warp.
__device__ inline bool import_header(const LatencyParams& call, const FarParams& far, LatencyKind kind,
                                     const SentCall& sent, int source, const LaneFarWords& header) {
  const std::uint32_t word = header.payload(lane_idx());
  const auto set = static_cast<int>(sent.set);
  const ReceivedHeader received(word);
  const bool same = received.agreement() == call.agreement && call.agreement != 0;
  if (!same && lane_idx() == 0) keep_record(call, far, kind, set, source);
  __syncwarp();
  if (lane_idx() < kLatencyHeaderWords) {
    post_word(header_words(call, call.ranks.rank, kind, set, source) + lane_idx(), sent.number, word);
  }
  return same;
}

}  // namespace ferry::cuda::device

#endif  // FERRY_CUDA_LATENCY_FAR_WORDS_CUH
