/// Rows behind a flag: pairs of blocks send each other a row in turn.

#include "cuda/copy/bulk_copy.cuh"
#include "gpu/litmus_device.cuh"

namespace ferry::test {
namespace {

using namespace cuda::device;  // NOLINT(google-build-using-namespace): the primitives under test

constexpr int kNumThreads = 128;

/// One block's side of a pair.
struct Side {
  uint4* mine = nullptr;
  uint4* theirs = nullptr;
  const std::uint64_t* my_flag = nullptr;
  std::uint64_t* their_flag = nullptr;
  uint4* source = nullptr;
};

/// The block's part of shared memory.
struct Staging {
  alignas(128) std::byte row[kMaxRowBytes];
  std::uint64_t barrier;
  std::uint64_t flag_seen;
};

template <Transfer kTransfer>
__device__ void produce(const Side& side, Staging& staging, std::uint32_t round, std::uint32_t& parity) {
  constexpr bool kBulk = kTransfer != Transfer::kStores;
  const int num_units = units_of_round(round);
  const auto num_bytes = static_cast<std::uint32_t>(num_units * kUnitBytes);
  const std::uint32_t seed = seed_of(round, blockIdx.x);
  uint4* const written = kBulk ? side.source : side.theirs;
  for (int unit = static_cast<int>(threadIdx.x); unit < num_units; unit += kNumThreads) {
    written[unit] = unit_of(seed, unit);
  }
  if constexpr (kBulk) fence_async_proxy();
  __syncthreads();
  if (threadIdx.x == 0) {
    if constexpr (kBulk) {
      expect_loads(&staging.barrier, num_bytes);
      start_load(staging.row, side.source, num_bytes, &staging.barrier);
      wait_barrier(&staging.barrier, parity);
      start_store(side.theirs, staging.row, num_bytes);
      close_store_group();
      wait_store_groups<0>();
      fence_async_proxy();
    }
    store_release_system(side.their_flag, round);
  }
  if constexpr (kBulk) parity ^= 1U;
}

/// Checks a row. Returns false if the row did not arrive.
template <Transfer kTransfer>
__device__ bool consume(const MailboxParams& params, const Side& side, Staging& staging, std::uint32_t round,
                        std::uint32_t& parity) {
  if (threadIdx.x == 0) staging.flag_seen = await_flag(side.my_flag, round, params.timeout_ns, *params.report);
  __syncthreads();
  const std::uint64_t flag_seen = staging.flag_seen;
  if (flag_seen < round) return false;
  const int num_units = units_of_round(round);
  const std::uint32_t seed = seed_of(round, blockIdx.x);
  const uint4* row = side.mine;
  if constexpr (kTransfer == Transfer::kBulkThenBulk) {
    if (threadIdx.x == 0) {
      const auto num_bytes = static_cast<std::uint32_t>(num_units * kUnitBytes);
      fence_async_proxy();
      expect_loads(&staging.barrier, num_bytes);
      start_load(staging.row, side.mine, num_bytes, &staging.barrier);
    }
    wait_barrier(&staging.barrier, parity);
    parity ^= 1U;
    row = reinterpret_cast<const uint4*>(staging.row);
  }
  for (int unit = static_cast<int>(threadIdx.x); unit < num_units; unit += kNumThreads) {
    check_unit(*params.report, row[unit], seed, unit, round);
  }
  if (threadIdx.x == 0 && flag_seen != round) {
    note(*params.report, Breach::kFlag, static_cast<int>(blockIdx.x), round, flag_seen, round);
  }
  __syncthreads();  // all threads have read the row, so the answer may be sent
  return true;
}

template <Transfer kTransfer>
__global__ void __launch_bounds__(kNumThreads) mailbox_kernel(const __grid_constant__ MailboxParams params) {
  __shared__ Staging staging;
  const std::size_t row_offset = std::size_t{blockIdx.x} * kMaxRowBytes;
  const std::size_t flag_offset = std::size_t{blockIdx.x} * kFlagStride;
  const int other = 1 - params.side;
  const Side side = {reinterpret_cast<uint4*>(params.mailboxes[params.side] + row_offset),
                     reinterpret_cast<uint4*>(params.mailboxes[other] + row_offset),
                     params.flags[params.side] + flag_offset, params.flags[other] + flag_offset,
                     reinterpret_cast<uint4*>(params.sources + row_offset)};
  if (threadIdx.x == 0) {
    init_barrier(&staging.barrier);
    publish_barriers();
  }
  __syncthreads();
  std::uint32_t parity = 0;
  for (std::uint32_t round = 1; round <= params.num_rounds; ++round) {
    if (round % 2 == static_cast<std::uint32_t>(params.side)) {
      produce<kTransfer>(side, staging, round, parity);
    } else if (!consume<kTransfer>(params, side, staging, round, parity)) {
      return;
    }
  }
  if (threadIdx.x == 0) atomicAdd_system(&params.report->num_completed, 1U);
}

template <Transfer kTransfer>
cudaError_t launch(const MailboxParams& params, cudaStream_t stream) {
  mailbox_kernel<kTransfer><<<params.num_pairs, kNumThreads, 0, stream>>>(params);
  return cudaGetLastError();
}

}  // namespace

cudaError_t launch_mailbox(const MailboxParams& params, Transfer transfer, cudaStream_t stream) {
  switch (transfer) {
    case Transfer::kStores:
      return launch<Transfer::kStores>(params, stream);
    case Transfer::kBulkThenLoads:
      return launch<Transfer::kBulkThenLoads>(params, stream);
    case Transfer::kBulkThenBulk:
      return launch<Transfer::kBulkThenBulk>(params, stream);
  }
  return cudaErrorInvalidValue;
}

}  // namespace ferry::test
