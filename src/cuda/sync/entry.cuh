#ifndef FERRY_CUDA_SYNC_ENTRY_CUH
#define FERRY_CUDA_SYNC_ENTRY_CUH

/// Entry of a call: every rank sends every other rank the kind of its call and the locations of its memory, and all
/// ranks reach the same outcome. One trip over the link; see `entries` in control.hpp.

#include "cuda/sync/rank_sync.cuh"

namespace ferry::cuda::device {

/// Flags of all ranks: whether the rank's entry of `epoch` has arrived.
struct EntryFlags {
  const std::uint64_t* entries;
  std::uint64_t epoch;

  /// Returns `epoch`, or 0 before the entry has arrived.
  __device__ std::uint64_t load(int rank) const {
    const std::uint64_t word = load_acquire_system(entries + static_cast<std::size_t>(rank) * kEntrySlotWords);
    return word >> 32 == half_of(epoch) ? epoch : 0;
  }
};

__device__ inline EntryFlags entry_flags(const RankParams& ranks, std::uint64_t epoch) {
  return {ranks.control.entries, epoch};
}

/// A rank's entry, held by one warp: lane i has word i.
class ReceivedEntry {
 public:
  __device__ explicit ReceivedEntry(std::uint32_t word) : word_(word) {}

  __device__ std::uint64_t agreement() const { return field(offsetof(EntryMessage, agreement)); }
  __device__ std::int64_t rows_offset() const { return signed_field(offsetof(EntryMessage, rows_offset)); }
  __device__ std::int64_t rows_stride() const { return signed_field(offsetof(EntryMessage, rows_stride)); }
  __device__ std::int64_t tables_offset() const { return signed_field(offsetof(EntryMessage, tables_offset)); }
  __device__ std::int64_t flags() const { return signed_field(offsetof(EntryMessage, flags)); }
  __device__ std::int64_t scales_offset() const { return signed_field(offsetof(EntryMessage, scales_offset)); }
  __device__ std::int64_t scales_stride() const { return signed_field(offsetof(EntryMessage, scales_stride)); }
  __device__ std::int64_t ids_offset() const { return signed_field(offsetof(EntryMessage, ids_offset)); }
  __device__ std::int64_t weights_offset() const { return signed_field(offsetof(EntryMessage, weights_offset)); }
  __device__ int num_blocks() const { return static_cast<int>(field(offsetof(EntryMessage, num_blocks))); }

 private:
  __device__ std::uint64_t field(std::size_t offset_bytes) const {
    const int word = static_cast<int>(offset_bytes / sizeof(word_));
    const std::uint64_t low = __shfl_sync(0xFFFFFFFFU, word_, word);
    return static_cast<std::uint64_t>(__shfl_sync(0xFFFFFFFFU, word_, word + 1)) << 32 | low;
  }
  __device__ std::int64_t signed_field(std::size_t offset_bytes) const {
    return static_cast<std::int64_t>(field(offset_bytes));
  }

  std::uint32_t word_;
};

/// Sends this rank's entry to every rank. All lanes of one warp of one block call it.
__device__ inline void post_entry(const RankParams& ranks, const EntryMessage& entry, std::uint64_t epoch) {
  const int lane = lane_idx();
  std::uint32_t word = 0;
  if (lane < kEntryWords) word = reinterpret_cast<const std::uint32_t*>(&entry)[lane];
  fence_system();
  for (int i = 0; i < ranks.num_ranks; ++i) {
    const int behind = ranks.rank + i;
    const int rank = behind < ranks.num_ranks ? behind : behind - ranks.num_ranks;
    std::uint64_t* words = control_of(ranks, rank).entries + static_cast<std::size_t>(ranks.rank) * kEntrySlotWords;
    if (lane < kEntryWords) store_relaxed_system(words + lane, half_of(epoch) << 32 | word);
  }
}

/// Waits for the entries of all ranks and compares them. Calls `take(rank, entry)` in a whole warp for each entry that
/// arrives, also in calls that are then refused. All threads of a block call it. All threads on every rank get the same
/// outcome and see the data that `take` wrote to shared memory. Waits are counted where `counts`, in one block.
template <typename Take>
__device__ inline Outcome await_entries(const RankParams& ranks, const EntryMessage& entry, std::uint64_t epoch,
                                        Take take, bool counts = blockIdx.x == 0) {
  const int num_warps = static_cast<int>(blockDim.x) / kWarpLanes;
  bool here = true;
  bool equal = true;
  for (int rank = warp_idx(); rank < ranks.num_ranks; rank += num_warps) {
    // Lanes without a word of their own read the first word again.
    const std::uint64_t* address = ranks.control.entries + static_cast<std::size_t>(rank) * kEntrySlotWords +
                                   (lane_idx() < kEntryWords ? lane_idx() : 0);
    std::uint64_t word = 0;
    const auto read = [&ranks, &word, address, rank, epoch] {
      word = load_acquire_system(address);
      // A rank that routes instead posts counts.
      return word >> 32 == half_of(epoch) ? epoch : count_flags(ranks).load(rank);
    };
    const WaitCount count(ranks, rank, counts && lane_idx() == 0 && rank != ranks.rank);
    const bool came = wait_until(ranks, {Awaited::kEntry, rank, epoch}, read, epoch, count);
    here = here && came;
    const bool is_entry = __all_sync(0xFFFFFFFFU, static_cast<int>(came && word >> 32 == half_of(epoch))) != 0;
    __syncwarp();  // passes the data that each lane acquired to all lanes
    equal = equal && is_entry;
    if (!is_entry) continue;
    const ReceivedEntry received(static_cast<std::uint32_t>(word));
    equal = equal && received.agreement() == entry.agreement && entry.agreement != 0;
    take(rank, received);
  }
  const bool all_here = __syncthreads_and(static_cast<int>(here)) != 0;
  const bool all_equal = __syncthreads_and(static_cast<int>(equal)) != 0;
  fence_async_proxy();  // orders the peers' earlier actions before this rank's bulk copies
  return !all_here ? Outcome::kStop : all_equal ? Outcome::kGo : Outcome::kSkip;
}

/// Waits, in one thread, for one field of a rank's entry, given its offset in EntryMessage; false if the group broke.
__device__ inline bool wait_entry_field(const RankParams& ranks, int rank, std::uint64_t epoch,
                                        std::size_t offset_bytes, std::int64_t& value) {
  const std::uint64_t* words =
      ranks.control.entries + static_cast<std::size_t>(rank) * kEntrySlotWords + offset_bytes / sizeof(std::uint32_t);
  const auto read = [words, epoch, &value]() -> std::uint64_t {
    const std::uint64_t low = load_acquire_system(words);
    const std::uint64_t high = load_acquire_system(words + 1);
    value = static_cast<std::int64_t>(high << 32 | half_of(low));
    return low >> 32 == half_of(epoch) && high >> 32 == half_of(epoch) ? epoch : 0;
  };
  return wait_until(ranks, {Awaited::kEntry, rank, epoch}, read, epoch, StepCount(ranks, rank));
}

/// Reads two words of an entry, or of a header sent with counts; -1 if they do not arrive. The caller has not waited
/// for these words, but for others that were stored with them.
__device__ inline std::int64_t record_number_in(const std::uint64_t* words, std::uint64_t epoch) {
  constexpr int kMaxPolls = 1 << 20;
  for (int polls = 0; polls < kMaxPolls; ++polls) {
    const std::uint64_t low = load_acquire_system(words);
    const std::uint64_t high = load_acquire_system(words + 1);
    if (low >> 32 == half_of(epoch) && high >> 32 == half_of(epoch)) {
      return static_cast<std::int64_t>(high << 32 | half_of(low));
    }
  }
  return -1;
}

/// Number of a rank's call record in this epoch, for any kind of call.
__device__ inline std::int64_t record_number_of(const RankParams& ranks, int rank, std::uint64_t epoch) {
  if (count_flags(ranks).load(rank) >= epoch && entry_flags(ranks, epoch).load(rank) < epoch) {
    const std::uint64_t slot = epoch % 2 * static_cast<std::uint64_t>(ranks.num_ranks) + static_cast<unsigned>(rank);
    return record_number_in(ranks.control.headers + slot * kCountsHeaderWords +
                                offsetof(CountsHeader, record_number) / sizeof(std::uint32_t),
                            epoch);
  }
  return record_number_in(ranks.control.entries + static_cast<std::size_t>(rank) * kEntrySlotWords +
                              offsetof(EntryMessage, record_number) / sizeof(std::uint32_t),
                          epoch);
}

/// Reports to the host that ranks disagree. One thread of the call calls it.
__device__ __noinline__ inline void report_disagreement(const RankParams& ranks, std::uint64_t epoch) {
  FaultReport& fault = ranks.report->fault;
  if (*static_cast<volatile std::uint64_t*>(&fault.state) != 0) return;  // only the first fault counts
  fault.fault = static_cast<std::int32_t>(Fault::kDisagreement);
  fault.rank = -1;
  for (int rank = 0; rank < ranks.num_ranks; ++rank) fault.record_numbers[rank] = record_number_of(ranks, rank, epoch);
  fence_system();
  store_release_system(&fault.state, 1);
}

/// Copies the reason why a route was refused from the summary, which later kernels read, to the host's report.
__device__ inline void copy_fault(FaultReport& report, const RouteSummary& summary) {
  report.fault = summary.fault;
  report.rank = static_cast<std::int32_t>(summary.fault_rank);
  report.row = summary.fault_row;
  report.column = summary.fault_column;
  report.value = summary.fault_value;
  report.limit = summary.fault_limit;
}

/// Reports again that route refused the Routing. One thread of the call calls it.
__device__ __noinline__ inline void report_refused_route(const RankParams& ranks, const RouteSummary& summary) {
  FaultReport& fault = ranks.report->fault;
  if (*static_cast<volatile std::uint64_t*>(&fault.state) != 0) return;
  copy_fault(fault, summary);
  for (int rank = 0; rank < ranks.num_ranks; ++rank) fault.record_numbers[rank] = -1;
  fence_system();
  store_release_system(&fault.state, 1);
}

}  // namespace ferry::cuda::device

#endif  // FERRY_CUDA_SYNC_ENTRY_CUH
