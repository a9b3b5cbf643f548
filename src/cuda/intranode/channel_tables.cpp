#include "cuda/call/channel_tables.hpp"

#include "cuda/call/routing.hpp"
#include "cuda/driver/device_guard.hpp"
#include "cuda/intranode/calls.hpp"
#include "cuda/memory/memory_checks.hpp"

namespace ferry::cuda {

Status intranode::channel_tables(Context& context, const ChannelTablesCall& call) {
  const DeviceGuard guard(context.parts().device);
  if (!guard.status().ok()) return guard.status();
  const auto& routing = static_cast<const CudaRouting&>(*call.routing);
  Status status = check_channel_tables_memory(call, routing.num_tokens, *context.parts().arena);
  if (!status.ok()) return status;
  const ChannelTablesParams params = channel_tables_params(context.parts().ranks, routing, call);
  return context.launch_local("channel_tables", call.stream,
                              [&params](cudaStream_t stream) { return launch_channel_tables(params, stream); });
}

}  // namespace ferry::cuda
