#ifndef FERRY_CUDA_LATENCY_SMALL_NODES_RECEIVE_CUH
#define FERRY_CUDA_LATENCY_SMALL_NODES_RECEIVE_CUH

/// Part of a small dispatch's receive half (small_receive.cuh) for ranks of other nodes: reads the words of their
/// messages where the network has put them, with no importer between (far_receive.cuh).

#include "cuda/latency/far_keeper.cuh"
#include "cuda/latency/far_message.hpp"
#include "cuda/latency/far_rows.cuh"
#include "cuda/latency/far_words.cuh"
#include "cuda/latency/small_parts.cuh"

namespace ferry::cuda::device {

/// State of a block besides SmallShared, in dynamic shared memory.
struct SmallFarReceived {
  std::int32_t num_rows[kSmallRanks];     ///< [R] FarFields of far ranks
  std::int32_t num_returns[kSmallRanks];  ///< [R]
  unsigned num_headers;                   ///< headers of far ranks that are no longer waited for

  /// [E] rows of each expert from the block's source
  __device__ std::int32_t* counts() { return reinterpret_cast<std::int32_t*>(this + 1); }
  FERRY_HOST_DEVICE static constexpr std::size_t size_bytes(int num_experts) {
    return sizeof(SmallFarReceived) + static_cast<std::size_t>(num_experts) * sizeof(std::int32_t);
  }
};

/// Passed to SmallReceiver.
class SmallFarReceiver {
 public:
  static constexpr bool kPresent = true;
  __device__ SmallFarReceiver(const FarDispatchReceiveParams& params, const SentCall& sent, SmallFarReceived& received)
      : params_(params),
        call_(params.call),
        far_(params.far),
        sent_(sent),
        received_(received),
        message_(FarMessage::of(call_.num_experts, call_.num_topk)) {}

  __device__ bool is_far(int rank) const { return rank < call_.ranks.num_ranks && far_.layout.is_far(rank); }

  /// Words of a far rank's header, and this lane's half that has the number.
  __device__ LaneFarWords load_header(int source) const { return {header_of(source), kFarHeaderWords}; }
  __device__ const std::uint64_t* header_number(int source) const {
    return &reinterpret_cast<const WideWord*>(header_of(source))[lane_idx()].high;
  }
  /// The word of a far rank's count, as ranks of this node send it, and its half that has the number.
  __device__ std::uint64_t load_count(int source, int expert) const {
    const WideWord word = load_wide_relaxed_system(count_word(source, expert));
    const int part = expert % kFarWordPayloads;
    if (part == kFarWordPayloads - 1) return word.high;
    return (word.high & ~std::uint64_t{0xFFFFFFFF}) | static_cast<std::uint32_t>(word.low >> (part * 32));
  }
  __device__ const std::uint64_t* count_number(int source, int expert) const {
    return &count_word(source, expert)->high;
  }
  __device__ LaneFarWords load_record(int source, int token) const {
    return {record_of(source, token), num_record_words()};
  }

  /// Hands on a header that has come: to this rank's window, where its other blocks look for ranks that make another
  /// call, and to the Routing. All lanes of one warp of the block that reports.
  __device__ void import(int source, const LaneFarWords& header) {
    if (!import_header(call_, far_, LatencyKind::kDispatch, sent_, source, header)) return;
    const FarFields fields = fields_of(header);
    if (lane_idx() != 0) return;
    const LatencyTables& tables = call_.tables;
    tables.rows_back.num_rows[source] = fields.num_returns;
    tables.rows_back.firsts[source] = fields.first_return;
    tables.sums_back.num_rows[source] = fields.num_rows;
    tables.sums_back.firsts[source] = fields.first_sum;
  }
  /// Notes a header; refuses one that no rank of this build sends: then false. All lanes of one warp.
  __device__ bool note(int source, const LaneFarWords& header) {
    const ReceivedHeader received(header.payload(lane_idx()));
    const std::int64_t num_tokens = received.num_tokens();
    const FarFields fields = fields_of(header);
    const bool same = received.agreement() == call_.agreement;
    const bool sound = are_sound(call_, fields, num_tokens);
    if (lane_idx() == 0) {
      received_.num_rows[source] = fields.num_rows;
      received_.num_returns[source] = fields.num_returns;
      if (same && !sound) refuse(source);
    }
    return !same || sound;
  }
  /// Notes what the block's source sends for an expert. One thread.
  __device__ void note_count(int expert, std::uint32_t count) const {
    received_.counts()[expert] = static_cast<std::int32_t>(count);
  }

  /// Writes a count where ranks of this node write theirs. One thread.
  __device__ void import_count(int source, int expert, std::uint32_t count) const {
    post_word(count_words(call_, call_.ranks.rank, static_cast<int>(sent_.set), source) + expert, sent_.number, count);
  }

  /// A token by its record.
  struct Record {
    FarRecord start;
    std::uint32_t entry = kNoExpert;  ///< this lane's
    std::uint32_t weight = 0;
  };
  /// Waits for the record of a token. `words`: as loaded before. False when the group broke, also because the record is
  /// one that no rank of this build sends. All lanes of a warp.
  __device__ bool await_record(int source, int token, LaneFarWords& words, Record& record) const {
    const Wait wait{Awaited::kRow, source, sent_.number};
    if (!await_part(call_, wait, record_of(source, token), num_record_words(), words)) return false;
    const int num_topk = call_.num_topk;
    const bool has_entry = lane_idx() < num_topk;
    record.start = {static_cast<std::int32_t>(words.payload(0)), static_cast<std::int32_t>(words.payload(1))};
    record.entry = words.payload(kFarRecordPayloads + (has_entry ? lane_idx() : 0));
    record.weight = words.payload(kFarRecordPayloads + (has_entry ? num_topk + lane_idx() : 0));
    // Entries and weights mean nothing where there is no row.
    if (!has_entry || record.start.row < 0) record.entry = kNoExpert;
    bool sound = record.start.is_sound(received_.num_rows[source], received_.num_returns[source]);
    if (record.entry != kNoExpert) {
      const int expert = entry_expert(record.entry);
      sound = sound && expert < call_.num_experts && entry_ordinal(record.entry) < received_.counts()[expert];
    }
    if (__all_sync(kAllLanes, static_cast<int>(sound)) != 0) return true;
    if (lane_idx() == 0) refuse(source);
    return false;
  }
  /// Writes the places of what this rank returns of a token. One thread.
  __device__ void keep_places(int source, int token, const FarRecord& start) const {
    const std::int64_t at = source * call_.max_tokens + token;
    call_.tables.rows_back.places[at] = start.first_return;
    call_.tables.sums_back.places[at] = start.row;
  }
  /// Copies a warp's share of a token's row as it arrives; false when the group broke. All lanes.
  __device__ bool copy(const Arrival& arrival, int row, int num_tokens, const Share& share) const {
    const std::int64_t stride = far_row_words_bytes(params_.row.stride());
    const std::byte* const words = header_of(arrival.source) + message_.words(num_tokens, row + 1, stride);
    return copy_row_words(call_, params_, sent_, arrival, words, share) &&
           copy_scale_words(call_, params_, sent_, arrival, words, share);
  }

  /// Reports data that no rank of this build sends. One thread.
  __device__ void refuse(int source) const { refuse_message(call_, source, sent_.number); }

  /// Words to be kept for the calls after this one.
  __device__ FarKeeper keeper(int source) const { return {far_, source}; }
  __device__ void keep(const FarKeeper& keeper) const { keeper.keep(call_, far_); }
  /// Keeps which messages have left, by one warp while others wait for headers; each of them ends with end_header().
  __device__ void keep_departures() const {
    const volatile unsigned& num_headers = received_.num_headers;
    const auto num_far = static_cast<unsigned>(far_.layout.num_far());
    device::keep_departures(call_, far_, [&num_headers, num_far] { return num_headers == num_far; });
  }
  __device__ void end_header() const {
    if (lane_idx() == 0) atomicAdd(&received_.num_headers, 1U);
  }

 private:
  __device__ const std::byte* header_of(int source) const {
    return far_.inbox + far_.layout.header_at(0, static_cast<int>(sent_.set), far_.layout.far_idx(source));
  }
  __device__ const WideWord* count_word(int source, int expert) const {
    return reinterpret_cast<const WideWord*>(header_of(source) + message_.counts) + expert / kFarWordPayloads;
  }
  __device__ const std::byte* record_of(int source, int token) const {
    return header_of(source) + message_.record(token);
  }
  __device__ int num_record_words() const { return static_cast<int>(message_.record_bytes / kFarWordBytes); }

  const FarDispatchReceiveParams& params_;
  const LatencyParams& call_;
  const FarParams& far_;
  const SentCall& sent_;
  SmallFarReceived& received_;
  const FarMessage message_;
};

}  // namespace ferry::cuda::device

#endif  // FERRY_CUDA_LATENCY_SMALL_NODES_RECEIVE_CUH
