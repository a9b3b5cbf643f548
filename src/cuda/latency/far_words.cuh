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

#include "cuda/latency/turns.cuh"

namespace ferry::cuda::device {

static_assert(kFarKinds == kLatencyKinds && kFarSets == kSets && kFarGrantSlots == kGrantSlots);
static_assert(sizeof(LatencyHeader) <= sizeof(FarHeader::words));
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

/// grant_owed_set(), also to far ranks. All lanes of one warp of one block of a kernel that sends.
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

/// Leaves the set of a receive half to the next kernel that sends a call of its kind, so that none waits for the grant
/// to arrive. Grants the set that another receive half has left since, if there is one. All lanes of one warp of the
/// last block.
__device__ inline void leave_far_set(const LatencyParams& call, const FarParams& far, LatencyKind kind,
                                     const SentCall& sent) {
  std::uint32_t left = 0;
  if (lane_idx() == 0) left = atomicExch(&local_of(call).owed[static_cast<int>(kind)], sent.set + 1);
  left = __shfl_sync(kAllLanes, left, 0);
  if (left == 0) return;
  grant_set(call, kind, sent.number, static_cast<int>(left) - 1);
  __syncwarp();
  publish_grants(call, far);
}

/// Word in which this GPU keeps the latest grant of a far rank.
__device__ inline std::uint64_t* heard_word(const FarParams& far, LatencyKind kind, int rank, std::uint64_t number) {
  return &far.state->heard[static_cast<int>(kind)][rank][number % kGrantSlots];
}

/// Keeps a grant unless a later one is there: headers may be imported out of order, by kernels of several streams. One
/// thread.
__device__ inline void keep_grant(const FarParams& far, LatencyKind kind, int rank, std::uint64_t number,
                                  std::uint64_t granted) {
  auto* const heard = reinterpret_cast<unsigned long long*>(heard_word(far, kind, rank, number));
  unsigned long long seen = *static_cast<volatile unsigned long long*>(heard);
#pragma unroll 1
  while (is_later_grant(granted, seen)) {
    const unsigned long long found = atomicCAS(heard, seen, granted);
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

__device__ inline const FarHeader& header_in(const FarParams& far, LatencyKind kind, int set, int source) {
  const FarLayout& layout = far.layout;
  return *reinterpret_cast<const FarHeader*>(far.inbox +
                                             layout.front_at(static_cast<int>(kind), set, layout.far_idx(source)));
}

/// Grant of a far rank for a call in the headers of its latest messages, which no kernel may have imported yet: with
/// several calls under way that may happen only after this one. 0: it is not there. One thread.
__device__ inline std::uint64_t grant_in_headers(const LatencyParams& call, const FarParams& far, LatencyKind kind,
                                                 int rank, std::uint64_t number) {
#pragma unroll 1
  for (int i = 0; i < kLatencyKinds; ++i) {
    const auto of = static_cast<LatencyKind>(i);
    const std::uint64_t arrived = load_acquire_system(inbox_word(far, far.layout.arrived_at(i, rank)));
    const std::uint64_t own = load_relaxed_system(grant_word(call, call.ranks.rank, of, call.ranks.rank, arrived));
    if (arrived == 0 || !is_word_of(own, arrived)) continue;
    const FarHeader& header = header_in(far, of, static_cast<int>(payload_of(own)), rank);
    const std::uint64_t word = load_relaxed_system(&header.granted[static_cast<int>(kind)][number % kGrantSlots]);
    if (is_word_of(word, number)) return word;
  }
  return 0;
}

/// Waits for the grant of a far rank for a call. One thread.
__device__ __noinline__ inline Payload await_far_grant(const LatencyParams& call, const FarParams& far,
                                                       LatencyKind kind, int rank, std::uint64_t number) {
  const std::uint64_t* const heard = heard_word(far, kind, rank, number);
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
  keep_grant(far, kind, rank, number, word);
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

/// Start of this rank's message to far rank `idx`, in the outbox.
__device__ inline FarHeader& header_out(const FarParams& far, LatencyKind kind, int idx) {
  return *reinterpret_cast<FarHeader*>(far.outbox + far.front_out(static_cast<int>(kind), idx));
}

/// Post of a message (kFarMessages) to a far rank.
__device__ inline FarPost& post_of(const FarParams& far, int message, int rank) {
  return far.posts[message * far.layout.num_ranks + rank];
}

/// Writes this rank's header and its grants to its messages. All lanes of one warp of one block.
__device__ inline void write_far_headers(const LatencyParams& call, const FarParams& far, LatencyKind kind,
                                         const LatencyHeader& header) {
  static_assert(kLatencyKinds * kGrantSlots <= kLatencyHeaderWords);
  if (lane_idx() >= kLatencyHeaderWords) return;
  const std::uint32_t word = reinterpret_cast<const std::uint32_t*>(&header)[lane_idx()];
  const int granted_kind = lane_idx() / kGrantSlots;
  const int slot = lane_idx() % kGrantSlots;
  const bool has_grant = granted_kind < kLatencyKinds;
  std::uint64_t granted = 0;
  if (has_grant) {
    granted = load_relaxed_system(grant_word(call, call.ranks.rank, static_cast<LatencyKind>(granted_kind),
                                             call.ranks.rank, static_cast<std::uint64_t>(slot)));
  }
#pragma unroll 1
  for (int idx = 0; idx < far.layout.num_far(); ++idx) {
    FarHeader& to = header_out(far, kind, idx);
    to.words[lane_idx()] = word;
    if (!has_grant) continue;
    to.granted[granted_kind][slot] = granted;
    post_of(far, static_cast<int>(kind), far.layout.far_rank(idx)).granted[granted_kind][slot] = granted;
  }
}

/// Whether this block is the last of a far kernel that sends; it then sees what all have stored. All threads.
__device__ inline bool is_last_far_block(const FarParams& far) {
  if (!is_last_block(far.state->arrivals)) return false;
  if (threadIdx.x == 0) far.state->arrivals = 0;
  return true;
}

/// Posts message `message` (kFarMessages) number `number` to a far rank. One thread.
__device__ inline void post_message(const LatencyParams& call, const FarParams& far, int message, int rank,
                                    std::uint64_t number, const FarPart& front, const FarPart& rows) {
  FarPost& post = post_of(far, message, rank);
  post.record_number = call.record_number;
  post.front = front.from;
  post.front_to = static_cast<std::uint64_t>(front.to);
  post.front_bytes = static_cast<std::uint64_t>(front.bytes);
  post.rows = rows.from;
  post.rows_to = static_cast<std::uint64_t>(rows.to);
  post.rows_bytes = static_cast<std::uint64_t>(rows.bytes);
  fence_system();
  store_relaxed_system(&post.number, number);
}

/// Posts the message of this call to far rank `idx`, which receives it in `set`. One thread of the last block.
__device__ inline void post_far(const LatencyParams& call, const FarParams& far, LatencyKind kind, int idx, int set,
                                std::uint64_t number, std::int64_t front_bytes, const FarPart& rows) {
  const FarLayout& layout = far.layout;
  const int rank = layout.far_rank(idx);
  const FarPart front =
      far.part(far.front_out(static_cast<int>(kind), idx),
               layout.front_at(static_cast<int>(kind), set, layout.far_idx_at(rank, call.ranks.rank)), front_bytes);
  post_message(call, far, static_cast<int>(kind), rank, number, front, rows);
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

/// Waits for the message of a far rank for call `number`; false when the group broke. All lanes of one warp, which then
/// see it.
__device__ inline bool await_far(const LatencyParams& call, const FarParams& far, LatencyKind kind,
                                 std::uint64_t number, int source) {
  bool came = true;
  if (lane_idx() == 0) {
    const std::uint64_t* const word = inbox_word(far, far.layout.arrived_at(static_cast<int>(kind), source));
    const auto read = [word] { return load_acquire_system(word); };
    came = wait_until(call.ranks, {Awaited::kEntry, source, number}, read, number, CallCount(call, source));
  }
  came = __all_sync(kAllLanes, static_cast<int>(came)) != 0;
  __syncwarp();
  return came;
}

/// Keeps the record of the call of a far rank, if it makes another one, where the host that reports the fault finds it.
/// One thread. A record that belongs to a fault which the host has not read stays.
__device__ __noinline__ inline void keep_record(const LatencyParams& call, const FarParams& far, LatencyKind kind,
                                                int set, int source, bool differs) {
  std::uint32_t& kept = far.state->kept[source];
  if (!differs && kept == 0) return;
  if (load_acquire_system(&call.ranks.report->fault.state) != 0) return;
  const FarLayout& layout = far.layout;
  const int node = source / layout.ranks_per_node;
  const int num_nodes = layout.num_ranks / layout.ranks_per_node;
  FoundRecord& found = far.found[(source - node * layout.ranks_per_node) * num_nodes + node];
  const auto& arrived = *reinterpret_cast<const FoundRecord*>(
      far.inbox + layout.record_at(static_cast<int>(kind), set, layout.far_idx(source)));
  kept = differs && arrived.present != 0 ? 1 : 0;
  found.present = kept;
  if (kept == 0) return;
  const auto* const from = reinterpret_cast<const std::uint64_t*>(&arrived.record);
  auto* const to = reinterpret_cast<std::uint64_t*>(&found.record);
  static_assert(sizeof(CallRecord) % sizeof(std::uint64_t) == 0);
#pragma unroll 1
  for (std::size_t i = 0; i < sizeof(CallRecord) / sizeof(std::uint64_t); ++i) to[i] = from[i];
}

/// This lane's word of a header's first line, all of which a warp has after one trip to host memory: each further load
/// from the same line would wait for those before it.
__device__ inline std::uint32_t word_of_header(const FarHeader& header) {
  static_assert(offsetof(FarHeader, granted) == kWarpLanes * sizeof(std::uint32_t));
  static_assert(sizeof(FarHeader::words) == 16 * sizeof(std::uint32_t));
  return reinterpret_cast<const std::uint32_t*>(&header)[lane_idx()];
}

/// Keeps in memory of the GPU what the next calls need: the grants in the header of a message that has come, and which
/// messages to its source have left. Behind all that others wait for. All lanes of one warp.
__device__ inline void keep_words(const FarParams& far, LatencyKind kind, int set, int source) {
  constexpr int kGrants = kLatencyKinds * kGrantSlots;
  const int lane = lane_idx();
  if (lane < kGrants) {
    const auto granted_kind = static_cast<LatencyKind>(lane / kGrantSlots);
    const auto slot = static_cast<std::uint64_t>(lane % kGrantSlots);
    keep_grant(far, granted_kind, source, slot, header_in(far, kind, set, source).granted[lane / kGrantSlots][slot]);
  } else if (const int message = lane - kGrants; message < kFarMessages) {
    keep_left(far, message, source, load_acquire_system(far.left + message * far.layout.num_ranks + source));
  }
}

/// Value of 8 bytes at this offset of a header's first line. `word`: word_of_header(). All lanes.
__device__ inline std::int64_t field_of_header(std::uint32_t word, std::size_t offset_bytes) {
  const auto first = static_cast<int>(offset_bytes / sizeof(word));
  const std::uint64_t low = __shfl_sync(kAllLanes, word, first);
  return static_cast<std::int64_t>(static_cast<std::uint64_t>(__shfl_sync(kAllLanes, word, first + 1)) << 32 | low);
}

/// Writes a far rank's header into this rank's window. Returns whether that rank makes the same call. `word`:
/// word_of_header(). All lanes of one warp.
__device__ inline bool import_header(const LatencyParams& call, const FarParams& far, LatencyKind kind,
                                     const SentCall& sent, int source, std::uint32_t word) {
  const auto set = static_cast<int>(sent.set);
  const ReceivedHeader received(word);
  const bool same = received.agreement() == call.agreement && call.agreement != 0;
  if (lane_idx() == 0) keep_record(call, far, kind, set, source, !same);
  __syncwarp();
  if (lane_idx() < kLatencyHeaderWords) {
    post_word(header_words(call, call.ranks.rank, kind, set, source) + lane_idx(), sent.number, word);
  }
  return same;
}

}  // namespace ferry::cuda::device

#endif  // FERRY_CUDA_LATENCY_FAR_WORDS_CUH
