#ifndef FERRY_CUDA_SYNC_FAULT_TEXT_HPP
#define FERRY_CUDA_SYNC_FAULT_TEXT_HPP

/// The reports of kernels as error messages.

#include <cstdint>
#include <string>
#include <string_view>

#include "cuda/sync/call_log.hpp"
#include "cuda/sync/report.hpp"
#include "ferry/status.hpp"

namespace ferry::cuda {

/// A wait that timed out after `timeout_ns`. `calls` may show that the rank it waited for has made another call; null:
/// there is none.
std::string describe_lost(const LostReport& lost, std::int64_t timeout_ns, const CallLog* calls = nullptr);

/// What the exchange refused; `operation` is the call in which the host found out.
Status describe_fault(const FaultReport& fault, const CallLog& call_log, int num_ranks, std::string_view operation);

}  // namespace ferry::cuda

#endif  // FERRY_CUDA_SYNC_FAULT_TEXT_HPP
