/// The kernel that waits for tiles in place of the kernels for few tokens (small_combine.cuh), and before them: these
/// take 2 us longer on an H200 if they have the code for it.

#include "cuda/latency/kernel_row.hpp"
#include "cuda/latency/kernels.hpp"
#include "cuda/latency/tile_wait.cuh"

namespace ferry::cuda {
namespace {

using namespace device;  // NOLINT(google-build-using-namespace)

constexpr int kTilesThreads = 256;

/// Waits for all tiles that hold a received row. One block.
__global__ void __launch_bounds__(kTilesThreads) tiles_gate_kernel(const __grid_constant__ TilesGateParams params) {
  const LatencyParams& call = params.call;
  if (is_broken(call.ranks) || call.tables.summary->valid == 0) return;
  const int tile_rows = params.tiles.tile_rows;
  bool came = true;
#pragma unroll 1
  for (int expert = 0; expert < call.num_local_experts && came; ++expert) {
    const std::int32_t num_rows = call.tables.rows_per_expert[expert];
    const int num_tiles = num_rows / tile_rows + (num_rows % tile_rows != 0 ? 1 : 0);
#pragma unroll 1
    for (int tile = static_cast<int>(threadIdx.x); tile < num_tiles && came; tile += kTilesThreads) {
      came = await_tile(call, params.tiles, expert, tile);
    }
  }
}

constexpr KernelRow<TilesGateParams> kGate = {{tiles_gate_kernel}, kTilesThreads, nullptr};

}  // namespace

cudaError_t launch_tiles_gate(const TilesGateParams& params, cudaStream_t stream) {
  return kGate.launch(0, 1, false, params, stream);
}

cudaError_t load_tiles_gate() { return load_rows(kGate); }

}  // namespace ferry::cuda
