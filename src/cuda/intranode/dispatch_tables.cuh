#ifndef FERRY_CUDA_INTRANODE_DISPATCH_TABLES_CUH
#define FERRY_CUDA_INTRANODE_DISPATCH_TABLES_CUH

/// Scales, ids and weights that accompany a token's payload. The sending warp loads them one token ahead. It writes
/// them straight into the receiver's outputs if it can reach those, else into a record that the receiver unpacks.

#include "cuda/copy/warp_copy.cuh"
#include "cuda/intranode/dispatch_stages.cuh"

namespace ferry::cuda::device {

/// Addresses at a receiver for the data that this rank sends to it. In shared memory, one per rank.
struct Receiver {
  std::byte* rows;
  std::int64_t row_stride;
  std::byte* records;
  std::byte* scales;
  std::int64_t scales_stride;         ///< bytes between rows
  std::int64_t scales_column_stride;  ///< bytes between elements of a row
  void* ids;
  float* weights;
  bool staged;    ///< rows are staged by token row
  bool direct;    ///< scales, ids and weights go straight to the outputs
  bool wide_ids;  ///< i64
  bool gets_record;
  // Bytes between rows when rows are sent in runs, which write records in the same way as outputs.
  std::int64_t ids_stride;
  std::int64_t weights_stride;
};

/// Tables of one token, spread over the lanes of a warp.
struct TokenTables {
  Destination destination;
  float weight = 0.0F;
  std::uint32_t scale_words[kHeldScaleWords] = {};
};

class TableSender {
 public:
  __device__ TableSender(const DispatchParams& params, const Receiver* receivers)
      : params_(params), receivers_(receivers), holds_scales_(params.scales.element_bytes == 4) {}

  /// Loads this lane's destination of `token` as raw bits. Extracting a field waits for the load, so the caller
  /// extracts none before it needs it.
  __device__ uint4 load_destination(std::int64_t token) const {
    const int topk = lane_idx() < params_.num_topk ? lane_idx() : 0;
    return reinterpret_cast<const uint4*>(params_.destinations)[token * params_.num_topk + topk];
  }

  __device__ Destination destination_of(uint4 raw) const {
    asm volatile(""
                 : "+r"(raw.x), "+r"(raw.y), "+r"(raw.z), "+r"(raw.w));  // else the compiler extracts them at the load
    Destination destination = *reinterpret_cast<const Destination*>(&raw);
    if (lane_idx() >= params_.num_topk) destination.rank = -1;
    return destination;
  }

  /// Starts the loads for `token`, whose destinations are known.
  __device__ TokenTables load(std::int64_t token, const Destination& destination) const {
    TokenTables tables;
    tables.destination = destination;
    if (params_.record.has_weights && lane_idx() < params_.num_topk) {
      tables.weight = params_.weights[token * params_.num_topk + destination.topk];
    }
    if (holds_scales_) {
#pragma unroll
      for (int i = 0; i < kHeldScaleWords; ++i) {
        const int column = lane_idx() + i * kWarpLanes;
        if (column < params_.scales.num_scales) tables.scale_words[i] = load_scale(token, column);
      }
    }
    return tables;
  }

  /// Prefetches the data that `load_destination` and `load` will read.
  __device__ void prefetch(std::int64_t token) const {
    if (lane_idx() < params_.num_topk) {
      prefetch_l2(params_.destinations + token * params_.num_topk + lane_idx());
      if (params_.record.has_weights) prefetch_l2(params_.weights + token * params_.num_topk + lane_idx());
    }
    if (!holds_scales_) return;
#pragma unroll
    for (int i = 0; i < kHeldScaleWords; ++i) {
      const int column = lane_idx() + i * kWarpLanes;
      if (column < params_.scales.num_scales) prefetch_l2(scale_address(token, column));
    }
  }

  /// Writes the token's tables to every receiving rank. All lanes call it.
  __device__ void send(std::int64_t token, const TokenTables& tables) const {
    if (params_.record.num_words == 0) return;
    const Destination& destination = tables.destination;
    const bool first = destination.rank >= 0 && (destination.flags & kFirstOfRank) != 0;
    for (unsigned left = __ballot_sync(0xFFFFFFFFU, first); left != 0; left &= left - 1) {
      const int lane = __ffs(static_cast<int>(left)) - 1;
      const int rank = __shfl_sync(0xFFFFFFFFU, static_cast<int>(destination.rank), lane);
      const std::int64_t token_row = __shfl_sync(0xFFFFFFFFU, destination.token_row, lane);
      const Receiver& receiver = receivers_[rank];
      if (receiver.gets_record) write_record(token, tables, receiver, rank, token_row);
      if (receiver.direct && params_.one_row_per_token) {
        write_scales(token, tables, receiver, token_row);
        write_entries(tables, receiver, rank, token_row);
      }
    }
    if (!params_.one_row_per_token) write_expert_rows(token, tables);
  }

 private:
  /// Address of a 4-byte scale.
  __device__ const std::byte* scale_address(std::int64_t token, int column) const {
    const ScaleTable& scales = params_.scales;
    return scales.data + 4 * (token * scales.row_stride + column * scales.column_stride);
  }
  __device__ std::uint32_t load_scale(std::int64_t token, int column) const {
    return *reinterpret_cast<const std::uint32_t*>(scale_address(token, column));
  }
  __device__ std::byte load_scale_byte(std::int64_t token, int column) const {
    const ScaleTable& scales = params_.scales;
    return scales.data[token * scales.row_stride + column * scales.column_stride];
  }

  /// Calls `write(column, word)` for this lane's 4-byte scales.
  template <typename Write>
  __device__ void for_each_scale(std::int64_t token, const TokenTables& tables, Write write) const {
#pragma unroll
    for (int i = 0; i < kHeldScaleWords; ++i) {
      const int column = lane_idx() + i * kWarpLanes;
      if (column < params_.scales.num_scales) write(column, tables.scale_words[i]);
    }
    for (int column = lane_idx() + kHeldScaleWords * kWarpLanes; column < params_.scales.num_scales;
         column += kWarpLanes) {
      write(column, load_scale(token, column));
    }
  }

  __device__ void write_scales(std::int64_t token, const TokenTables& tables, const Receiver& receiver,
                               std::int64_t row) const {
    std::byte* out = receiver.scales + row * receiver.scales_stride;
    if (holds_scales_) {
      for_each_scale(token, tables, [&](int column, std::uint32_t word) {
        *reinterpret_cast<std::uint32_t*>(out + column * receiver.scales_column_stride) = word;
      });
      return;
    }
    for (int column = lane_idx(); column < params_.scales.num_scales; column += kWarpLanes) {
      out[column * receiver.scales_column_stride] = load_scale_byte(token, column);
    }
  }

  /// kTokens: ids and weights of one row; entries of other ranks' experts are -1 and 0.
  __device__ void write_entries(const TokenTables& tables, const Receiver& receiver, int rank, std::int64_t row) const {
    if (lane_idx() >= params_.num_topk) return;
    const bool mine = tables.destination.rank == rank;
    const std::int64_t at = row * params_.num_topk + tables.destination.topk;
    if (params_.record.has_ids) {
      const std::int32_t id = mine ? tables.destination.local_expert : -1;
      if (receiver.wide_ids) {
        static_cast<std::int64_t*>(receiver.ids)[at] = id;
      } else {
        static_cast<std::int32_t*>(receiver.ids)[at] = id;
      }
    }
    if (params_.record.has_weights) receiver.weights[at] = mine ? tables.weight : 0.0F;
  }

  /// kExperts, kSlab: scales and weight of each row that this token takes.
  __device__ void write_expert_rows(std::int64_t token, const TokenTables& tables) const {
    const Destination& destination = tables.destination;
    const float row_weight = params_.record.has_weights ? sum_duplicates(tables) : 0.0F;
    const bool first =
        destination.rank >= 0 && (destination.flags & kFirstOfRow) != 0 && receivers_[destination.rank].direct;
    if (first && params_.record.has_weights) receivers_[destination.rank].weights[destination.row] = row_weight;
    if (params_.scales.num_scales == 0) return;
    for (unsigned left = __ballot_sync(0xFFFFFFFFU, first); left != 0; left &= left - 1) {
      const int lane = __ffs(static_cast<int>(left)) - 1;
      const int rank = __shfl_sync(0xFFFFFFFFU, static_cast<int>(destination.rank), lane);
      write_scales(token, tables, receivers_[rank], __shfl_sync(0xFFFFFFFFU, destination.row, lane));
    }
  }

  /// Sum of the weights of a row's destinations in topk order, on the lane of the row's first destination. The lanes of
  /// the others follow that lane.
  __device__ float sum_duplicates(const TokenTables& tables) const {
    const Destination& destination = tables.destination;
    const bool first = destination.rank >= 0 && (destination.flags & kFirstOfRow) != 0;
    float sum = tables.weight;
    bool counting = first;
    for (unsigned distance = 1; __any_sync(0xFFFFFFFFU, counting) != 0; ++distance) {
      const float weight = __shfl_down_sync(0xFFFFFFFFU, tables.weight, distance);
      const unsigned starts =
          __shfl_down_sync(0xFFFFFFFFU, static_cast<unsigned>(destination.flags & kFirstOfRow), distance);
      const int rank = __shfl_down_sync(0xFFFFFFFFU, static_cast<int>(destination.rank), distance);
      counting = counting && lane_idx() + static_cast<int>(distance) < params_.num_topk && rank >= 0 && starts == 0;
      if (counting) sum = __fadd_rn(sum, weight);
    }
    return sum;
  }

  __device__ void write_record(std::int64_t token, const TokenTables& tables, const Receiver& receiver, int rank,
                               std::int64_t token_row) const {
    const plan::TokenRecord& format = params_.record;
    auto* record = reinterpret_cast<std::uint32_t*>(receiver.records + token_row * format.size_bytes());
    if (holds_scales_) {
      for_each_scale(token, tables, [record](int column, std::uint32_t word) { record[column] = word; });
    } else {
      for (int column = lane_idx(); column < params_.scales.num_scales; column += kWarpLanes) {
        reinterpret_cast<std::byte*>(record)[column] = load_scale_byte(token, column);
      }
    }
    if (lane_idx() >= params_.num_topk) return;
    const bool mine = tables.destination.rank == rank;
    const int topk = tables.destination.topk;
    if (format.has_ids) {
      record[format.ids_word + topk] = static_cast<std::uint32_t>(mine ? tables.destination.local_expert : -1);
    }
    if (format.has_weights) record[format.weights_word + topk] = mine ? __float_as_uint(tables.weight) : 0U;
    if (format.has_rows) {
      record[format.rows_word + topk] = static_cast<std::uint32_t>(mine ? tables.destination.row : -1);
    }
  }

  const DispatchParams& params_;
  const Receiver* receivers_;
  bool holds_scales_;
};

}  // namespace ferry::cuda::device

#endif  // FERRY_CUDA_INTRANODE_DISPATCH_TABLES_CUH
