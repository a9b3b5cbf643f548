#ifndef FERRY_CUDA_SYNC_FAULT_TEXT_HPP
#define FERRY_CUDA_SYNC_FAULT_TEXT_HPP

#include <string>
#include <string_view>

#include "cuda/sync/call_log.hpp"
#include "cuda/sync/rail_params.hpp"
#include "cuda/sync/report.hpp"
#include "ferry/group.hpp"

namespace ferry::cuda {

/// Completes "waiting for rank 3 …".
std::string_view awaited_text(Awaited awaited);

/// Rank in the group for which a kernel of `topology.rank` waited in vain.
int rank_missed(const LostReport& lost, const Topology& topology);

/// Describes the wait that failed, without a hint: "exchange 7 on the GPU: timed out after 50 ms waiting …".
/// `calls` may show that the awaited rank has made another call; null: there is no log.
std::string describe_lost(const LostReport& lost, const Topology& topology, std::int64_t timeout_ns,
                          const CallLog* calls = nullptr);

/// Records of other ranks' calls, as this host can read them.
struct RankRecords {
  const CallLog& calls;
  const FoundRecord* found = nullptr;  ///< [ranks of the node, nodes] records that accompany the fault; in groups of
                                       ///< several nodes
  const Topology& topology;
};

/// Describes the fault in the same words on every rank. `operation` is used if the records are no longer available. Ok:
/// the fault has been described before.
Status describe_fault(const FaultReport& fault, const RankRecords& records, std::string_view operation);

}  // namespace ferry::cuda

#endif  // FERRY_CUDA_SYNC_FAULT_TEXT_HPP
