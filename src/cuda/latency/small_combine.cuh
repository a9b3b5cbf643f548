#ifndef FERRY_CUDA_LATENCY_SMALL_COMBINE_CUH
#define FERRY_CUDA_LATENCY_SMALL_COMBINE_CUH

/// A combine whose sums travel as words (row_words.cuh), in a kernel of its own like that of small_parts.cuh. To the
/// peers it is the same call as that of any other kernel. The first block is the clerk: it posts the header, sends
/// weights, and reports. In the others each warp first sums a part of a token for a peer, loading the first rows before
/// the call's turn, and then a part of one of this rank's tokens from the words of the peers. It waits for nothing but
/// those words, so no barrier lies between the two.

#include <cstddef>
#include <cstdint>

#include "cuda/latency/combine_receive.cuh"
#include "cuda/latency/combine_send.cuh"
#include "cuda/latency/small_parts.cuh"

namespace ferry::cuda {

/// Division by multiplication, for numbers whose product with the divisor is below 2^32.
struct SmallDivisor {
  std::int32_t divisor = 1;
  std::uint64_t inverse = std::uint64_t{1} << 32;  ///< 2^32 / divisor, rounded up

  static constexpr SmallDivisor of(int divisor) {
    return {divisor,
            ((std::uint64_t{1} << 32) + static_cast<std::uint64_t>(divisor) - 1) / static_cast<std::uint64_t>(divisor)};
  }
  FERRY_HOST_DEVICE constexpr int divide(int value) const {
    return static_cast<int>(static_cast<std::uint64_t>(static_cast<std::uint32_t>(value)) * inverse >> 32);
  }
};

/// Shares of rows for warps: unit u is part u % parts of row u / parts.
struct SmallUnits {
  SmallDivisor per_row;
  int part_bytes = 0;
  int num_units = 0;

  static SmallUnits of(const CombineRows& rows, int num_rows, int num_warps) {
    const device::RowParts parts =
        device::RowParts::of(rows.row_bytes, num_rows, num_warps, rows.word_step_vectors * kWordLineBytes);
    return {SmallDivisor::of(parts.num_parts), parts.part_bytes, num_rows * parts.num_parts};
  }
};

struct SmallCombineParams : LatencyCombineParams {
  SmallDivisor ranks;   ///< R
  SmallUnits sends;     ///< rows: (token, source) of M tokens of each rank; sources count from this rank on
  SmallUnits receives;  ///< rows: this rank's tokens
};

namespace device {

/// State of a block, in dynamic shared memory.
struct SmallCombineShared {
  std::uint64_t number;           ///< number of the call; 0: the group broke
  int sets[kSmallRanks];          ///< set in which each rank receives the call
  std::byte* words[kSmallRanks];  ///< start of this rank's sums on each rank
  /// Rows that each warp adds up, and the weight of each.
  const std::byte* rows[kCombineWarps][kMaxTopk];
  float weights[kCombineWarps][kMaxTopk];
};

/// Parameters of either half.
struct SmallCombineHalf : SmallCombineParams {
  bool receives = false;
};

/// Waits for the call's turn. First warp of a block; in the first block another warp grants the set that this may wait
/// for.
__device__ inline void take_small_turn(const LatencyParams& call, SmallCombineShared& shared) {
  const std::uint64_t number = wait_for_turn<false>(call, LatencyKind::kCombine, shared.sets, [] {});
  const int lane = lane_idx();
  if (lane < call.ranks.num_ranks) {
    shared.words[lane] =
        window_of(call, lane).row_words(call.layout, call.ranks.num_ranks, shared.sets[lane], call.ranks.rank);
  }
  if (lane == 0) shared.number = number;
}

/// Waits for the words of all ranks' headers that name the call and its record number, which a report of a disagreement
/// needs; not for the rest of the headers. All lanes of a warp.
__device__ inline Outcome await_agreements(const LatencyParams& call, const SentCall& sent) {
  constexpr int kAgreementWords = sizeof(LatencyHeader::agreement) / sizeof(std::uint32_t);
  constexpr int kWords = kAgreementWords + sizeof(LatencyHeader::record_number) / sizeof(std::uint32_t);
  static_assert(offsetof(LatencyHeader, agreement) == 0 && kSmallRanks * kWords <= kWarpLanes);
  static_assert(offsetof(LatencyHeader, record_number) == sizeof(LatencyHeader::agreement));
  const int rank = lane_idx() / kWords;
  const int word = lane_idx() % kWords;
  bool came = true;
  bool equal = call.agreement != 0;
  if (rank < call.ranks.num_ranks) {
    const std::uint64_t* const at =
        header_words(call, call.ranks.rank, LatencyKind::kCombine, static_cast<int>(sent.set), rank) + word;
    const Payload payload = wait_payload(call, {Awaited::kEntry, rank, sent.number}, at);
    came = payload.came;
    if (word < kAgreementWords) {
      equal = equal && payload.value == static_cast<std::uint32_t>(call.agreement >> (word * 32));
    }
  }
  if (__all_sync(kAllLanes, static_cast<int>(came)) == 0) return Outcome::kStop;
  return __all_sync(kAllLanes, static_cast<int>(equal)) != 0 ? Outcome::kGo : Outcome::kSkip;
}

/// Waits until no rank stores rows of the call any more. Ranks that make the same call send words alone, but another
/// call may have rows, which all ranks store to one place: none may be on its way when the set is granted again. All
/// lanes of a warp, after await_agreements; false when the group broke. Not inlined: only refused calls run it.
__device__ __noinline__ inline bool await_other_rows(const LatencyParams& call, const SentCall& sent) {
  // The lower half: the upper half is 0, as there are at most kMaxCallBlocks.
  constexpr std::size_t kBlocksWord = offsetof(LatencyHeader, blocks_or_homes) / sizeof(std::uint32_t);
  const auto set = static_cast<int>(sent.set);
  bool came = true;
#pragma unroll 1
  for (int rank = 0; rank < call.ranks.num_ranks && came; ++rank) {
    const std::uint64_t* const header = header_words(call, call.ranks.rank, LatencyKind::kCombine, set, rank);
    const Payload blocks = wait_payload(call, {Awaited::kEntry, rank, sent.number}, header + kBlocksWord);
    came = blocks.came;
    if (!came) continue;
    const std::uint64_t* const words = done_words(call, call.ranks.rank, set, rank);
#pragma unroll 1
    for (int block = lane_idx(); block < static_cast<int>(blocks.value) && came; block += kWarpLanes) {
      came = wait_word(call, {Awaited::kRow, rank, sent.number}, words + block).came;
    }
  }
  return __all_sync(kAllLanes, static_cast<int>(came)) != 0;
}

/// Number of an entry that no call has; larger ones do not exist either.
inline constexpr int kNoEntry = INT32_MAX / 2;

/// Weights that a lane sends, loaded together: of its entries from `first` on, kWarpLanes apart.
struct WeightGroup {
  static constexpr int kCount = 8;
  OwnWeight own[kCount];

  __device__ WeightGroup(const CombineSendParams& params, int first) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) own[i] = OwnWeight(params, first + i * kWarpLanes);
  }
  __device__ int next() const { return own[0].entry + kCount * kWarpLanes; }
  __device__ bool exists(const CombineSendParams& params) const { return own[0].exists(params); }
  __device__ void post(const LatencyParams& call, std::uint64_t number, const int* sets) const {
#pragma unroll
    for (const OwnWeight& one : own) post_weight(call, number, sets, one);
  }
};

/// Sends the weights of this rank's tokens from a group on. All lanes of a warp.
__device__ inline void post_weights(const CombineSendParams& params, std::uint64_t number, const int* sets,
                                    const WeightGroup& first) {
  first.post(params.call, number, sets);
#pragma unroll 1
  for (WeightGroup group(params, first.next()); group.exists(params); group = WeightGroup(params, group.next())) {
    group.post(params.call, number, sets);
  }
}

/// Posts this rank's header to the peers, and sends them their weights. First warp of the first block.
__device__ inline void announce_small(const SmallCombineParams& params, SmallCombineShared& shared) {
  const LatencyParams& call = params.send.call;
  const bool routed = call.tables.summary->valid != 0;
  // The weights of most calls are loaded before the turn.
  const WeightGroup ahead(params.send, params.send.own_weights ? lane_idx() : kNoEntry);
  take_small_turn(call, shared);
  __syncwarp();
  const std::uint64_t number = shared.number;
  if (number == 0) return;
  announce<true>(call, routed, number, shared.sets);
  // Every rank refuses the call, but its number and set are used up, as when a host refuses it.
  if (!routed) {
    if (lane_idx() == 0) report_refused_dispatch(call.ranks, *call.tables.summary);
    return;
  }
  post_weights(params.send, number, shared.sets, ahead);
}

/// Grants the owed set; false when the group broke, else `sent` is this call. Second warp of the first block. No peer
/// waits on this step.
__device__ inline bool begin_small_books(const LatencyParams& call, SentCall& sent) {
  const TurnLook turn(call, LatencyKind::kCombine);
  const std::uint32_t num_absent = load_num_absent(call);
  if (turn.broken) return false;
  grant_owed_set(call, LatencyKind::kCombine, turn.number);
  const std::uint64_t* const grant =
      grant_word(call, call.ranks.rank, LatencyKind::kCombine, call.ranks.rank, turn.number);
  const Payload set = wait_payload(call, {Awaited::kDone, call.ranks.rank, turn.number}, grant);
  if (__all_sync(kAllLanes, static_cast<int>(set.came)) == 0) return false;
  sent = {turn.number, set.value, 1, 0};
  if (num_absent != 0) {
    post_for_absent(call, LatencyKind::kCombine, turn.number, static_cast<int>(set.value), 0);
  }
  return true;
}

/// Waits until no rank stores to the call's set any more, and reports a rank that makes another call; false when the
/// group broke. All lanes of one warp.
__device__ inline bool close_small_books(const LatencyParams& call, const SentCall& sent, bool routed) {
  const Outcome outcome = await_agreements(call, sent);
  if (outcome == Outcome::kStop) return false;
  if (outcome != Outcome::kGo && !await_other_rows(call, sent)) return false;
  if (lane_idx() == 0 && outcome != Outcome::kGo && routed) {
    report_latency_disagreement(call, LatencyKind::kCombine, static_cast<int>(sent.set));
  }
  return true;
}

/// Grants the owed set, and ends the call for this rank. As begin_small_books().
__device__ inline void keep_small_books(const LatencyParams& call) {
  const bool routed = call.tables.summary->valid != 0;
  SentCall sent{};
  if (!begin_small_books(call, sent) || !close_small_books(call, sent, routed)) return;
  if (lane_idx() == 0) leave_whole_call(call, LatencyKind::kCombine, sent);
}

/// A combine's part for ranks of other nodes, in groups of one node: nothing. See SmallFarAdder.
struct NoSmallFarAdder {
  static constexpr bool kPresent = false;
  using Params = SmallCombineParams;
};

/// Words of rows in steps of `kVectors`.
template <RowKind kKind, int kVectors>
struct SmallRows {
  using Sums = LaneSums<kKind == RowKind::kFloat32, kVectors>;

  /// Bytes of a row's words inside a node.
  __device__ static std::int64_t words_bytes(int row_bytes) { return row_words_bytes(row_bytes, kVectors); }
  /// Offset of the words of the step that begins at `begin` bytes of its row.
  __device__ static int offset(int begin) { return word_offset(begin, kVectors); }
  __device__ static void store(std::byte* words, const Sums& sums, std::uint64_t number, int num_vectors) {
    sums.words(number).store(words, num_vectors);
  }
};
template <int kVectors>
struct SmallRows<RowKind::kFp8Sums, kVectors> {
  static_assert(kVectors == kFp8StepVectors);
  using Sums = Fp8Sums;

  __device__ static std::int64_t words_bytes(int row_bytes) { return fp8_row_words_bytes(row_bytes); }
  __device__ static int offset(int begin) { return fp8_word_offset(begin); }
  /// All lanes; whole steps, also the last.
  __device__ static void store(std::byte* words, const Sums& sums, std::uint64_t number, int /*num_vectors*/) {
    Fp8Step::of(sums).words(number).store(words, kFp8CodeVectors);
  }
};

/// One warp of the other blocks, except the first. `kVectors`: of a step. Far: NoSmallFarAdder, or SmallFarAdder in
/// groups of several nodes.
template <RowKind kKind, int kVectors, typename Far = NoSmallFarAdder>
class SmallAdder {
  using Params = typename Far::Params;
  using Rows = SmallRows<kKind, kVectors>;
  static constexpr int kStepBytes = kVectors * kLineBytes;
  /// Rows of a sum that a warp loads at once.
  static constexpr int kRows = kVectors >= kFp8StepVectors ? 2 : kVectors > 1 ? 4 : 8;

 public:
  __device__ SmallAdder(const Params& params, SmallCombineShared& shared, const Far& far = {})
      : far_(far),
        params_(params),
        call_(params.send.call),
        row_bytes_(static_cast<int>(params.send.rows.row_bytes)),
        shared_(shared),
        rows_(shared.rows[warp_idx() - 1]),
        weights_(shared.weights[warp_idx() - 1]) {}

  /// Sends sums for the peers; false when the group broke. All lanes; contains one barrier of the block.
  __device__ bool send() {
    const SmallUnits& units = params_.sends;
    int unit = first_combine_unit();
    bool waits = true;
#pragma unroll 1
    while (waits || unit < units.num_units) {
      const int row = units.per_row.divide(unit);
      const int part = unit - row * units.per_row.divisor;
      const int token = params_.ranks.divide(row);
      int source = call_.ranks.rank + row - token * params_.ranks.divisor;
      if (source >= call_.ranks.num_ranks) source -= call_.ranks.num_ranks;
      float weight = 0;
      int position = 0;
      const int num_rows = order(unit < units.num_units, source, token, weight, position);
      const int begin = part * units.part_bytes;
      const int end = num_rows == 0 ? begin : min(begin + units.part_bytes, row_bytes_);
#pragma unroll 1
      for (int step = begin; waits || step < end; step += kStepBytes) {
        const int num_vectors = count_vectors<kVectors>(end - step);
        typename Rows::Sums sums;
        sums.clear();
#pragma unroll 1
        for (int first = 0; waits || first < num_rows; first += kRows) {
          uint4 values[kRows][kVectors];
#pragma unroll
          for (int i = 0; i < kRows; ++i) {
            if (first + i < num_rows) load_vectors(rows_[first + i] + step, num_vectors, values[i]);
          }
          if (waits) {
            __syncthreads();  // the turn has come
            waits = false;
            if (shared_.number == 0) return false;
          }
          if (params_.send.own_weights && step == begin && first == 0 && num_rows > 0) {
            if (!take_weights(source, token, position)) return false;
          }
#pragma unroll
          for (int i = 0; i < kRows; ++i) {
            if (first + i >= num_rows) continue;
            const float weight_of_row = weights_[first + i];
#pragma unroll
            for (int vector = 0; vector < kVectors; ++vector) {
              if (vector < num_vectors) sums.vectors[vector].add(values[i][vector], weight_of_row);
            }
          }
        }
        if constexpr (Far::kPresent) {
          if (step < end && far_.is_far(source)) {
            if (std::byte* const words = far_.row_out(source, place_)) {
              Rows::store(words + Rows::offset(step), sums, shared_.number,
                          count_line_vectors<kVectors>(row_bytes_ - step));
            }
            continue;
          }
        }
        if (step < end && shared_.sets[source] != kNoSet) {
          std::byte* const words = words_of(shared_.words[source], token) + Rows::offset(step);
          Rows::store(words, sums, shared_.number, num_vectors);
        }
      }
      unit += all_combine_warps();
    }
    return true;
  }

  /// Adds up the peers' sums for this rank's tokens; false when the group broke. All lanes.
  __device__ bool receive(std::int32_t home) {
    const SmallUnits& units = params_.receives;
    int unit = first_combine_unit();
    if (unit >= units.num_units) return true;
    const SentCall sent{shared_.number, static_cast<std::uint32_t>(shared_.sets[call_.ranks.rank]), 1, 0};
    const Outcome outcome = await_all_agreements(sent);
    if (outcome != Outcome::kGo) return outcome == Outcome::kSkip;
#pragma unroll 1
    while (true) {
      const int token = units.per_row.divide(unit);
      const int part = unit - token * units.per_row.divisor;
      const int begin = part * units.part_bytes;
      if (!sum_token(sent, home, token, begin, min(begin + units.part_bytes, row_bytes_))) return false;
      unit += all_combine_warps();
      if (unit >= units.num_units) return true;
      home = load_home(unit);
    }
  }

  /// This lane's entry of the token of a unit of receive(); the unit may not exist.
  __device__ std::int32_t load_home(int unit) {
    if (unit >= params_.receives.num_units || lane_idx() >= call_.num_topk) return -1;
    const int at = params_.receives.per_row.divide(unit) * call_.num_topk + lane_idx();
    const std::int32_t home = call_.tables.homes[at];
    if constexpr (Far::kPresent) {
      if (home >= 0 && far_.is_far(home_rank(home))) far_place_ = far_.far_place_of(at);
    }
    return home;
  }

 private:
  __device__ Outcome await_all_agreements(const SentCall& sent) const {
    if constexpr (Far::kPresent) {
      return far_.await_agreements(sent);
    } else {
      return await_agreements(call_, sent);
    }
  }

  /// Orders the rows of a token ascending; returns their number. `position`: position of this lane's row, or -1.
  __device__ int order(bool exists, int source, int token, float& weight, int& position) {
    const int lane = lane_idx();
    const int num_topk = call_.num_topk;
    std::int32_t row = -1;
    if (exists) {
      // All loads at once. Tables hold arbitrary values for tokens that their rank does not have, and all tables do
      // behind a kernel in which the group broke: rows are loaded before the turn, whose wait finds that out. That
      // kernel has set or seen `broken`, so this one sees it here. A later break leaves the tables as they were.
      const bool broken = is_broken(call_.ranks);
      const bool valid = call_.tables.summary->valid != 0;
      const std::int32_t num_tokens = call_.tables.tokens_of_rank[source];
      if constexpr (Far::kPresent) place_ = far_.place_of(source, token);
      if (lane < num_topk) {
        const int at = (source * static_cast<int>(call_.max_tokens) + token) * num_topk + lane;
        row = call_.tables.items[at];
        if (!params_.send.own_weights && call_.tables.item_weights != nullptr) weight = call_.tables.item_weights[at];
      }
      if (broken || !valid || token >= num_tokens) row = -1;
    }
    const int num_rows = __popc(__ballot_sync(kAllLanes, static_cast<int>(row >= 0)));
    position = 0;
#pragma unroll 4
    for (int other = 0; other < num_topk; ++other) {
      const std::int32_t theirs = __shfl_sync(kAllLanes, row, other);
      position += static_cast<int>(theirs >= 0 && (theirs < row || (theirs == row && other < lane)));
    }
    if (row < 0) position = -1;
    __syncwarp();  // all lanes have read the rows of the token before
    if (position >= 0) {
      rows_[position] = params_.send.x + row * params_.send.x_stride;
      weights_[position] = weight;
    }
    __syncwarp();
    return num_rows;
  }

  /// Waits for the weights of this combine, each lane for that of its row; false when the group broke. All lanes.
  __device__ bool take_weights(int source, int token, int position) {
    bool came = true;
    if (position >= 0) {
      const int set = shared_.sets[call_.ranks.rank];
      const int entry = token * call_.num_topk + lane_idx();
      Payload weight;
      if constexpr (Far::kPresent) {
        weight = far_.is_far(source) ? far_.await_weight(shared_.number, set, source, entry)
                                     : await_weight(call_, shared_.number, set, source, entry);
      } else {
        weight = await_weight(call_, shared_.number, set, source, entry);
      }
      came = weight.came;
      weights_[position] = __uint_as_float(weight.value);
    }
    const bool all = __all_sync(kAllLanes, static_cast<int>(came)) != 0;
    __syncwarp();
    return all;
  }

  /// Writes bytes [begin, end) of the sum of a token; false when the group broke. All lanes.
  __device__ bool sum_token(const SentCall& sent, std::int32_t home, int token, int begin, int end) {
    if constexpr (Far::kPresent) {
      return far_.template sum_token<kKind>(sent, {home, far_place_}, token, rows_, begin, end);
    }
    const int lane = lane_idx();
    const unsigned ranks = ranks_of(home);
    const int num_rows = __popc(ranks);
    __syncwarp();
    if ((ranks >> lane & 1U) != 0) {
      const std::byte* const words =
          own_window(call_).row_words(call_.layout, call_.ranks.num_ranks, static_cast<int>(sent.set), lane);
      rows_[__popc(ranks & ((1U << lane) - 1U))] = words_of(words, token);
    }
    __syncwarp();
    std::byte* const out = params_.receive.out + token * params_.receive.out_stride;
    if constexpr (kKind == RowKind::kFp8Sums) {
      const unsigned last = num_rows == 0 ? 0 : 1U << (kWarpLanes - 1 - __clz(static_cast<int>(ranks)));
      return sum_fp8_words(call_, sent, {rows_, ranks, last}, out, begin, end);
    } else {
      return sum_word_steps<kKind == RowKind::kFloat32, kVectors>(call_, sent, rows_, num_rows, out, begin, end);
    }
  }

  /// Words of a token's sum, among those of all tokens.
  template <typename Byte>
  __device__ Byte* words_of(Byte* words, int token) const {
    return words + token * Rows::words_bytes(row_bytes_);
  }

  __device__ static void load_vectors(const std::byte* from, int num_vectors, uint4 (&values)[kVectors]) {
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
      if (i < num_vectors) values[i] = load_row(from + vector_offset(i));
    }
  }

  Far far_;
  std::int32_t place_ = -1;     ///< row of the token that is summed, for a far rank
  std::int32_t far_place_ = 0;  ///< place of the row that a far rank returns for this lane's entry
  const Params& params_;
  const LatencyParams& call_;
  const int row_bytes_;
  SmallCombineShared& shared_;
  const std::byte** rows_;
  float* weights_;
};

}  // namespace device
}  // namespace ferry::cuda

#endif  // FERRY_CUDA_LATENCY_SMALL_COMBINE_CUH
