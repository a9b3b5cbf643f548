#ifndef FERRY_CPU_CONTEXT_RUN_CALL_HPP
#define FERRY_CPU_CONTEXT_RUN_CALL_HPP

#include "core/backend.hpp"
#include "cpu/context/context.hpp"

namespace ferry::cpu {

/// Runs a dispatch or combine on this rank: `Operation` prepares its part of the descriptor, all ranks agree, and it
/// runs. A call that this rank's own checks refused takes part in the agreement only. `ranks`: the participants, for
/// operations that can run without some ranks; none: all ranks.
template <typename Operation, typename Call, typename... Ranks>
Status run_call(const Call& call, const Context& context, Ranks&... ranks) {
  const auto begin = [&](const node::CallDescriptor& descriptor) {
    if constexpr (sizeof...(ranks) == 0) {
      return context.sync.begin(descriptor);
    } else {
      return (ranks, ...).begin(descriptor);
    }
  };
  if (!context.sync.broken().ok()) return context.sync.broken();
  node::CallDescriptor descriptor;
  descriptor.record = call.record;
  if (call.record.code != ErrorCode::kOk) return begin(descriptor);
  Operation operation(call, context, ranks...);
  if (Status status = operation.prepare(descriptor); !status.ok()) descriptor.record.set_status(status);
  if (Status status = begin(descriptor); !status.ok()) return status;
  return operation.run();
}

}  // namespace ferry::cpu

#endif  // FERRY_CPU_CONTEXT_RUN_CALL_HPP
