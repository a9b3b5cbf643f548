#ifndef FERRY_CPU_CONTEXT_RUN_CALL_HPP
#define FERRY_CPU_CONTEXT_RUN_CALL_HPP

#include "core/backend.hpp"
#include "cpu/context/context.hpp"

namespace ferry::cpu {

/// Runs a dispatch or combine on this rank: `Operation` prepares its part of the descriptor, all ranks agree, and it
/// runs. A call that this rank's own checks refused takes part in the agreement only.
template <typename Operation, typename Call>
Status run_call(const Call& call, const Context& context) {
  if (!context.sync.broken().ok()) return context.sync.broken();
  node::CallDescriptor descriptor;
  descriptor.record = call.record;
  if (call.record.code != ErrorCode::kOk) return context.sync.begin(descriptor);
  Operation operation(call, context);
  if (Status status = operation.prepare(descriptor); !status.ok()) descriptor.record.set_status(status);
  if (Status status = context.sync.begin(descriptor); !status.ok()) return status;
  return operation.run();
}

}  // namespace ferry::cpu

#endif  // FERRY_CPU_CONTEXT_RUN_CALL_HPP
