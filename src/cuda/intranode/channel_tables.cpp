#include "cuda/call/channel_tables.hpp"

#include "cuda/call/routing.hpp"
#include "cuda/intranode/calls.hpp"

namespace ferry::cuda {

Status intranode::channel_tables(Context& context, const ChannelTablesCall& call) {
  const auto& routing = static_cast<const CudaRouting&>(*call.routing);
  return write_channel_tables(context, channel_tables_params(context.parts().ranks, routing, call));
}

}  // namespace ferry::cuda
