#ifndef FERRY_CUDA_LATENCY_COMBINE_SEND_CUH
#define FERRY_CUDA_LATENCY_COMBINE_SEND_CUH

/// The send half of a combine: sends the outputs of this rank's experts for each token back to the token's source, into
/// the set in which that rank receives this call. Waits for no rows.

#include <type_traits>

#include "cuda/copy/prefetch.cuh"
#include "cuda/copy/warp_copy.cuh"
#include "cuda/latency/absent_ranks.cuh"
#include "cuda/latency/combine_parts.cuh"
#include "cuda/latency/fp8_sums.cuh"
#include "cuda/latency/term_order.cuh"
#include "cuda/latency/tile_wait.cuh"
#include "cuda/sync/entry.cuh"
#include "plan/carver.hpp"

namespace ferry::cuda::device {

/// State of a block, in dynamic shared memory.
struct CombineSendShared {
  std::uint64_t* number;
  int* sets;     ///< [R] set in which each rank receives this call; kNoSet for ranks of other nodes
  Terms* terms;  ///< [warps]
  // Only in groups of several nodes:
  int* far_sets;             ///< [R] the same for ranks of other nodes
  std::int32_t* far_firsts;  ///< [R] place of the first row for each of these in FarCombineParams::returns
  std::size_t size_bytes;

  FERRY_HOST_DEVICE static CombineSendShared at(std::byte* base, int num_ranks, bool over_nodes = false) {
    plan::Carver carver(base);
    CombineSendShared shared{};
    shared.number = carver.take<std::uint64_t>(1);
    shared.sets = carver.take<int>(static_cast<std::size_t>(num_ranks));
    shared.terms = carver.take<Terms>(kCombineWarps);
    if (over_nodes) {
      shared.far_sets = carver.take<int>(static_cast<std::size_t>(num_ranks));
      shared.far_firsts = carver.take<std::int32_t>(static_cast<std::size_t>(num_ranks));
    }
    shared.size_bytes = carver.used_bytes();
    return shared;
  }
};

/// Address at `rank` of the weights of tokens of `source`.
__device__ inline std::uint64_t* weight_words(const LatencyParams& call, int rank, int set, int source) {
  return CombineSlot::at(window_of(call, rank).slot(call.layout, LatencyKind::kCombine, set, source)).weights;
}

/// Waits in this rank's `set` until `source` has sent the weight of its entry. Also ends if the source makes another
/// call: then the sum is not used.
__device__ inline Payload await_weight(const LatencyParams& call, std::uint64_t number, int set, int source,
                                       int entry) {
  const std::uint64_t* const word = weight_words(call, call.ranks.rank, set, source) + entry;
  const std::uint64_t seen = look_for_word(call, number, word);
  if (is_word_of(seen, number)) return {payload_of(seen), true};
  return await_unless_other(call, LatencyKind::kCombine, set, {Awaited::kEntry, source, number}, word).payload;
}

/// Weight of an entry of this rank's tokens, for the rank that adds up its rows.
struct OwnWeight {
  int entry = 0;
  std::int32_t home = -1;
  float weight = 0;

  OwnWeight() = default;
  /// `entry_idx` may be beyond the last entry.
  __device__ OwnWeight(const CombineSendParams& params, int entry_idx) : entry(entry_idx) {
    if (!exists(params)) return;
    home = params.call.tables.homes[entry];
    weight = params.weights[entry];
  }
  __device__ bool exists(const CombineSendParams& params) const {
    return entry < static_cast<int>(params.call.num_tokens) * params.call.num_topk;
  }
};

/// Posts a weight to the rank that adds up the entry's row, if there is such a rank and it receives the call.
__device__ inline void post_weight(const LatencyParams& call, std::uint64_t number, const int* sets,
                                   const OwnWeight& own) {
  if (own.home < 0) return;
  const int rank = home_rank(own.home);
  if (sets[rank] == kNoSet) return;
  post_word(weight_words(call, rank, sets[rank], call.ranks.rank) + own.entry, number, __float_as_uint(own.weight));
}

/// Sends the weights of this rank's tokens. `first`: this thread's first. All threads of all blocks.
__device__ __noinline__ inline void send_weights(const CombineSendParams& params, const CombineSendShared& shared,
                                                 OwnWeight first) {
#pragma unroll 1
  while (first.exists(params)) {
    post_weight(params.call, *shared.number, shared.sets, first);
    first = OwnWeight(params, first.entry + static_cast<int>(gridDim.x) * kCombineThreads);
  }
}

/// Posts this rank's header to the peers. First warp of the first block. `kWords`: no flags follow the rows.
template <bool kWords>
__device__ inline void announce(const LatencyParams& call, bool routed, std::uint64_t number, const int* sets) {
  LatencyHeader header;
  header.agreement = routed ? call.agreement : 0;
  header.record_number = call.record_number;
  header.num_tokens = call.num_tokens;
  header.blocks_or_homes = kWords ? 0 : static_cast<std::uint64_t>(num_adding_blocks());
  post_header(call, LatencyKind::kCombine, number, header, sets);
}

/// Waits for the call's turn; false when the group broke. All threads of a block, each warp where it first needs the
/// turn. `wait` is the first warp's wait for all of them.
template <typename WaitForTurn>
__device__ inline bool meet_at_turn(const CombineSendParams& params, const CombineSendShared& shared, bool routed,
                                    WaitForTurn wait) {
  const bool weighs = params.own_weights && params.rows.order == CombineOrder::kRankSums;
  // The first block sends the first weights, and its first warp the last of those, since it also sends the header.
  const int last = static_cast<int>(blockIdx.x + 1) * kCombineThreads - 1;
  const OwnWeight weight(params, weighs ? last - static_cast<int>(threadIdx.x) : INT32_MAX);
  wait();
  __syncthreads();
  if (*shared.number == 0) return false;
  if (weighs && routed) send_weights(params, shared, weight);
  return true;
}

/// meet_at_turn() in blocks and warps that send no rows.
template <bool kWords = false>
__device__ inline bool take_turn(const CombineSendParams& params, const CombineSendShared& shared, bool routed) {
  const LatencyParams& call = params.call;
  const auto wait = [&call, &shared] {
    if (warp_idx() != 0) return;
    const std::uint64_t number = wait_for_turn<true>(call, LatencyKind::kCombine, shared.sets, [] {});
    if (lane_idx() == 0) *shared.number = number;
  };
  if (!meet_at_turn(params, shared, routed, wait)) return false;
  if (is_clerk() && warp_idx() == 0) announce<kWords>(call, routed, *shared.number, shared.sets);
  return true;
}

/// One warp's units, prepared as far as possible before the call's turn. `kWords`: sums, which travel as words. Params:
/// FarCombineParams in groups of several nodes.
template <RowKind kKind, bool kWords, typename Params = CombineSendParams>
class CombineSender {
  static constexpr bool kFloat32 = kKind == RowKind::kFloat32;
  static constexpr bool kNodes = std::is_same_v<Params, FarCombineParams>;

 public:
  __device__ CombineSender(const Params& params, const CombineSendShared& shared)
      : params_(params), call_(params.call), shared_(shared), terms_(shared.terms[warp_idx() - 1]) {}

  /// False when the group broke. All lanes; calls meet_at_turn() once.
  __device__ bool send_all(const CombineStart& start) {
    int unit = first_combine_unit();
    Item item;
    if constexpr (kNodes) word_stride_ = return_word_stride(call_, params_.rows, params_.far.layout);
      // Usually all ranks have as many tokens as this one, so the unit for that number is loaded before the true number
      // of tokens has arrived.
#pragma unroll 1
    for (auto most_tokens = static_cast<int>(call_.num_tokens);; most_tokens = start.most_tokens) {
      units_ = SendUnits::of(params_.rows.row_bytes, most_tokens, call_.ranks.num_ranks, num_adding_blocks(),
                             part_step_bytes<kKind>(kWords, word_stride_ != 0));
      item = load(unit);
      if (most_tokens == start.most_tokens) break;
    }
    if (!start.routed) {
      units_.num_units = 0;
      item.ordinal = -1;
    }
    bool good = true;
    bool waits = true;
#pragma unroll 1
    while (good && (waits || unit < units_.num_units)) {
      const RowPart part = RowPart::of(units_.parts, params_.rows.row_bytes, unit % units_.parts.num_parts);
      const TermPlace place = order(item, part);
      unit += all_combine_warps();
      const Item next = load(unit);  // while this one is summed
      if constexpr (kWords) {
        if (waits && own_weights()) fetch(item, part);
      }
      if (waits) good = meet_at_turn(params_, shared_, start.routed, [] {});
      waits = false;
      if (good && item.ordinal >= 0 && receives(item.source)) {
        if (params_.tiles.present()) good = await_tiles(call_, params_.tiles, item.row);
        good = good && send(item, part, place);
      }
      item = next;
    }
    return good;
  }

 private:
  /// A token of `source`, with this lane's entry.
  struct Item {
    int source = 0;
    int token = 0;
    std::int32_t ordinal = -1;  ///< ordinal of this rank among the token's ranks; -1: nothing to send
    std::int32_t row = -1;      ///< row in this rank's slab
    float weight = 0;           ///< weight given to the dispatch
    std::int32_t place = 0;     ///< FarReturns::places, with kNodes
  };

  __device__ bool rank_sums() const {
    return kWords || kKind == RowKind::kFp8Sums || params_.rows.order == CombineOrder::kRankSums;
  }
  __device__ bool own_weights() const { return params_.own_weights && rank_sums(); }
  __device__ bool is_far(int rank) const {
    if constexpr (kNodes) return params_.far.layout.is_far(rank);
    return false;
  }
  __device__ bool receives(int rank) const {
    return (is_far(rank) ? shared_.far_sets[rank] : shared_.sets[rank]) != kNoSet;
  }

  __device__ Item load(int unit) const {
    Item item;
    if (unit >= units_.num_units) return item;
    const int num_ranks = call_.ranks.num_ranks;
    const int row = unit / units_.parts.num_parts;
    item.token = row / num_ranks;
    const int source = call_.ranks.rank + row % num_ranks;
    item.source = source < num_ranks ? source : source - num_ranks;
    // All loads at once. Tables hold arbitrary values for tokens that their rank does not have and for entries without
    // a row.
    const bool is_entry = lane_idx() < call_.num_topk;
    const std::int64_t index = item.source * call_.max_tokens + item.token;
    const std::int64_t entry = index * call_.num_topk + (is_entry ? lane_idx() : 0);
    const std::int32_t num_tokens = call_.tables.tokens_of_rank[item.source];
    item.ordinal = call_.tables.rank_ordinals[index];
    item.row = call_.tables.items[entry];
    if (rank_sums() && !params_.own_weights) item.weight = call_.tables.item_weights[entry];
    if constexpr (kNodes) {
      if (is_far(item.source)) item.place = call_.tables.far_returns(params_.rows.order).places[index];
    }
    if (item.token >= num_tokens) item.ordinal = -1;
    if (!is_entry) item.row = -1;
    return item;
  }

  __device__ CombineWindow window_at(int source) const {
    return CombineWindow::at(call_, params_.rows, source, shared_.sets[source]);
  }

  /// Orders the terms of an item that is summed here. Weights of this combine are filled in later.
  __device__ TermPlace order(const Item& item, const RowPart& part) const {
    if (!rank_sums() || item.ordinal < 0) return {};
    Term term;
    if (item.row >= 0) term = {static_cast<std::uint64_t>(item.row), row_at(item.row) + part.begin, item.weight};
    return order_terms(term, call_.num_topk, true, terms_);
  }

  /// Prefetches rows during the wait for the turn and the weights, only as much as the sum loads first.
  __device__ void fetch(const Item& item, const RowPart& part) const {
    constexpr int kMostBytes = kWordStepVectors * kLineBytes;
    constexpr int kCacheLineBytes = 128;
    if (item.ordinal < 0 || item.row < 0) return;
    const std::byte* const row = row_at(item.row) + part.begin;
    const int bytes = part.bytes < kMostBytes ? part.bytes : kMostBytes;
#pragma unroll 1
    for (int offset = 0; offset < bytes; offset += kCacheLineBytes) prefetch_l2(row + offset);
  }

  __device__ bool send(const Item& item, const RowPart& part, const TermPlace& place) const {
    if constexpr (kWords) {
      if (params_.own_weights && !take_weight(item, place)) return false;
      const WordPlace to{word_row(call_, params_.rows, item.source, shared_.sets[item.source], call_.ranks.rank,
                                  item.token, part.begin),
                         *shared_.number};
      sum_terms<kFloat32>(terms_, place.num_rows, to, part.bytes);
      return true;
    }
    if (!rank_sums()) {
      if (is_far(item.source)) {
        copy_far_rows(item, part);
      } else {
        copy_rows(window_at(item.source), item.token, item.row, part);
      }
      return true;
    }
    if (own_weights() && !take_weight(item, place)) return false;
    if constexpr (kNodes) {
      if (is_far(item.source)) {
        sum_far_row(item, part, place);
        return true;
      }
    }
    store_sum(window_at(item.source).row(item.token, item.ordinal), part, place);
    return true;
  }

  /// Stores a sum that does not travel as words. `row`: where it begins.
  __device__ void store_sum(std::byte* row, const RowPart& part, const TermPlace& place) const {
    if constexpr (kKind == RowKind::kFp8Sums) {
      sum_terms<false>(terms_, place.num_rows, Fp8Place{row, params_.rows.row_bytes, part.begin}, part.bytes);
    } else {
      sum_terms<kFloat32>(terms_, place.num_rows, row + part.begin, part.bytes);
    }
  }

  /// Memory from which rows of a token leave to another node, `stride` apart.
  struct FarRows {
    std::byte* first = nullptr;  ///< null if the token's rank has asked for fewer, as no rank of this build does
    std::int64_t stride = 0;
    bool words = false;
  };
  __device__ FarRows far_rows(const Item& item, int count) const {
    FarRows rows;
    if constexpr (kNodes) {
      const std::int32_t num_rows = call_.tables.far_returns(params_.rows.order).num_rows[item.source];
      if (item.place + count > num_rows) return rows;
      rows.words = word_stride_ != 0;
      rows.stride = rows.words ? word_stride_ : params_.rows.wire_stride();
      rows.first =
          params_.returns + shared_.far_firsts[item.source] * params_.returns_stride + item.place * rows.stride;
    }
    return rows;
  }

  /// Stores the sum of a token for a rank of another node.
  __device__ void sum_far_row(const Item& item, const RowPart& part, const TermPlace& place) const {
    const FarRows row = far_rows(item, 1);
    if (row.first == nullptr) return;
    if constexpr (kKind != RowKind::kFp8Sums) {
      if (row.words) {
        const FarWordPlace to{row.first + word_offset(part.begin, kFarStepVectors), *shared_.number};
        sum_terms<kFloat32>(terms_, place.num_rows, to, part.bytes);
        return;
      }
    }
    store_sum(row.first, part, place);
  }

  /// Copies each row of the token, for a rank of another node.
  __device__ void copy_far_rows(const Item& item, const RowPart& part) const {
    const unsigned same = __match_any_sync(kAllLanes, item.row);
    const bool first = item.row >= 0 && __ffs(static_cast<int>(same)) - 1 == lane_idx();
    const unsigned rows = __ballot_sync(kAllLanes, static_cast<int>(first));
    FarRows to = far_rows(item, __popc(rows));
    if (to.first == nullptr) return;
#pragma unroll 1
    for (unsigned left = rows; left != 0; left &= left - 1) {
      const std::int32_t from = __shfl_sync(kAllLanes, item.row, __ffs(static_cast<int>(left)) - 1);
      if (to.words) {
        store_as_words(to.first, *shared_.number, row_at(from), part.begin, part.bytes);
      } else {
        copy_by_warp(to.first + part.begin, row_at(from) + part.begin, part.bytes);
      }
      to.first += to.stride;
    }
  }

  /// Copies each row of the token to the place of the row's first entry.
  __device__ void copy_rows(const CombineWindow& window, std::int64_t token, std::int32_t row,
                            const RowPart& part) const {
    const unsigned same = __match_any_sync(kAllLanes, row);
    const bool first = row >= 0 && __ffs(static_cast<int>(same)) - 1 == lane_idx();
#pragma unroll 1
    for (unsigned left = __ballot_sync(kAllLanes, static_cast<int>(first)); left != 0; left &= left - 1) {
      const int topk = __ffs(static_cast<int>(left)) - 1;
      const std::int32_t from = __shfl_sync(kAllLanes, row, topk);
      copy_by_warp(window.row(token, topk) + part.begin, row_at(from) + part.begin, part.bytes);
    }
  }

  /// Fills in this lane's weight of this combine, if it has a row here; false when the group broke. All lanes.
  __device__ bool take_weight(const Item& item, const TermPlace& place) const {
    bool came = true;
    if (item.row >= 0) {
      const Payload weight = await_weight(call_, *shared_.number, shared_.sets[call_.ranks.rank], item.source,
                                          item.token * call_.num_topk + lane_idx());
      came = weight.came;
      terms_.weights[place.position] = __uint_as_float(weight.value);
    }
    const bool all = __all_sync(kAllLanes, static_cast<int>(came)) != 0;
    __syncwarp();
    return all;
  }

  __device__ const std::byte* row_at(std::int32_t row) const { return params_.x + row * params_.x_stride; }

  const Params& params_;
  const LatencyParams& call_;
  const CombineSendShared& shared_;
  Terms& terms_;
  SendUnits units_;
  std::int64_t word_stride_ = 0;  ///< return_word_stride(), with kNodes
};

/// Word of `rank` that reports that this block has sent everything; null if that rank receives nothing.
__device__ inline std::uint64_t* own_done_word(const LatencyParams& call, const CombineSendShared& shared, int rank) {
  if (rank >= call.ranks.num_ranks || shared.sets[rank] == kNoSet) return nullptr;
  return done_words(call, rank, shared.sets[rank], call.ranks.rank) + blockIdx.x - 1;
}

/// Tells the peers that this block has sent everything. `good`: this thread's warp has. `num_absent`: in the first warp
/// of the first block, number of absent ranks. All threads; false in all of them when the group broke.
template <bool kWords>
__device__ inline bool end_send(const CombineSendParams& params, const CombineSendShared& shared,
                                const CombineStart& start, bool good, std::uint32_t num_absent) {
  const LatencyParams& call = params.call;
  // Addresses are computed while other warps still send. Rows that travel as words need no done words.
  std::uint64_t* done = nullptr;
  if (!kWords && warp_idx() == 0 && good && !is_clerk()) done = own_done_word(call, shared, lane_idx());
  if (__syncthreads_and(static_cast<int>(good)) == 0) return false;
  if (warp_idx() != 0) return true;
  if (is_clerk()) {
    // Every rank refuses the call, but its number and set are used up, as when a host refuses it.
    if (!start.routed && lane_idx() == 0) report_refused_dispatch(call.ranks, *call.tables.summary);
    grant_owed_set(call, LatencyKind::kCombine, *shared.number);
    if (num_absent != 0) {
      post_for_absent(call, LatencyKind::kCombine, *shared.number, shared.sets[call.ranks.rank], 0);
    }
    return true;
  }
  if constexpr (kWords) return true;
  fence_system();
  if (done != nullptr) post_word(done, *shared.number, 0);
#pragma unroll 1
  for (int rank = lane_idx() + kWarpLanes; rank < call.ranks.num_ranks; rank += kWarpLanes) {
    done = own_done_word(call, shared, rank);
    if (done != nullptr) post_word(done, *shared.number, 0);
  }
  return true;
}

/// All threads of all blocks; false in all threads of a block when the group broke. Afterwards `*shared.number` is the
/// call's number. `kWhole`: the kernel makes the whole call. `kWords`: CombineRows::words.
template <RowKind kKind, bool kWhole, bool kWords = false>
__device__ inline bool send_combine(const CombineSendParams& params, const CombineSendShared& shared,
                                    const CombineStart& start) {
  const LatencyParams& call = params.call;
  bool good = true;
  std::uint32_t num_absent = 0;
  if (warp_idx() != 0 && !is_clerk()) {
    CombineSender<kKind, kWords> sender(params, shared);
    good = sender.send_all(start);
  } else {
    if (is_clerk() && warp_idx() == 0) num_absent = load_num_absent(call);
    good = take_turn<kWords>(params, shared, start.routed);
    if (kWhole && good && !is_clerk() && threadIdx.x == 0) enter_whole_call(call, LatencyKind::kCombine);
  }
  return end_send<kWords>(params, shared, start, good, num_absent);
}

}  // namespace ferry::cuda::device

#endif  // FERRY_CUDA_LATENCY_COMBINE_SEND_CUH
