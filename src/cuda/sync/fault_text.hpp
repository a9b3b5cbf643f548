#ifndef FERRY_CUDA_SYNC_FAULT_TEXT_HPP
#define FERRY_CUDA_SYNC_FAULT_TEXT_HPP

#include <string>
#include <string_view>

#include "cuda/sync/call_log.hpp"
#include "cuda/sync/rail_params.hpp"
#include "cuda/sync/report.hpp"
#include "ferry/group.hpp"

namespace ferry::cuda {

/// The rank of the group that a wait of a kernel of `topology.rank` missed.
int rank_missed(const LostReport& lost, const Topology& topology);

/// The wait that failed, without what to do about it: "exchange 7 on the GPU: timed out after 50 ms waiting …". `calls`
/// may show that the rank it waited for has made another call; null: there is none.
std::string describe_lost(const LostReport& lost, const Topology& topology, std::int64_t timeout_ns,
                          const CallLog* calls = nullptr);

/// What hosts know of the calls of other ranks.
struct RankRecords {
  const CallLog& calls;
  const FoundRecord* found = nullptr;  ///< [ranks of the node, nodes] with the fault; in groups of several nodes
  const Topology& topology;
};

/// The same on every rank. `operation` is used where the records are not known any more. Ok: the fault has been
/// described before.
Status describe_fault(const FaultReport& fault, const RankRecords& records, std::string_view operation);

}  // namespace ferry::cuda

#endif  // FERRY_CUDA_SYNC_FAULT_TEXT_HPP
