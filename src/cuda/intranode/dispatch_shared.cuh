#ifndef FERRY_CUDA_INTRANODE_DISPATCH_SHARED_CUH
#define FERRY_CUDA_INTRANODE_DISPATCH_SHARED_CUH

/// Shared memory of a dispatch block, and the description of each receiver that the block keeps there.

#include "cuda/intranode/dispatch_tables.cuh"
#include "cuda/intranode/dispatch_units.cuh"
#include "cuda/sync/entry.cuh"
#include "plan/carver.hpp"

namespace ferry::cuda::device {

/// Layout of a block's shared memory: one function yields both sizes and pointers. Stages are at the start, where they
/// are aligned to kLandingBytes.
struct Shared {
  std::byte* stages;            ///< with the copy engine only: stages and their barriers
  std::uint64_t* run_barriers;  ///< [kRunWarps, kRunBarriers]
  std::byte* run_records;       ///< [kRunWarps, kStages, kUnitRecordBytes] of receiving warps
  FetchedTables* run_tables;    ///< [kRunWarps] of sending warps
  Receiver* receivers;          ///< [R]
  Run* runs;                    ///< [R] run for each rank, or from it
  int* num_blocks;              ///< [R] blocks of each rank's kernel
  std::uint32_t* marks;         ///< [kDispatchWarps] marks of ChunkMarker
  std::uint32_t* arrived;       ///< [R] rows noted by watch_arrivals
  Outcome* outcome;             ///< outcome of the entry, for a receiving block
  std::size_t size_bytes;

  FERRY_HOST_DEVICE static Shared at(std::byte* base, int num_ranks, bool bulk) {
    const auto ranks = static_cast<std::size_t>(num_ranks);
    plan::Carver carver(base);
    Shared shared{};
    shared.stages = carver.take<std::byte>(bulk ? kStagesBytes + kBarriersBytes : 0);
    shared.run_barriers = carver.take<std::uint64_t>(bulk ? kRunWarps * kRunBarriers : 0);
    shared.run_records = carver.take<std::byte>(bulk ? kRunWarps * kStages * kUnitRecordBytes : 0);
    shared.run_tables = carver.take<FetchedTables>(bulk ? kRunWarps : 0);
    shared.receivers = carver.take<Receiver>(ranks);
    shared.runs = carver.take<Run>(ranks);
    shared.num_blocks = carver.take<int>(ranks);
    shared.marks = carver.take<std::uint32_t>(kDispatchWarps);
    shared.arrived = carver.take<std::uint32_t>(ranks);
    shared.outcome = carver.take<Outcome>(1);
    shared.size_bytes = carver.used_bytes();
    return shared;
  }
};

/// This warp's part of the shared memory when `num_warps` warps of the block move runs.
__device__ inline RunStages make_run_stages(const Shared& shared, int num_warps) {
  const int warp = warp_idx();
  const int stage_bytes = run_stage_bytes(num_warps);
  const RunStages stages{shared.stages + warp * kStages * stage_bytes,
                         shared.run_records + warp * kStages * kUnitRecordBytes, shared.run_tables + warp,
                         shared.run_barriers + warp * kRunBarriers, stage_bytes};
  if (lane_idx() == 0) {
    for (int i = 0; i < kStages; ++i) init_barrier(stages.barriers + i);
    init_barrier(stages.tables_barrier(), kWarpLanes);
    publish_barriers();
  }
  __syncwarp();
  return stages;
}

/// Addresses at which a rank receives rows, taken from its entry.
__device__ inline Receiver receiver_of(const DispatchParams& params, int rank, const ReceivedEntry& entry) {
  std::byte* base = params.ranks.peer_bases[rank];
  const std::int64_t flags = entry.flags();
  Receiver receiver{};
  receiver.rows = base + entry.rows_offset();
  receiver.row_stride = entry.rows_stride();
  receiver.records = base + entry.tables_offset();
  receiver.staged = (flags & kRowsStaged) != 0;
  receiver.direct = (flags & kTablesDirect) != 0;
  receiver.wide_ids = (flags & kWideIds) != 0;
  receiver.scales = base + entry.scales_offset();
  receiver.scales_stride = entry.scales_stride();
  receiver.scales_column_stride = params.scales.element_bytes;
  receiver.ids = base + entry.ids_offset();
  receiver.weights = reinterpret_cast<float*>(base + entry.weights_offset());
  if (rank == params.ranks.rank) {  // this rank can reach its own memory, of any kind
    const ScaleTable& scales = params.out.scales;
    receiver = {params.out.x,
                params.out.x_stride,
                nullptr,
                scales.data,
                scales.row_stride * scales.element_bytes,
                scales.column_stride * scales.element_bytes,
                params.out.ids,
                params.out.weights,
                false,
                true,
                params.out.wide_ids,
                false,
                0,
                0};
  }
  // To copy a staged row the receiver needs the rows that the token takes.
  const plan::TokenRecord& record = params.record;
  receiver.gets_record = !receiver.direct || (receiver.staged && record.has_rows);
  if (receiver.direct) {
    receiver.ids_stride = params.num_topk * static_cast<std::int64_t>(receiver.wide_ids ? sizeof(std::int64_t) : 4);
    receiver.weights_stride = params.num_topk * static_cast<std::int64_t>(sizeof(float));
  } else {
    receiver.scales = receiver.records;
    receiver.scales_stride = receiver.ids_stride = receiver.weights_stride = record.size_bytes();
    receiver.wide_ids = false;
    receiver.ids = receiver.records + record.ids_word * sizeof(std::uint32_t);
    receiver.weights = reinterpret_cast<float*>(receiver.records + record.weights_word * sizeof(std::uint32_t));
  }
  return receiver;
}

}  // namespace ferry::cuda::device

#endif  // FERRY_CUDA_INTRANODE_DISPATCH_SHARED_CUH
