/// Progress of many warps: a sender's blocks write rows and report chunks, and a watcher on every rank checks them.

#include "cuda/copy/bulk_copy.cuh"
#include "cuda/sync/chunks.cuh"
#include "gpu/litmus_device.cuh"

namespace ferry::test {
namespace {

using namespace cuda::device;  // NOLINT(google-build-using-namespace): the primitives under test

constexpr int kWatchThreads = 256;
/// Longest pause of a warp after the rows of a chunk, so that the last warp of a chunk varies.
constexpr std::uint32_t kMaxPauseNs = 4000;

struct RowsAfter {
  ChunkShape shape;
  int num_ranks;

  __device__ std::int64_t operator()(int chunk, int rank) const {
    const int all = rows_for(shape, rank, num_ranks);
    return min((chunk + 1) * shape.rows_per_chunk, all);
  }
};

__device__ std::uint32_t row_seed(std::uint64_t epoch, int rank, int row) {
  return seed_of(static_cast<std::uint32_t>(epoch), static_cast<std::uint32_t>(rank << 20 | row));
}

__global__ void fill_sources_kernel(const __grid_constant__ SendChunksParams params) {
  const int rank = static_cast<int>(blockIdx.y);
  const int units_per_row = params.shape.row_bytes / kUnitBytes;
  const int most_rows = params.shape.num_chunks * params.shape.rows_per_chunk;
  const int num_units = rows_for(params.shape, rank, params.ranks.num_ranks) * units_per_row;
  auto* const source = reinterpret_cast<uint4*>(params.sources) + std::int64_t{rank} * most_rows * units_per_row;
  const int first = static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x);
  for (int unit = first; unit < num_units; unit += static_cast<int>(gridDim.x * blockDim.x)) {
    source[unit] = unit_of(row_seed(params.epoch, rank, unit / units_per_row), unit % units_per_row);
  }
}

/// Sends a row. All lanes of a warp call it; on return each lane's own writes of the row are complete.
__device__ void send_row(const uint4* from, uint4* to, int num_bytes, bool bulk, std::byte* staging,
                         std::uint64_t* barrier, std::uint32_t& parity) {
  if (!bulk) {
    for (int unit = lane_idx(); unit < num_bytes / kUnitBytes; unit += kWarpLanes) to[unit] = from[unit];
    return;
  }
  if (lane_idx() == 0) {
    expect_loads(barrier, static_cast<std::uint32_t>(num_bytes));
    start_load(staging, from, static_cast<std::uint32_t>(num_bytes), barrier);
    wait_barrier(barrier, parity);
    start_store(to, staging, static_cast<std::uint32_t>(num_bytes));
    close_store_group();
    wait_store_groups<0>();
  }
  parity ^= 1U;
}

__global__ void __launch_bounds__(kSendWarps* kWarpLanes)
    send_chunks_kernel(const __grid_constant__ SendChunksParams params) {
  __shared__ alignas(128) std::byte staging[kSendWarps][kMaxChunkRowBytes];
  __shared__ std::uint64_t barriers[kSendWarps];
  __shared__ bool all_watch;
  const ChunkShape& shape = params.shape;
  const int num_ranks = params.ranks.num_ranks;
  if (lane_idx() == 0) {
    init_barrier(&barriers[warp_idx()]);
    publish_barriers();
  }
  if (threadIdx.x == 0) {
    all_watch = true;
    for (int rank = 0; rank < num_ranks; ++rank) {
      const std::uint64_t* const flag = params.num_watching + rank * kFlagStride;
      all_watch = all_watch && await_flag(flag, params.epoch, params.ranks.timeout_ns, *params.report) >= params.epoch;
    }
  }
  __syncthreads();
  if (!all_watch) return;

  const int num_warps = static_cast<int>(gridDim.x) * kSendWarps;
  const int warp = static_cast<int>(blockIdx.x) * kSendWarps + warp_idx();
  const std::int64_t units_per_row = shape.row_bytes / kUnitBytes;
  const std::int64_t most_rows = std::int64_t{shape.num_chunks} * shape.rows_per_chunk;
  const RowsAfter rows_after = {shape, num_ranks};
  ChunkReporter reporter(params.ranks, {num_warps, shape.num_chunks}, params.epoch, rows_after);
  std::uint32_t parity = 0;
  for (int chunk = 0; chunk < shape.num_chunks; ++chunk) {
    for (int rank = 0; rank < num_ranks; ++rank) {
      const std::int64_t begin = chunk == 0 ? 0 : rows_after(chunk - 1, rank);
      const std::int64_t end = rows_after(chunk, rank);
      for (std::int64_t row = begin + warp; row < end; row += num_warps) {
        const auto* const from =
            reinterpret_cast<const uint4*>(params.sources) + (rank * most_rows + row) * units_per_row;
        auto* const to = reinterpret_cast<uint4*>(params.rows[rank]) + row * units_per_row;
        const bool bulk = (row / num_warps + warp) % 2 == 0;
        send_row(from, to, shape.row_bytes, bulk, staging[warp_idx()], &barriers[warp_idx()], parity);
      }
    }
    const std::uint32_t dice =
        seed_of(static_cast<std::uint32_t>(params.epoch), static_cast<std::uint32_t>(chunk * num_warps + warp));
    if (dice % 4 == 0) __nanosleep(dice / 4 % kMaxPauseNs);
    if ((chunk + warp) % shape.report_every == 0) reporter.report_before(chunk + 1);
  }
  reporter.report_before(shape.num_chunks);
  post_block_done(params.ranks, params.epoch);
  if (threadIdx.x == 0) atomicAdd_system(&params.report->num_completed, 1U);
}

__device__ bool all_blocks_done(const WatchChunksParams& params) {
  const std::uint64_t* words = params.ranks.control.block_done + params.sender * cuda::kMaxCallBlocks;
  for (int block = 0; block < params.shape.num_blocks; ++block) {
    if (load_acquire_system(words + block) < params.epoch) return false;
  }
  return true;
}

__global__ void __launch_bounds__(kWatchThreads) watch_chunks_kernel(const __grid_constant__ WatchChunksParams params) {
  struct Look {
    std::int64_t counted;
    bool done;
    bool expired;
  };
  __shared__ Look latest;
  LitmusReport& report = *params.report;
  const int rank = params.ranks.rank;
  const int units_per_row = params.shape.row_bytes / kUnitBytes;
  const std::int64_t num_rows = rows_for(params.shape, rank, params.ranks.num_ranks);
  const auto* const units = reinterpret_cast<const uint4*>(params.rows);
  const bool speaks = threadIdx.x == 0;
  const std::uint64_t deadline_ns = now_ns() + params.ranks.timeout_ns;
  std::int64_t before = 0;
  if (speaks) {
    const std::uint64_t word = load_acquire_system(&params.ranks.control.progress[params.sender]);
    const std::uint64_t early = rows_reported(word, params.epoch);
    if (early != 0) note(report, Breach::kFlag, rank, params.epoch, word, progress_value(params.epoch, 0));
  }
  __syncthreads();
  if (speaks) store_release_system(params.num_watching, params.epoch);
  for (std::int64_t num_checked = 0;;) {
    if (speaks) {
      latest.done = all_blocks_done(params);
      latest.expired = now_ns() >= deadline_ns;
      const std::uint64_t word = load_acquire_system(&params.ranks.control.progress[params.sender]);
      latest.counted = static_cast<std::int64_t>(rows_reported(word, params.epoch));
    }
    __syncthreads();
    const Look look = latest;
    __syncthreads();
    const std::int64_t counted = look.counted;
    if (speaks && counted < before) {
      note(report, Breach::kWentBack, rank, params.epoch, static_cast<std::uint64_t>(counted),
           static_cast<std::uint64_t>(before));
    }
    if (speaks && counted != before) atomicAdd_system(&report.num_steps, 1U);
    before = counted;
    if (counted > num_rows || (look.done && counted != num_rows)) {
      if (speaks) {
        note(report, Breach::kRowCount, rank, params.epoch, static_cast<std::uint64_t>(counted),
             static_cast<std::uint64_t>(num_rows));
      }
      return;
    }
    for (std::int64_t i = num_checked * units_per_row + threadIdx.x; i < counted * units_per_row; i += kWatchThreads) {
      const int row = static_cast<int>(i / units_per_row);
      check_unit(report, units[i], row_seed(params.epoch, rank, row), static_cast<int>(i % units_per_row),
                 params.epoch);
    }
    num_checked = max(num_checked, counted);
    if (look.done) break;
    if (look.expired) {
      if (speaks) atomicAdd_system(&report.num_expired, 1U);
      return;
    }
  }
  __syncthreads();
  if (speaks) atomicAdd_system(&report.num_completed, 1U);
}

}  // namespace

cudaError_t launch_send_chunks(const SendChunksParams& params, cudaStream_t stream) {
  constexpr unsigned kFillBlocks = 16;
  constexpr unsigned kFillThreads = 256;
  const dim3 fill_grid(kFillBlocks, static_cast<unsigned>(params.ranks.num_ranks));
  fill_sources_kernel<<<fill_grid, kFillThreads, 0, stream>>>(params);
  send_chunks_kernel<<<params.shape.num_blocks, kSendWarps * kWarpLanes, 0, stream>>>(params);
  return cudaGetLastError();
}

cudaError_t launch_watch_chunks(const WatchChunksParams& params, cudaStream_t stream) {
  watch_chunks_kernel<<<1, kWatchThreads, 0, stream>>>(params);
  return cudaGetLastError();
}

}  // namespace ferry::test
