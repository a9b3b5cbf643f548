#ifndef FERRY_TESTS_EMULATOR_LATENCY_DISPATCH_HPP
#define FERRY_TESTS_EMULATOR_LATENCY_DISPATCH_HPP

/// One dispatch of latency mode on emulated GPUs, and its expected results from the oracle.

#include <cstdint>
#include <string>
#include <vector>

#include "emulator/latency_routing.hpp"
#include "plan/replicas.hpp"

namespace ferry::emulator {

struct LatencyDispatchSpec {
  std::int64_t hidden = 256;                    ///< of bf16
  Quantization quantize = Quantization::kNone;  ///< kNone: rows move as bytes
  DType scale_dtype = DType::kFloat32;
  int num_scales = 0;         ///< kNone: S of the input's scales, 0: no scales
  bool column_major = false;  ///< scales of each expert are column-major
  bool zero_padding = false;
  bool wide_ids = true;
  bool placed = false;         ///< ids name experts whose only home is the next expert, and rows are counted
  std::int64_t gap_bytes = 0;  ///< between rows
  int num_blocks = 3;          ///< at least 2
  int warps_per_row = 1;
  int num_gap_blocks = 0;  ///< not with zero_padding; less than num_blocks - 1
  int num_receivers = 2;   ///< blocks that only receive, if there are any
  int num_send_only =
      0;  ///< blocks that only send, where all others do both; less than num_blocks - num_gap_blocks - 1
  std::uint64_t agreement = 77;
  std::uint64_t seed = 1;
};

class LatencyDispatch {
 public:
  LatencyDispatch(LatencyRanks& ranks, const LatencyRouting& routing, const LatencyDispatchSpec& spec);

  /// Queue this rank's halves on its stream.
  void send(int rank) { send_other(rank, spec_.agreement); }
  void receive(int rank) { receive_other(rank, spec_.agreement); }
  /// Queues the call in one kernel.
  void run_whole(int rank);
  /// Whether that kernel is the one for small calls.
  bool is_small(int rank) { return cuda::is_small(whole_params(rank)); }
  /// Queues the call: on some ranks in one kernel, on others as its halves.
  void run(int rank) {
    if ((spec_.seed + static_cast<std::uint64_t>(rank)) % 3 != 0) return run_whole(rank);
    send(rank);
    receive(rank);
  }
  /// Variants with arguments that differ from the other ranks'.
  void send_other(int rank, std::uint64_t agreement);
  void receive_other(int rank, std::uint64_t agreement);
  /// Queues a refusal in place of the call.
  void refuse(int rank);
  /// Gives a rank an id that names no expert.
  void spoil_id(int rank, std::size_t entry, std::int64_t id) {
    ids_[static_cast<std::size_t>(rank)][entry] = id;
    narrow_ids_[static_cast<std::size_t>(rank)][entry] = static_cast<std::int32_t>(id);
  }

  /// Sets slabs with fewer rows than the world needs.
  void set_capacity(std::int64_t capacity) { told_capacity_ = capacity; }

  /// Describes the first difference from the expected outputs and Routing; "" if there is none.
  std::string compare(int rank) const;
  bool is_untouched(int rank) const;

 private:
  cuda::LatencyParams call(int rank, std::uint64_t agreement) const;
  cuda::DispatchSendParams send_params(int rank, std::uint64_t agreement) const;
  cuda::DispatchReceiveParams receive_params(int rank, std::uint64_t agreement);
  cuda::LatencyDispatchParams whole_params(int rank);
  cuda::LatencyRow row() const;
  std::int64_t in_row_bytes() const { return spec_.hidden * 2; }
  std::int64_t in_stride() const { return in_row_bytes() + spec_.gap_bytes; }
  std::int64_t out_stride() const { return row().x_bytes + spec_.gap_bytes; }
  std::int64_t capacity() const { return routing_.world().options.slab_capacity; }
  cuda::SlabScales scales(int rank) const;
  cuda::PlacementTables placement(int rank) const;
  void list_homes();
  void place();

  LatencyRanks& ranks_;
  const LatencyRouting& routing_;
  LatencyDispatchSpec spec_;
  std::int64_t told_capacity_ = 0;  ///< capacity passed to the kernels; 0: the world's
  oracle::DispatchInputs inputs_;
  std::vector<oracle::RankReceived> expected_;
  std::vector<std::int32_t> local_experts_;
  // Set if the world has a placement, or if the spec is `placed`.
  std::vector<plan::HomeTable> homes_;  ///< by rank
  std::vector<std::int32_t> logical_of_;
  // By rank.
  std::vector<std::vector<std::int64_t>> ids_;
  std::vector<std::vector<std::int32_t>> narrow_ids_;
  std::vector<DeviceMemory> x_;
  std::vector<DeviceMemory> out_x_;
  std::vector<DeviceMemory> out_scales_;
  std::vector<std::vector<std::int32_t>> counters_;  ///< rows of each local expert, if the spec is `placed`
};

}  // namespace ferry::emulator

#endif  // FERRY_TESTS_EMULATOR_LATENCY_DISPATCH_HPP
