#include "cuda/memory/memory_checks.hpp"

#include <fmt/format.h>

#include <array>
#include <string>

#include "cuda/driver/cuda_call.hpp"
#include "cuda/driver/driver.hpp"
#include "ferry/known_memory.hpp"
#include "numeric/gating.hpp"

namespace ferry::cuda {
namespace {

Status invalid(std::string message) { return Status(ErrorCode::kInvalidArgument, std::move(message)); }

/// Largest sizes of a row and of a tensor that kernels can count with.
constexpr std::int64_t kMaxRowBytes = std::int64_t{1} << 30;
constexpr std::int64_t kMaxTensorBytes = std::int64_t{1} << 46;
constexpr std::int64_t kMaxScales = std::int64_t{1} << 20;

Status check_extent(std::string_view what, std::int64_t num_rows, std::int64_t stride_bytes, std::int64_t row_bytes) {
  std::int64_t bytes = 0;
  const bool fits =
      num_rows <= 1 || (!__builtin_mul_overflow(num_rows, stride_bytes, &bytes) && bytes <= kMaxTensorBytes);
  if (row_bytes <= kMaxRowBytes && fits) return {};
  return invalid(
      fmt::format("{} has {} rows of {} bytes, {} bytes apart, expected rows of at most {} and {} bytes in all", what,
                  num_rows, row_bytes, stride_bytes, kMaxRowBytes, kMaxTensorBytes));
}

/// The driver's attributes of a pointer, by one call. Memory unknown to CUDA has type 0.
struct PointerFacts {
  unsigned type = 0;  ///< a CUmemorytype
  unsigned managed = 0;
  int device = -1;
  CUdeviceptr begin = 0;  ///< of the allocation
  std::size_t size_bytes = 0;
};

Result<PointerFacts> facts_of(const void* data) {
  const Result<const Driver*> table = driver();
  if (!table.ok()) return table.status();
  PointerFacts facts;
  std::array<CUpointer_attribute, 5> wanted = {CU_POINTER_ATTRIBUTE_MEMORY_TYPE, CU_POINTER_ATTRIBUTE_IS_MANAGED,
                                               CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL,
                                               CU_POINTER_ATTRIBUTE_RANGE_START_ADDR, CU_POINTER_ATTRIBUTE_RANGE_SIZE};
  std::array<void*, wanted.size()> values = {&facts.type, &facts.managed, &facts.device, &facts.begin,
                                             &facts.size_bytes};
  const CUresult result = (*table)->pointer_get_attributes(static_cast<unsigned>(wanted.size()), wanted.data(),
                                                           values.data(), device_address(data));
  if (result == CUDA_SUCCESS) return facts;
  return driver_status(result, fmt::format("asking where {} is allocated", data));
}

Status check_facts(std::string_view what, const void* data, int device, const Result<PointerFacts>& facts) {
  if (!facts.ok()) {
    return Status(facts.status().code(), fmt::format("{}: {}", what, facts.status().message()));
  }
  if (facts->managed != 0) {
    return invalid(
        fmt::format("{} is at {} in managed memory, expected memory of GPU {}; use cudaMalloc or "
                    "Group::allocate",
                    what, data, device));
  }
  if (facts->type != CU_MEMORYTYPE_DEVICE) {
    return invalid(
        fmt::format("{} is at {} in host memory, expected memory of GPU {}; copy it there, or use backend \"cpu\"",
                    what, data, device));
  }
  if (facts->device != device) {
    return invalid(
        fmt::format("{} is at {} in memory of GPU {}, expected this rank's GPU {}", what, data, facts->device, device));
  }
  return {};
}

/// First failure of a list of checks. Small tensors mostly share an allocation of the program's allocator, so the
/// driver is asked once for each allocation in turn.
class Checks {
 public:
  explicit Checks(const DeviceArena& arena) : device_(arena.device()), arena_(&arena) {}
  /// For calls without a group.
  explicit Checks(int device) : device_(device) {}
  template <typename View>
  void view(std::string_view what, const View& tensor) {
    if (status_.ok() && tensor.present() && tensor.num_elements() > 0) check(what, tensor.data);
  }
  template <typename RowsLike>
  void rows(std::string_view what, const RowsLike& rows) {
    if (!status_.ok() || !rows.present()) return;
    status_ = check_extent(what, rows.num_rows, rows.stride_bytes, rows.row_bytes);
    if (status_.ok() && rows.num_rows > 0) check(what, rows.data);
  }
  /// Null for calls without a group.
  void pointer(std::string_view what, const void* data) {
    if (status_.ok() && data != nullptr) check(what, data);
  }
  const Status& status() const { return status_; }

 private:
  void check(std::string_view what, const void* data) {
    if (is_known_) return;
    if (arena_ != nullptr && arena_->is_backed_at(data)) return;
    if (device_address(data) - begin_ < size_bytes_) return;
    const Result<PointerFacts> facts = facts_of(data);
    status_ = check_facts(what, data, device_, facts);
    if (!status_.ok()) return;
    begin_ = facts->begin;
    size_bytes_ = facts->size_bytes;
  }

  int device_;
  bool is_known_ = KnownMemory::here();
  /// The last good allocation.
  CUdeviceptr begin_ = 0;
  std::size_t size_bytes_ = 0;
  const DeviceArena* arena_ = nullptr;
  Status status_;
};

}  // namespace

Status check_route_memory(const RouteCall& call, const DeviceArena& arena) {
  Checks checks(arena);
  checks.view("route: topk_idx", call.topk_idx);
  checks.view("route: topk_weights", call.topk_weights);
  checks.view("route: num_tokens_view", call.num_tokens_view);
  checks.view("route: placement.physical_to_logical_view", call.options.placement.physical_to_logical_view);
  checks.view("route: counters.logical", call.options.counters.logical);
  checks.view("route: counters.physical", call.options.counters.physical);
  checks.view("route: counters.received", call.options.counters.received);
  checks.view("route: counters.homeless", call.options.counters.homeless);
  return checks.status();
}

Status check_dispatch_memory(const DispatchCall& call, const DeviceArena& arena) {
  Checks checks(arena);
  checks.rows("dispatch: input x", call.x);
  if (call.scales.present() && call.scales.extent(1) > kMaxScales) {
    return invalid(
        fmt::format("dispatch: scales have {} columns, expected at most {}", call.scales.extent(1), kMaxScales));
  }
  checks.view("dispatch: input scales", call.scales);
  checks.view("dispatch: input topk_weights", call.topk_weights);
  checks.rows("dispatch: output x", call.out_x);
  checks.view("dispatch: output scales", call.out_scales);
  checks.view("dispatch: output topk_idx", call.out_topk_idx);
  checks.view("dispatch: output topk_weights", call.out_topk_weights);
  checks.view("dispatch: output source", call.out_source);
  return checks.status();
}

Status check_combine_memory(const CombineCall& call, const DeviceArena& arena) {
  Checks checks(arena);
  checks.rows("combine: input x", call.x);
  checks.view("combine: input weights", call.weights);
  checks.rows("combine: bias[0]", call.bias[0]);
  checks.rows("combine: bias[1]", call.bias[1]);
  checks.view("combine: input topk_weights", call.topk_weights);
  checks.rows("combine: output x", call.out_x);
  checks.view("combine: output weights", call.out_weights);
  return checks.status();
}

Status check_channel_tables_memory(const ChannelTablesCall& call, std::int64_t num_tokens, const DeviceArena& arena) {
  Checks checks(arena);
  checks.pointer("channel_tables: rank_prefix", call.rank_prefix);
  checks.pointer("channel_tables: send_channel_prefix", call.send_channel_prefix);
  checks.pointer("channel_tables: recv_channel_prefix", call.recv_channel_prefix);
  if (call.num_rows > 0) checks.pointer("channel_tables: source_token", call.source_token);
  if (num_tokens > 0) checks.pointer("channel_tables: send_index", call.send_index);
  return checks.status();
}

Status check_wait_times_memory(std::string_view operation, const std::int64_t* times_ns, const DeviceArena& arena) {
  if (times_ns == nullptr) return {};
  Checks checks(arena);
  checks.pointer(fmt::format("{}: wait_times_ns", operation), times_ns);
  return checks.status();
}

Status check_signals_memory(const TileSignals& signals, const DeviceArena& arena) {
  Checks checks(arena);
  checks.view("latency_combine: signals.words", signals.words);
  return checks.status();
}

Status check_mask_memory(const ConstTensorView& out, const DeviceArena& arena) {
  Checks checks(arena);
  checks.pointer("latency_query_mask: out", out.data);
  return checks.status();
}

Status check_layout_memory(const plan::TokenLayoutParams& params, int device) {
  Checks checks(device);
  if (params.num_tokens > 0) {
    checks.pointer("dispatch_layout: topk_idx", params.ids);
    checks.pointer("dispatch_layout: output is_token_in_rank", params.token_in_rank);
  }
  checks.pointer("dispatch_layout: expert_to_rank", params.expert_to_rank);
  checks.pointer("dispatch_layout: output num_tokens_per_rank", params.tokens_per_rank);
  checks.pointer("dispatch_layout: output num_tokens_per_node", params.tokens_per_node);
  checks.pointer("dispatch_layout: output num_tokens_per_expert", params.entries_per_expert);
  return checks.status();
}

Status check_arrivals_memory(const plan::ArrivalParams& params, int device) {
  Checks checks(device);
  if (params.num_rows > 0) {
    checks.pointer("arrival_tables: source", params.source);
    checks.pointer("arrival_tables: topk_idx", params.ids);
    checks.pointer("arrival_tables: output origin", params.origin);
    checks.pointer("arrival_tables: output last_equal", params.last_equal);
  }
  if (params.num_experts > 0) {
    checks.pointer("arrival_tables: rows_per_expert", params.rows_per_expert);
    checks.pointer("arrival_tables: output expert_ends", params.expert_ends);
    checks.pointer("arrival_tables: output rows_of_expert", params.rows_of_expert);
  }
  checks.pointer("arrival_tables: output rows_through_rank", params.rows_through_rank);
  if (params.num_sent_ids > 0) {
    checks.pointer("arrival_tables: sent_idx", params.sent_ids);
    checks.pointer("arrival_tables: output sent_idx", params.sent_ids_copy);
  }
  return checks.status();
}

Status check_expand_memory(const plan::ExpandParams& params, int device) {
  Checks checks(device);
  if (Status status = check_extent("expand_rows: output x", params.table.num_slots, params.row_bytes, params.row_bytes);
      !status.ok()) {
    return status;
  }
  if (params.table.num_rows > 0) {
    checks.pointer("expand_rows: slots", params.table.slots);
    checks.pointer("expand_rows: last_equal", params.table.last_equal);
    checks.pointer("expand_rows: x", params.x);
    checks.pointer("expand_rows: weights", params.weights);
    if (params.num_scales > 0) checks.pointer("expand_rows: scales", params.scales.data);
  }
  if (params.table.num_slots > 0) {
    checks.pointer("expand_rows: output x", params.out_x);
    checks.pointer("expand_rows: output weights", params.out_weights);
    checks.pointer("expand_rows: output row_of_slot", params.row_of_slot);
    if (params.num_scales > 0) checks.pointer("expand_rows: output scales", params.out_scales.data);
  }
  return checks.status();
}

Status check_reduce_memory(const plan::ReduceParams& params, int device) {
  Checks checks(device);
  const std::int64_t row_bytes = params.hidden * static_cast<std::int64_t>(sizeof(float));
  if (Status status = check_extent("reduce_rows: x", params.table.num_slots, row_bytes, row_bytes); !status.ok()) {
    return status;
  }
  if (params.table.num_slots > 0) {
    checks.pointer("reduce_rows: x", params.x);
    checks.pointer("reduce_rows: weights", params.weights);
  }
  if (params.table.num_rows > 0) {
    checks.pointer("reduce_rows: slots", params.table.slots);
    checks.pointer("reduce_rows: last_equal", params.table.last_equal);
    checks.pointer("reduce_rows: output x", params.out_x);
    checks.pointer("reduce_rows: output weights", params.out_weights);
  }
  return checks.status();
}

Status check_quantize_memory(std::string_view operation, const numeric::QuantizeParams& params, int device) {
  Checks checks(device);
  if (params.num_rows > 0) {
    checks.pointer(fmt::format("{}: x", operation), params.x);
    checks.pointer(fmt::format("{}: q", operation), params.q);
    checks.pointer(fmt::format("{}: scales", operation), params.scales.data);
  }
  return checks.status();
}

Status check_gating_memory(std::string_view operation, const numeric::GatingParams& params, int device) {
  Checks checks(device);
  if (params.num_tokens > 0) {
    checks.pointer(fmt::format("{}: logits", operation), params.logits);
    checks.pointer(fmt::format("{}: bias", operation), params.bias);
    checks.pointer(fmt::format("{}: topk_idx", operation), params.ids);
    checks.pointer(fmt::format("{}: topk_weights", operation), params.weights);
  }
  return checks.status();
}

Status check_stream_device(std::string_view operation, cudaStream_t stream, int device) {
  if (stream == nullptr || stream == cudaStreamLegacy || stream == cudaStreamPerThread) return {};
  int stream_device = -1;
  const cudaError_t error = cudaStreamGetDevice(stream, &stream_device);
  if (error != cudaSuccess)
    return runtime_status(
        error, fmt::format("{}: asking for the device of stream {}", operation, static_cast<const void*>(stream)));
  if (stream_device == device) return {};
  return invalid(fmt::format("{}: the stream belongs to GPU {}, expected one of this rank's GPU {}", operation,
                             stream_device, device));
}

}  // namespace ferry::cuda
