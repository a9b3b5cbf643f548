#ifndef FERRY_CUDA_KERNELS_DISPATCH_SEND_CUH
#define FERRY_CUDA_KERNELS_DISPATCH_SEND_CUH

/// Sending warps. Each takes every n-th token: loads a row once and stores it to each receiver's final row (or staging).

#include "cuda/kernels/dispatch/blocks.cuh"

namespace ferry::cuda::device {

/// Where a receiver takes rows and records.
struct Receiver {
  std::byte* rows;
  std::int64_t row_stride;
  std::byte* records;
  bool staged;
};

/// One receiver per rank, from the entry messages. All threads of the block; ends with a block barrier.
__device__ inline void find_receivers(const DispatchParams& params, Receiver* receivers) {
  const CrewParams& crew = params.crew;
  for (int rank = static_cast<int>(threadIdx.x); rank < crew.num_ranks; rank += kDispatchThreads) {
    const volatile EntryMessage& message = crew.control.messages[rank];
    std::byte* base = crew.peer_bases[rank];
    const bool self = rank == crew.rank;
    receivers[rank] = {self ? params.out_x : base + message.rows_offset,
                       self ? params.out_stride : static_cast<std::int64_t>(message.rows_stride),
                       base + message.records_offset, !self && message.rows_are_staged != 0};
  }
  __syncthreads();
}

class Sender {
 public:
  __device__ Sender(const DispatchParams& params, const Receiver* receivers, int warp, int num_warps)
      : params_(params), receivers_(receivers), warp_(warp), num_warps_(num_warps) {}

  __device__ std::int64_t num_tokens() const {
    return params_.num_tokens > warp_ ? (params_.num_tokens - warp_ + num_warps_ - 1) / num_warps_ : 0;
  }
  __device__ std::int64_t token(std::int64_t idx) const { return warp_ + idx * num_warps_; }
  __device__ const std::byte* row(std::int64_t token) const { return params_.x + token * params_.x_stride; }

  /// This lane's place of a token.
  __device__ Place load_place(std::int64_t token) const {
    Place place{};
    place.rank = -1;
    if (lane_idx() < params_.num_topk) {
      const uint4 raw = reinterpret_cast<const uint4*>(params_.places)[token * params_.num_topk + lane_idx()];
      place = *reinterpret_cast<const Place*>(&raw);
    }
    return place;
  }

  /// Where this lane's place wants the row; null where it needs no copy of its own.
  __device__ std::byte* target(const Place& place) const {
    if (place.rank < 0) return nullptr;
    const Receiver& receiver = receivers_[place.rank];
    const bool wanted = (place.flags & (receiver.staged ? kFirstOfRank : kFirstOfRow)) != 0;
    if (!wanted) return nullptr;
    const std::int64_t row = receiver.staged ? place.token_row : place.row;
    return receiver.rows + row * receiver.row_stride;
  }

  /// Calls `store(pointer)` in the whole warp for each target, beginning with the ranks after this one, so that ranks do
  /// not all write to the same peer at once.
  template <typename Store>
  __device__ void for_each_target(const Place& place, std::byte* target, Store store) const {
    const unsigned wanted = __ballot_sync(0xFFFFFFFFU, target != nullptr);
    const unsigned after = __ballot_sync(0xFFFFFFFFU, target != nullptr && place.rank > params_.crew.rank);
    for (int half = 0; half < 2; ++half) {
      for (unsigned left = half == 0 ? after : wanted & ~after; left != 0; left &= left - 1) {
        const auto address = reinterpret_cast<unsigned long long>(target);
        store(reinterpret_cast<std::byte*>(__shfl_sync(0xFFFFFFFFU, address, __ffs(static_cast<int>(left)) - 1)));
      }
    }
  }

  /// Writes the token's record to every receiving rank.
  __device__ void send_record(std::int64_t token, const Place& place) const {
    if (params_.record.num_words == 0) return;
    const bool first = place.rank >= 0 && (place.flags & kFirstOfRank) != 0;
    const unsigned ranks = __ballot_sync(0xFFFFFFFFU, first);
    for (int word = lane_idx(); word - lane_idx() < params_.record.end_word; word += kWarpLanes) {
      const Word value = load_word(token, word);
      for (unsigned left = ranks; left != 0; left &= left - 1) {
        const int lane = __ffs(static_cast<int>(left)) - 1;
        const int rank = __shfl_sync(0xFFFFFFFFU, static_cast<int>(place.rank), lane);
        const std::int32_t token_row = __shfl_sync(0xFFFFFFFFU, place.token_row, lane);
        if (word >= params_.record.end_word) continue;
        auto* record =
            reinterpret_cast<std::uint32_t*>(receivers_[rank].records + token_row * params_.record.size_bytes());
        record[word] = value.only_for >= 0 && value.only_for != rank ? 0xFFFFFFFFU : value.bits;
      }
    }
  }

 private:
  /// A word of the record; `only_for`: the rank that sees it, -1 for all, others see -1.
  struct Word {
    std::uint32_t bits = 0;
    int only_for = -1;
  };

  __device__ Word load_word(std::int64_t token, int word) const {
    const RecordLayout& record = params_.record;
    const std::int64_t entries = token * params_.num_topk;
    Word value;
    if (word < record.ids_word) {
      value.bits = load_scale_word(token, word);
    } else if (word < record.weights_word) {
      value.bits = static_cast<std::uint32_t>(params_.ids[entries + word - record.ids_word]);
    } else if (word < record.rows_word) {
      value.bits = __float_as_uint(params_.weights[entries + word - record.weights_word]);
    } else if (word < record.end_word) {
      const std::int64_t id = params_.ids[entries + word - record.rows_word];
      value.bits = static_cast<std::uint32_t>(params_.slots[entries + word - record.rows_word]);
      value.only_for = id < 0 ? -1 : params_.owner[id];
    }
    return value;
  }

  __device__ std::uint32_t load_scale_word(std::int64_t token, int word) const {
    const ScaleTable& scales = params_.scales;
    const std::byte* row = scales.data + token * scales.row_stride * scales.element_bytes;
    if (scales.element_bytes == 4) {
      return *reinterpret_cast<const std::uint32_t*>(row + word * scales.column_stride * 4);
    }
    std::uint32_t bits = 0;
    for (int i = 0; i < 4 && word * 4 + i < scales.num_scales; ++i) {
      bits |= static_cast<std::uint32_t>(row[(word * 4 + i) * scales.column_stride]) << (8 * i);
    }
    return bits;
  }

  const DispatchParams& params_;
  const Receiver* receivers_;
  int warp_;
  int num_warps_;
};

/// Sends by the bulk copy engine. Item j is piece j % pieces of this warp's token j / pieces.
template <typename Reporter>
__device__ inline void send_bulk(const DispatchParams& params, const Sender& sender, WarpStages& stages,
                                 Reporter& reporter, int chunk_tokens) {
  const int pieces = num_pieces(params.row_bytes);
  const std::int64_t num_items = sender.num_tokens() * pieces;
  const auto load = [&](std::int64_t item) {
    if (item >= num_items || lane_idx() != 0) return;
    const int piece = static_cast<int>(item % pieces);
    const int stage = static_cast<int>(item % kStages);
    const std::uint32_t bytes = piece_bytes(params.row_bytes, piece);
    expect_loads(stages.barriers + stage, bytes);
    start_load(stages.stage(stage),
               sender.row(sender.token(item / pieces)) + static_cast<std::int64_t>(piece) * kPieceBytes, bytes,
               stages.barriers + stage);
  };
  for (int item = 0; item < kStages - 1; ++item) load(item);
  Place place{};
  std::byte* target = nullptr;
  for (std::int64_t item = 0; item < num_items; ++item) {
    const std::int64_t token = sender.token(item / pieces);
    const int piece = static_cast<int>(item % pieces);
    if (piece == 0) {
      place = sender.load_place(token);
      target = sender.target(place);
      sender.send_record(token, place);
    }
    const int stage = static_cast<int>(item % kStages);
    stages.wait_loaded(stage);
    const std::uint32_t bytes = piece_bytes(params.row_bytes, piece);
    sender.for_each_target(place, target, [&](std::byte* row) {
      if (lane_idx() == 0)
        start_store(row + static_cast<std::int64_t>(piece) * kPieceBytes, stages.stage(stage), bytes);
    });
    if (lane_idx() == 0) {
      close_store_group();
      wait_store_groups<1>();
    }
    __syncwarp();
    // All items before this one are complete: their stage is free, and so may be their chunk.
    load(item + kStages - 1);
    if (piece == 0) reporter.report_before(static_cast<int>(token / chunk_tokens));
  }
  if (lane_idx() == 0) wait_store_groups<0>();
  __syncwarp();
}

/// Sends by 16-byte loads and stores.
template <typename Reporter>
__device__ inline void send_by_threads(const DispatchParams& params, const Sender& sender, Reporter& reporter,
                                       int chunk_tokens) {
  for (std::int64_t idx = 0; idx < sender.num_tokens(); ++idx) {
    const std::int64_t token = sender.token(idx);
    reporter.report_before(static_cast<int>(token / chunk_tokens));
    const Place place = sender.load_place(token);
    sender.send_record(token, place);
    sender.for_each_target(place, sender.target(place),
                           [&](std::byte* row) { copy_by_warp(row, sender.row(token), params.row_bytes); });
  }
}

}  // namespace ferry::cuda::device

#endif  // FERRY_CUDA_KERNELS_DISPATCH_SEND_CUH
