#include "cuda/backend.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <string>
#include <utility>
#include <vector>

#include "cuda/call/channel_tables.hpp"
#include "cuda/call/memory_required.hpp"
#include "cuda/call/wait_times.hpp"
#include "cuda/copy/row_copy.hpp"
#include "cuda/driver/cuda_call.hpp"
#include "cuda/driver/device_guard.hpp"
#include "cuda/internode/memory_required.hpp"
#include "cuda/intranode/combine_params.hpp"
#include "cuda/intranode/dispatch_params.hpp"
#include "cuda/intranode/route_params.hpp"
#include "cuda/intranode/verify_params.hpp"
#include "cuda/latency/memory.hpp"
#include "cuda/local/arrival_tables.hpp"
#include "cuda/local/expansion.hpp"
#include "cuda/local/gating.hpp"
#include "cuda/local/local_ops.hpp"
#include "cuda/local/token_layout.hpp"
#include "cuda/numeric/quantize.hpp"
#include "plan/to_size.hpp"

namespace ferry::cuda {
namespace {

Status load_kernels(int device, std::size_t shared_limit, bool& has_bulk) {
  const std::string operation = fmt::format("Group::create: loading kernels on GPU {}", device);
  constexpr std::string_view kHint = "this build has no code for the GPU: set CMAKE_CUDA_ARCHITECTURES and build again";
  Status status = runtime_status(load_route_kernels(shared_limit), operation, kHint);
  if (status.ok()) status = runtime_status(load_homes_kernel(shared_limit), operation, kHint);
  if (status.ok()) status = runtime_status(load_dispatch_kernels(shared_limit, has_bulk), operation, kHint);
  if (status.ok()) status = runtime_status(load_combine_kernels(shared_limit, has_bulk), operation, kHint);
  if (status.ok()) status = runtime_status(load_verify_kernels(), operation, kHint);
  if (status.ok()) status = runtime_status(load_arrivals_kernel(), operation, kHint);
  if (status.ok()) status = runtime_status(load_channel_tables_kernel(), operation, kHint);
  if (status.ok()) status = runtime_status(load_layout_kernels(), operation, kHint);
  if (status.ok()) status = runtime_status(load_expansion_kernels(), operation, kHint);
  if (status.ok()) status = runtime_status(load_quantize_kernels(), operation, kHint);
  if (status.ok()) status = runtime_status(load_gating_kernels(), operation, kHint);
  if (status.ok()) status = runtime_status(load_row_copy_kernels(), operation, kHint);
  if (status.ok()) status = runtime_status(load_wait_times_kernel(), operation, kHint);
  return status;
}

/// Memory of latency mode over several nodes, which groups take when they are created and calls later.
CallBytes nodes_latency_call_bytes(const MemoryShape& shape, const Topology& topology) {
  const FarLayout layout = far_layout(topology, shape.latency_bytes);
  CallBytes calls = latency_call_bytes(shape, true);
  calls.staging_bytes += node::round_up_to_page(shape.latency_bytes);
  if (layout.num_ranks == 0) return calls;
  const std::int64_t num_rows =
      most_returned_rows({layout.num_far(), shape.max_tokens, shape.num_topk,
                          static_cast<std::int64_t>(num_local_experts(shape)), shape.num_recv_rows});
  calls.staging_bytes += node::round_up_to_page(sizeof(FarState)) + FarLink::memory_bytes(layout) +
                         node::round_up_to_page(to_size(num_rows * round_up_row(shape.row_bytes)));
  return calls;
}

Result<std::size_t> bytes_of_group(const MemoryShape& shape, const Topology& topology) {
  if (topology.num_nodes() > 1) {
    if (shape.max_tokens == 0) return internode::bytes_required(shape, topology, nullptr);
    const CallBytes calls = nodes_latency_call_bytes(shape, topology);
    return internode::bytes_required(shape, topology, &calls);
  }
  return bytes_required(shape, topology, shape.max_tokens > 0 ? latency_call_bytes(shape, false) : call_bytes(shape));
}

/// All ranks have agreed on these options.
Status check_verify(const BackendContext& context) {
  if (!context.options.verify) return {};
  if (context.topology.num_nodes() > 1) {
    return Status(
        ErrorCode::kUnsupported,
        fmt::format("Group::create: GroupOptions::verify is set and the {} GPU ranks are on {} nodes; rows of "
                    "GPUs are verified on one node only, clear the option or use backend \"cpu\"",
                    context.topology.num_ranks, context.topology.num_nodes()));
  }
  if (context.options.latency_bytes == 0) return {};
  return Status(ErrorCode::kUnsupported,
                fmt::format("Group::create: GroupOptions::verify is set and latency_bytes is {}, expected 0; latency "
                            "mode on GPUs is not verified, clear one of the two or use backend \"cpu\"",
                            context.options.latency_bytes));
}

/// Loads the kernels that only groups of several nodes use.
Status load_nodes_kernels(int device) {
  const DeviceGuard guard(device);
  if (!guard.status().ok()) return guard.status();
  const std::string operation = fmt::format("Group::create: loading kernels on GPU {}", device);
  Status status = runtime_status(load_rail_exchange_kernel(), operation);
  if (status.ok()) status = runtime_status(load_node_dispatch_kernels(), operation);
  if (status.ok()) status = runtime_status(load_gather_kernels(), operation);
  if (status.ok()) status = runtime_status(load_counters_kernel(), operation);
  if (status.ok()) status = runtime_status(load_node_route_kernels(), operation);
  return status;
}

}  // namespace

CudaBackend::CudaBackend(const BackendContext& context, Parts parts,
                         std::unique_ptr<internode::CallScratch> nodes_scratch, FarLink* far)
    : nodes_scratch_(std::move(nodes_scratch)),
      context_(std::move(parts), context.options.timeout_ns),
      history_{Placements(context_.parts().memory, context_.parts().stream, context.topology.rank,
                          context.topology.num_ranks)},
      latency_(context_, history_.placements, far),
      far_(far) {}

Result<std::unique_ptr<Backend>> CudaBackend::create(const BackendContext& context) {
  if (Status status = check_verify(context); !status.ok()) return status;
  Result<Parts> parts = create_parts(context, load_kernels, start_latency);
  if (!parts.ok()) return parts.status();
  std::unique_ptr<internode::CallScratch> nodes_scratch;
  FarLink* far = nullptr;
  if (context.topology.num_nodes() > 1) {
    Status status = load_nodes_kernels(parts->device);
    Result<std::unique_ptr<internode::CallScratch>> made = internode::CallScratch::create(*parts);
    if (status.ok()) status = made.status();
    const FarLayout layout = far_layout(context.topology, parts->latency_bytes, parts->rail_link->in_gpu_memory());
    if (layout.num_ranks > 0) {
      const DeviceGuard guard(parts->device);
      if (status.ok()) status = guard.status();
      Result<std::unique_ptr<FarLink>> link = FarLink::create(context, *parts, layout, status);
      if (link.ok() && *link == nullptr) {
        link = FarLink::create(context, *parts, far_layout(context.topology, parts->latency_bytes), status);
      }
      if (!link.ok()) return link.status();
      far = link->get();
      parts->far = std::shared_ptr<FarLink>(std::move(*link));
      parts->send_rest = [far] { far->send_rest(); };
    }
    if (!status.ok()) return status;
    nodes_scratch = std::move(*made);
  }
  return std::unique_ptr<Backend>(
      std::make_unique<CudaBackend>(context, std::move(*parts), std::move(nodes_scratch), far));
}

Result<std::vector<int>> CudaBackend::suspend() {
  // The running calls may still mask ranks.
  Status status = context_.wait_for_calls("suspend");
  Result<std::vector<int>> silent = status.ok() ? latency_.suspend() : Result<std::vector<int>>(status);
  // The others must not wait for this rank, whatever has happened to its GPU.
  leave();
  return silent;
}

std::optional<Status> CudaBackend::renew(const BackendContext& context) {
  Status status = context_.renew(context, start_latency);
  if (status.ok()) status = latency_.forget_calls();
  return status;
}

Result<Buffer> CudaBackend::allocate(std::size_t bytes) {
  const Parts& parts = context_.parts();
  const DeviceGuard guard(parts.device);
  if (!guard.status().ok()) return guard.status();
  return parts.memory->allocate(bytes);
}

MemoryUsage CudaBackend::memory_usage() const {
  const Parts& parts = context_.parts();
  MemoryUsage usage;
  const std::size_t held_bytes = parts.memory->held_bytes();
  usage.control_bytes =
      node::round_up_to_page(Control::at(nullptr, static_cast<std::size_t>(parts.ranks.num_ranks)).size_bytes);
  if (parts.sync->has_rails()) usage.network_bytes = parts.sync->rails().memory_bytes();
  if (far_ != nullptr) usage.network_bytes += far_->held_bytes();
  usage.staging_bytes = held_bytes - usage.control_bytes;
  usage.allocated_bytes = parts.arena->allocated_bytes() - held_bytes;
  return usage;
}

/// Sum of the waits of host threads and of kernels, for each rank.
std::vector<std::int64_t> CudaBackend::wait_times_ns() const {
  const Parts& parts = context_.parts();
  std::vector<std::int64_t> times_ns = parts.sync->wait_times_ns();
  const Topology& topology = parts.sync->topology();
  const WaitTimes& waits = parts.report->waits;
  const auto read = [](const std::uint64_t* word) {
    return static_cast<std::int64_t>(__atomic_load_n(word, __ATOMIC_RELAXED));
  };
  const int first_rank = topology.node_of(topology.rank) * topology.ranks_per_node;
  for (int idx = 0; idx < topology.ranks_per_node; ++idx) {
    times_ns[to_size(first_rank + idx)] += read(waits.ns + idx) + read(waits.steps_ns + idx);
  }
  for (int node = 0; node < topology.num_nodes(); ++node) {
    if (node == topology.node_of(topology.rank)) continue;
    times_ns[to_size(parts.sync->rails().rank_of(node))] += read(waits.rails_ns + node);
  }
  const int num_group_ranks = parts.latency_ranks.of_group ? topology.num_ranks : 0;
  for (int rank = 0; rank < num_group_ranks; ++rank) times_ns[to_size(rank)] += read(waits.group_ns + rank);
  // Threads of kernels may report their sums in another order than they made them: a sum never falls.
  const std::lock_guard lock(shown_mutex_);
  shown_ns_.resize(times_ns.size());
  for (std::size_t i = 0; i < times_ns.size(); ++i) shown_ns_[i] = times_ns[i] = std::max(times_ns[i], shown_ns_[i]);
  return times_ns;
}

BackendFactory backend_factory() {
  return {"cuda",         "ranks with GPUs: of a node through each other's memory, of several over a network",
          probe,          CudaBackend::create,
          bytes_of_group, latency_bytes_required,
          &local_ops()};
}

}  // namespace ferry::cuda
