#ifndef FERRY_CUDA_LATENCY_COMBINE_RECEIVE_CUH
#define FERRY_CUDA_LATENCY_COMBINE_RECEIVE_CUH

/// The receive half of a combine: adds up the rows that the ranks have returned for this rank's tokens, once all rows
/// are here. Ranks end at about the same time, and to track each row costs more than to wait for the last.
///
/// All blocks share the rows. In a whole call with more blocks than may wait for other ranks (docs/latency-gpus.md)
/// some are *helpers*: each waits for a moment only, and leaves its share to another block if the rows are not here by
/// then.

#include "cuda/latency/combine_parts.cuh"
#include "cuda/latency/far_words.cuh"
#include "cuda/latency/fp8_sums.cuh"
#include "cuda/latency/node_sum.cuh"
#include "cuda/latency/term_order.cuh"
#include "plan/carver.hpp"

namespace ferry::cuda::device {

/// State of a block, in dynamic shared memory.
struct CombineReceiveShared {
  int* num_blocks;        ///< [R] blocks of each rank's send half
  Terms* terms;           ///< [warps]
  NodeTerms* node_terms;  ///< [warps], with kNodes
  std::size_t size_bytes;

  FERRY_HOST_DEVICE static CombineReceiveShared at(std::byte* base, int num_ranks) {
    plan::Carver carver(base);
    CombineReceiveShared shared{};
    shared.num_blocks = carver.take<int>(static_cast<std::size_t>(num_ranks));
    shared.terms = carver.take<Terms>(kCombineWarps);
    shared.node_terms = carver.take<NodeTerms>(kCombineWarps);
    shared.size_bytes = carver.used_bytes();
    return shared;
  }
};

/// Waits until no rank stores anything of this call any more. All threads of a block; false when the group broke.
__device__ inline bool await_senders(const LatencyParams& call, const SentCall& sent, const int* num_blocks) {
  bool all = true;
#pragma unroll 1
  for (int rank = 0; rank < call.ranks.num_ranks; ++rank) {
    const std::uint64_t* words = done_words(call, call.ranks.rank, static_cast<int>(sent.set), rank);
#pragma unroll 1
    for (int block = static_cast<int>(threadIdx.x); block < num_blocks[rank]; block += kCombineThreads) {
      all = wait_word(call, {Awaited::kRow, rank, sent.number}, words + block).came && all;
    }
  }
  return __syncthreads_and(static_cast<int>(all)) != 0;
}

/// Waits for everything of the call. All threads of a block, once per warp. `routed`: CombineStart::routed.
__device__ __noinline__ inline Outcome await_combine(const LatencyParams& call, const SentCall& sent,
                                                     const CombineReceiveShared& shared, bool routed) {
  const auto take = [&shared](int rank, const ReceivedHeader& header) {
    const auto num_blocks = static_cast<int>(header.num_blocks());
    if (lane_idx() == 0) shared.num_blocks[rank] = num_blocks;
  };
  const auto set = static_cast<int>(sent.set);
  const Outcome outcome = await_headers(call, LatencyKind::kCombine, set, sent.number, take);
  if (outcome == Outcome::kStop || !await_senders(call, sent, shared.num_blocks)) return Outcome::kStop;
  if (outcome != Outcome::kGo && routed && is_clerk() && threadIdx.x == 0) {  // else the send half has reported it
    report_latency_disagreement(call, LatencyKind::kCombine, set);
  }
  return outcome;
}

/// Time that a helper waits for rows: ranks that begin together end their send halves within a few microseconds. A
/// kernel of another library that waits for the helper's multiprocessor is late by this at most.
inline constexpr std::uint64_t kHelperPatienceNs = 50'000;

__device__ inline bool is_helper(const CombineReceiveRows& params) {
  return !is_clerk() && static_cast<int>(blockIdx.x) < params.first_receiver;
}

/// Waits until everything of the call is here, but not longer than a helper may, and tells the blocks that wait whether
/// this one adds up its share. All threads of a helper, once per warp; all get the same answer.
__device__ __noinline__ inline bool await_briefly(const LatencyParams& call, const SentCall& sent) {
  const auto set = static_cast<int>(sent.set);
  const std::uint64_t end_ns = now_ns() + kHelperPatienceNs;
  const auto look_for = [&sent, end_ns](const std::uint64_t* address) {
    std::uint64_t word = load_acquire_system(address);
    while (!is_word_of(word, sent.number) && now_ns() < end_ns) word = load_acquire_system(address);
    return word;
  };
  bool here = call.agreement != 0;
#pragma unroll 1
  for (int rank = 0; rank < call.ranks.num_ranks; ++rank) {
    const std::uint64_t word = look_for(header_word(call, LatencyKind::kCombine, set, rank));
    here = here && is_word_of(word, sent.number);
    if (__all_sync(kAllLanes, static_cast<int>(here)) == 0) break;
    const ReceivedHeader received(payload_of(word));
    here = received.agreement() == call.agreement;
    const auto num_blocks = static_cast<int>(received.num_blocks());
    const std::uint64_t* const done = done_words(call, call.ranks.rank, set, rank);
#pragma unroll 1
    for (auto block = static_cast<int>(threadIdx.x); here && block < num_blocks; block += kCombineThreads) {
      here = is_word_of(look_for(done + block), sent.number);
    }
  }
  here = __syncthreads_and(static_cast<int>(here)) != 0;
  if (threadIdx.x == 0) {
    store_relaxed_system(&local_of(call).helpers[blockIdx.x], 2 * sent.number + (here ? 1 : 0));
  }
  return here;
}

/// Whether a helper has left its share to the blocks that wait. Helpers come before those in the grid, so they decide
/// whatever else runs.
__device__ inline bool has_left(const LatencyParams& call, const SentCall& sent, int helper) {
  const std::uint64_t* const word = &local_of(call).helpers[helper];
  std::uint64_t seen = 0;
  const auto read = [&seen, word] { return (seen = load_relaxed_system(word)) / 2; };
  return wait_until(call.ranks, {Awaited::kOwn, call.ranks.rank, sent.number}, read, sent.number) && seen % 2 == 0;
}

/// Kind of a receive half.
enum class Receiving {
  kRows,
  kWords,        ///< CombineRows::words
  kMasks,        ///< of rows; homes may be lost (tables.hpp)
  kNodes,        ///< of rows, over several nodes: those of far ranks lie in the inbox (far_combine.cuh)
  kWithHelpers,  ///< of rows, in a whole call. Code that is new to a multiprocessor is slow to fetch: with that of
                 ///< helpers in all kernels a call of 32 tokens took 0.8 us longer on an H100
};

/// One warp's parts of tokens, prepared as far as possible before rows are here.
template <RowKind kKind, Receiving kReceiving>
class CombineReceiver {
  static constexpr bool kFloat32 = kKind == RowKind::kFloat32;
  static constexpr bool kFp8 = kKind == RowKind::kFp8Sums;
  static constexpr bool kWords = kReceiving == Receiving::kWords;
  static constexpr bool kMasks = kReceiving == Receiving::kMasks;
  static constexpr bool kHelpers = kReceiving == Receiving::kWithHelpers;
  static constexpr bool kNodes = kReceiving == Receiving::kNodes;

 public:
  __device__ CombineReceiver(const LatencyParams& call, const CombineReceiveRows& params, const SentCall& sent,
                             const CombineReceiveShared& shared)
      : params_(params),
        call_(call),
        sent_(sent),
        shared_(shared),
        terms_(shared.terms[warp_idx() - 1]),
        window_(CombineWindow::at(call, params.rows, call.ranks.rank, static_cast<int>(sent.set))) {
    if constexpr (kNodes) {
      const FarLayout& layout = params.far.layout;
      far_words_.stride = return_word_stride(call, params.rows, layout);
      far_words_.first = params.far.inbox + layout.return_words_at(static_cast<int>(sent.set));
      far_words_.end = far_words_.first + layout.return_words_bytes;
      far_words_.layout = &layout;
      far_words_.firsts = call.tables.far_returns(params.rows.order).own_firsts;
    }
  }

  /// All lanes; calls await_combine(), or await_briefly() in a helper, once.
  __device__ Outcome receive_all() {
    bool waits = true;
    if constexpr (!kHelpers) return receive_share(first_combine_unit(), waits);
    int block = static_cast<int>(blockIdx.x);
    Outcome outcome = Outcome::kGo;
#pragma unroll 1
    do {
      outcome = receive_share(first_unit_of(block), waits);
    } while (outcome == Outcome::kGo && finds_left_share(block));
    return outcome;
  }

 private:
  /// Adds up the share of one block. `unit`: this warp's first. `waits`: for the rows, which clears it.
  __device__ Outcome receive_share(int unit, bool& waits) {
    const auto num_tokens = static_cast<int>(call_.num_tokens);
    const RowParts parts = RowParts::of(params_.rows.row_bytes, num_tokens, all_combine_warps(),
                                        part_step_bytes<kKind>(kWords, far_words_.stride != 0));
    const int num_units = num_tokens * parts.num_parts;
    Outcome outcome = Outcome::kGo;
    Entry entry = load(unit / parts.num_parts);
#pragma unroll 1
    while (outcome == Outcome::kGo && (waits || unit < num_units)) {
      const int token = unit / parts.num_parts;
      const RowPart part = RowPart::of(parts, params_.rows.row_bytes, unit % parts.num_parts);
      const bool has = unit < num_units;
      int num_rows = 0;
      if (has) num_rows = order(entry, token, part);
      unit += all_combine_warps();
      entry = load(unit / parts.num_parts);
      if (waits) outcome = await();
      waits = false;
      if (!has || outcome != Outcome::kGo) continue;
      std::byte* const out = params_.out + token * params_.out_stride + part.begin;
      if constexpr (kFp8) {
        const NodeTerms* const nodes = kNodes ? &shared_.node_terms[warp_idx() - 1] : nullptr;
        sum_fp8_rows(terms_, nodes, num_rows, {nullptr, params_.rows.row_bytes, part.begin}, out, part.bytes);
      } else if constexpr (kWords) {
        if (!sum_word_rows<kFloat32>(call_, sent_, terms_, num_rows, out, part.bytes)) return Outcome::kStop;
      } else if constexpr (kNodes) {
        const NodeTerms& node_terms = shared_.node_terms[warp_idx() - 1];
        if (far_words_.stride == 0) {
          sum_over_nodes<kFloat32>(terms_, node_terms, num_rows, out, part.bytes);
        } else if (!sum_words_over_nodes<kFloat32>(call_, sent_, terms_, node_terms, num_rows, far_words_, out,
                                                   part.bytes)) {
          return Outcome::kStop;
        }
      } else {
        sum_terms<kFloat32>(terms_, num_rows, out, part.bytes);
      }
    }
    return outcome;
  }

  __device__ Outcome await() const {
    if (kHelpers && is_helper(params_)) {
      return await_briefly(call_, sent_) ? Outcome::kGo : Outcome::kSkip;
    }
    const Outcome outcome = await_combine(call_, sent_, shared_, true);
    if constexpr (kNodes) {
      const FarParams& far = params_.far;
      if (outcome == Outcome::kGo && far_words_.stride == 0 && far.layout.in_gpu &&
          !await_all_arrived(call_, far, LatencyKind::kCombine, sent_.number)) {
        return Outcome::kStop;
      }
    }
    return outcome;
  }

  /// Finds the next helper that has left its share to this block. `block`: this block, or the helper before; then the
  /// one that was found.
  __device__ bool finds_left_share(int& block) const {
    if (is_helper(params_)) return false;
    const int own = static_cast<int>(blockIdx.x);
    const int num_waiting = static_cast<int>(gridDim.x) - params_.first_receiver;
    block = block == own ? own - params_.first_receiver + 1 : block + num_waiting;
    while (block < params_.first_receiver && !has_left(call_, sent_, block)) block += num_waiting;
    return block < params_.first_receiver;
  }

  /// This lane's entry of a token.
  struct Entry {
    std::int32_t home = -1;
    std::int32_t slot = 0;
    float weight = 1.0F;
    std::int32_t place = -1;  ///< FarReturns::own_places, with kNodes
  };

  __device__ bool exact() const { return !kWords && !kFp8 && params_.rows.order == CombineOrder::kExact; }
  /// Offset of a part in a row that is no words: FP8 rows are found from where they begin.
  __device__ static int offset_of(const RowPart& part) { return kFp8 ? 0 : part.begin; }

  __device__ Entry load(int token) const {
    Entry entry;
    if (token >= call_.num_tokens || lane_idx() >= call_.num_topk) return entry;
    const std::int64_t at = std::int64_t{token} * call_.num_topk + lane_idx();
    entry.home = call_.tables.homes[at];
    if constexpr (kNodes) entry.place = call_.tables.far_returns(params_.rows.order).own_places[at];
    if (!exact()) return entry;
    entry.slot = call_.tables.slots[at];
    entry.weight = params_.weights[at];
    return entry;
  }

  /// Orders the terms of a part of a token; returns the number of rows.
  __device__ int order(const Entry& entry, int token, const RowPart& part) const {
    if constexpr (kNodes) return order_over_nodes(entry, token, part);
    Term term;
    if (entry.home >= 0) {
      term.key = static_cast<std::uint64_t>(home_rank(entry.home)) << 32 | static_cast<std::uint32_t>(entry.slot);
    }
    term.weight = entry.weight;
    // Exact: a row lies at its first entry. Sums: at the ordinal of the rank among the token's ranks, or as words in
    // the rank's own place.
    if constexpr (kWords) {
      if (entry.home >= 0) {
        term.row = word_row(call_, params_.rows, call_.ranks.rank, static_cast<int>(sent_.set), home_rank(entry.home),
                            token, part.begin);
      }
    } else {
      term.row = window_.row(token, exact() ? lane_idx() : ordinal_of(entry.home)) + offset_of(part);
    }
    return order_terms(term, call_.num_topk, exact(), terms_).num_rows;
  }

  /// The same over several nodes.
  __device__ int order_over_nodes(const Entry& entry, int token, const RowPart& part) const {
    const FarParams& far = params_.far;
    const int rank = entry.home < 0 ? -1 : home_rank(entry.home);
    const int ordinal = exact() ? lane_idx() : ordinal_of(entry.home);
    // A sum of a rank counts once.
    const unsigned same = __match_any_sync(kAllLanes, exact() || rank < 0 ? -1 - lane_idx() : rank);
    const bool counts = rank >= 0 && (exact() || __ffs(static_cast<int>(same)) - 1 == lane_idx());
    Term term;
    if (counts) {
      term.key = static_cast<std::uint64_t>(rank) << 32 | static_cast<std::uint32_t>(exact() ? entry.slot : 0);
    }
    if (exact()) term.weight = entry.weight;
    if (rank >= 0 && far.layout.is_far(rank)) {
      term.row = far_row(rank, entry.place, offset_of(part));
    } else {
      term.row = window_.row(token, ordinal) + offset_of(part);
    }
    const TermPlace found = order_terms(term, call_.num_topk, true, terms_);
    find_ends(terms_, found, counts, rank, far.layout.ranks_per_node, shared_.node_terms[warp_idx() - 1]);
    return found.num_rows;
  }

  /// A row that a far rank returns, from byte `begin` on.
  __device__ const std::byte* far_row(int rank, std::int32_t place, int begin) const {
    const std::int32_t row = call_.tables.far_returns(params_.rows.order).own_firsts[rank] + place;
    if (far_words_.stride != 0) {
      return far_words_.first + row * far_words_.stride + word_offset(begin, kFarStepVectors);
    }
    const FarParams& far = params_.far;
    return far.inbox + far.layout.returns_at(static_cast<int>(sent_.set)) + row * params_.rows.wire_stride() + begin;
  }

  /// Number of the token's ranks below this lane's, including lost ones: senders place their rows by all ranks. All
  /// lanes.
  __device__ int ordinal_of(std::int32_t home) const {
    if constexpr (kMasks) home = home < -1 ? lost_home(home) : home;
    const int rank = home < 0 ? -1 : home_rank(home);
    const unsigned same = __match_any_sync(kAllLanes, rank);
    const bool first = rank >= 0 && __ffs(static_cast<int>(same)) - 1 == lane_idx();
    int below = 0;
#pragma unroll 1
    for (unsigned left = __ballot_sync(kAllLanes, static_cast<int>(first)); left != 0; left &= left - 1) {
      below += static_cast<int>(__shfl_sync(kAllLanes, rank, __ffs(static_cast<int>(left)) - 1) < rank);
    }
    return below;
  }

  const CombineReceiveRows& params_;
  const LatencyParams& call_;
  const SentCall& sent_;
  const CombineReceiveShared& shared_;
  Terms& terms_;
  const CombineWindow window_;
  FarRowWords far_words_;  ///< with kNodes
};

/// All threads of all blocks; false when the group broke: in all threads of a block, or with words only in some that
/// wait for rows. `routed`: CombineStart::routed.
template <RowKind kKind, Receiving kReceiving>
__device__ inline bool receive_combine(const LatencyParams& call, const CombineReceiveRows& params,
                                       const SentCall& sent, const CombineReceiveShared& shared, bool routed) {
  if (kReceiving == Receiving::kWithHelpers && is_helper(params) && (!routed || warp_idx() == 0)) {
    if (routed) await_briefly(call, sent);
    return true;
  }
  if (!routed || warp_idx() == 0 || is_clerk()) return await_combine(call, sent, shared, routed) != Outcome::kStop;
  CombineReceiver<kKind, kReceiving> receiver(call, params, sent, shared);
  return receiver.receive_all() != Outcome::kStop;
}

}  // namespace ferry::cuda::device

#endif  // FERRY_CUDA_LATENCY_COMBINE_RECEIVE_CUH
