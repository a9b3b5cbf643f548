#ifndef FERRY_TESTS_EMULATOR_LATENCY_COMBINE_HPP
#define FERRY_TESTS_EMULATOR_LATENCY_COMBINE_HPP

#include <string>
#include <vector>

#include "emulator/latency_routing.hpp"

namespace ferry::emulator {

struct LatencyCombineSpec {
  std::int64_t hidden = 16;
  bool float32 = false;
  CombineOrder order = CombineOrder::kExact;
  bool own_weights = false;    ///< passed to the combine
  bool fp8 = false;            ///< sums travel as FP8; with kRankSums, bf16 and whole blocks
  std::int64_t gap_bytes = 0;  ///< between rows, inputs and outputs
  int num_blocks = 2;          ///< of one rank's halves; every second rank has one more
  std::uint64_t agreement = 77;
  std::uint64_t seed = 1;
  std::vector<int> masked = {};  ///< ranks masked since the dispatch
  bool words = true;             ///< sums of few tokens are sent as words
  int num_helpers = 0;           ///< of a whole call without words; less than num_blocks - 1
};

/// One combine on all ranks, and its expected results from the oracle.
class LatencyCombine {
 public:
  LatencyCombine(LatencyRanks& ranks, const LatencyRouting& routing, const LatencyCombineSpec& spec);

  /// Queue one half on the rank's stream.
  void send(int rank);
  void receive(int rank);
  /// Queues the call in one kernel.
  void run_whole(int rank);
  /// Queues the call: on some ranks in one kernel, on others as its halves.
  void run(int rank) {
    if ((spec_.seed + static_cast<std::uint64_t>(rank)) % 3 != 0) return run_whole(rank);
    send(rank);
    receive(rank);
  }
  /// Queues a refusal in place of the call.
  void refuse(int rank);
  /// `other_agreement`: agreement of a rank that passes different arguments.
  void send_other(int rank, std::uint64_t other_agreement);
  void receive_other(int rank, std::uint64_t other_agreement);

  /// Describes the first error in the rank's received data; "" if there is none.
  std::string compare(int rank) const;
  /// Whether no byte was written.
  bool is_untouched(int rank) const;

 private:
  std::int64_t row_bytes() const { return spec_.hidden * (spec_.float32 ? 4 : 2); }
  std::int64_t stride() const { return row_bytes() + spec_.gap_bytes; }
  const float* weights_of(int rank) const;
  cuda::LatencyParams call(int rank, std::uint64_t agreement) const;
  cuda::CombineRows rows() const;
  cuda::CombineSendParams send_params(int rank, std::uint64_t agreement) const;
  cuda::CombineReceiveParams receive_params(int rank, std::uint64_t agreement);

  LatencyRanks& ranks_;
  const LatencyRouting& routing_;
  LatencyCombineSpec spec_;
  oracle::CombineInputs inputs_;
  std::vector<oracle::RankCombined> expected_;
  std::vector<DeviceMemory> x_;
  std::vector<DeviceMemory> out_;
};

}  // namespace ferry::emulator

#endif  // FERRY_TESTS_EMULATOR_LATENCY_COMBINE_HPP
