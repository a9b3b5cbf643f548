#include "cpu/backend.hpp"

#include <fmt/format.h>
#include <sys/mman.h>

#include <cerrno>
#include <cstring>
#include <new>
#include <utility>

#include "core/descriptors.hpp"
#include "core/quantized_dispatch.hpp"
#include "core/unique_fd.hpp"
#include "cpu/context/channel_tables.hpp"
#include "cpu/internode/calls.hpp"
#include "cpu/intranode/calls.hpp"
#include "cpu/local/local_ops.hpp"
#include "cpu/memory_required.hpp"

namespace ferry::cpu {
namespace {

/// Descriptors of a rank itself: arena, listener, and some during creation. Its peers need more.
constexpr int kUsualDescriptors = 4;

Status probe() {
  const UniqueFd fd(memfd_create("ferry-probe", MFD_CLOEXEC | MFD_ALLOW_SEALING));
  if (fd.valid()) return {};
  const int error = errno;
  if (is_out_of_descriptors(error)) {
    return Status(ErrorCode::kSystem,
                  fmt::format("memfd_create failed: {}", describe_descriptor_limit(error, kUsualDescriptors)));
  }
  return Status(ErrorCode::kUnsupported,
                fmt::format("memfd_create failed: {}; the CPU backend needs Linux 3.17 and a sandbox that allows it",
                            std::strerror(error)));
}

/// Ranks read each other's memory in place.
std::size_t latency_bytes_required(const LatencyShape& /*shape*/) { return 0; }

}  // namespace

CpuBackend::CpuBackend(const BackendContext& context, std::unique_ptr<call::CallSync> sync,
                       std::unique_ptr<MaskBoard> board)
    : sync_(std::move(sync)),
      verify_(context.options.verify),
      staging_(sync_->peers().shared_arena()),
      mask_board_(std::move(board)) {
  if (mask_board_ == nullptr) return;
  survivors_.emplace(*sync_, *mask_board_, context.options.mask_lost_ranks ? context.options.mask_timeout_ns : 0);
  for (int rank = 0; rank < context.topology.num_ranks; ++rank) {
    if (context.is_absent(rank)) survivors_->update(rank, true);
  }
}

Result<std::unique_ptr<Backend>> CpuBackend::create(const BackendContext& context) {
  // All ranks have agreed on this option.
  if (context.options.ring_memory == "gpu" && context.topology.num_nodes() > 1) {
    return Status(ErrorCode::kUnsupported,
                  "Group::create: GroupOptions::ring_memory is \"gpu\", and backend \"cpu\" has no GPU memory; set it "
                  "to auto or host, "
                  "or use backend \"cuda\"");
  }
  Result<std::unique_ptr<call::CallSync>> sync = call::CallSync::create(context);
  if (!sync.ok()) return sync.status();
  std::unique_ptr<MaskBoard> board;
  if (context.options.mask_lost_ranks || has_absent_ranks(context.options)) {
    Result<std::unique_ptr<MaskBoard>> made = MaskBoard::create((*sync)->peers());
    if (!made.ok()) return made.status();
    board = std::move(*made);
  }
  return std::unique_ptr<Backend>(std::make_unique<CpuBackend>(context, std::move(*sync), std::move(board)));
}

Status CpuBackend::fill_routing(const RouteCall& call, const std::shared_ptr<CpuRouting>& routing) {
  const Context context = call_context();
  return sync_->has_rails() ? internode::route(call, context, *routing) : intranode::route(call, context, *routing);
}

Result<std::shared_ptr<RoutingState>> CpuBackend::route(const RouteCall& call) try {
  make_pending_calls();
  auto routing = std::make_shared<CpuRouting>(spare_tables_);
  if (Status status = fill_routing(call, routing); !status.ok()) return status;
  add_to_counters(call.options.counters, *call.placement, *routing);
  return std::shared_ptr<RoutingState>(std::move(routing));
} catch (const std::bad_alloc&) {
  return sync_->out_of_memory(Operation::kRoute);
}

/// Quantises this rank's rows into memory that peers of the node can reach. Failures are in the record of the result.
DispatchCall CpuBackend::quantize_rows(const DispatchCall& call) {
  const std::size_t bytes = quantized_bytes(call);
  std::byte* staging = nullptr;
  if (bytes > 0) {
    const Result<std::byte*> taken = staging_.quantized(bytes);
    if (!taken.ok()) {
      DispatchCall refused = call;
      refused.record.set_status(Status(
          taken.status().code(), fmt::format("dispatch: no room for quantised rows: {}", taken.status().message())));
      return refused;
    }
    staging = *taken;
  }
  QuantizedDispatch steps = split_quantized(call, staging);
  numeric::quantize_rows(steps.quantize);
  return std::move(steps.send);
}

Status CpuBackend::dispatch(const DispatchCall& call) try {
  make_pending_calls();
  return make_dispatch(call);
} catch (const std::bad_alloc&) {
  return sync_->out_of_memory(Operation::kDispatch);
}

Status CpuBackend::make_dispatch(const DispatchCall& call) {
  if (!sync_->broken().ok()) return sync_->broken();
  const bool quantizes = call.record.code == ErrorCode::kOk && call.quantize != Quantization::kNone;
  return quantizes ? send(quantize_rows(call)) : send(call);
}

Status CpuBackend::send(const DispatchCall& call) {
  const Context context = call_context();
  Status status = sync_->has_rails() ? internode::dispatch(call, context) : intranode::dispatch(call, context);
  if (status.ok()) status = sync_->confirm_reads();
  if (status.ok()) staging_.route_is_over();
  return status;
}

Status CpuBackend::combine(const CombineCall& call) try {
  make_pending_calls();
  return make_combine(call);
} catch (const std::bad_alloc&) {
  return sync_->out_of_memory(Operation::kCombine);
}

Status CpuBackend::make_combine(const CombineCall& call) {
  const Context context = call_context();
  Status status = sync_->has_rails() ? internode::combine(call, context) : intranode::combine(call, context);
  if (status.ok()) status = sync_->confirm_reads();
  if (status.ok()) staging_.route_is_over();
  return status;
}

MemoryUsage CpuBackend::memory_usage() const {
  MemoryUsage usage;
  const std::size_t headers_bytes = node::round_up_to_page(sync_->headers_bytes());
  const std::size_t board_bytes = mask_board_ != nullptr ? mask_board_->size_bytes() : 0;
  usage.control_bytes = node::kControlBytes + board_bytes;
  usage.network_bytes = headers_bytes + (sync_->has_rails() ? sync_->rails().memory_bytes() : 0);
  usage.staging_bytes = staging_.held_bytes();
  usage.allocated_bytes = sync_->peers().arena().allocated_bytes() - usage.staging_bytes - headers_bytes - board_bytes;
  return usage;
}

Status CpuBackend::trim() {
  // A peer that has not noticed the failure may still be in the call that broke the group.
  if (!sync_->broken().ok()) return sync_->broken();
  staging_.trim();
  spare_tables_->clear();
  return {};
}

Result<std::vector<int>> CpuBackend::suspend() {
  std::vector<int> silent;
  // The others see masks of this rank in the call that they make, and its leaving when they next look for lost ranks.
  const bool masks = survivors_ && survivors_->masks_lost_ranks();
  for (int rank = 0; masks && rank < sync_->topology().num_ranks; ++rank) {
    if (survivors_->is_silent(rank)) silent.push_back(rank);
    if (rank != sync_->rank()) survivors_->update(rank, true);
  }
  if (!masks) silent = sync_->state().silent_ranks();
  sync_->leave();
  return silent;
}

Status CpuBackend::channel_tables(const ChannelTablesCall& call) {
  write_channel_tables(call, static_cast<const CpuRouting&>(*call.routing));
  return {};
}

Status CpuBackend::destroy() try {
  if (!sync_->broken().ok()) return sync_->broken();
  make_pending_calls();
  node::CallDescriptor descriptor;
  descriptor.record.operation = Operation::kDestroy;
  return sync_->begin(descriptor);
} catch (const std::bad_alloc&) {
  return sync_->out_of_memory(Operation::kDestroy);
}

BackendFactory cpu_backend_factory() {
  return {"cpu",          "ranks of one host through shared memory, of several hosts over a network",
          probe,          CpuBackend::create,
          bytes_required, latency_bytes_required,
          &local_ops()};
}

}  // namespace ferry::cpu
