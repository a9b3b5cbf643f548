/// C interface of the memory that calls need and of scopes of known memory.

#include <optional>

#include "c/convert.hpp"
#include "c/status.hpp"
#include "c/structs.hpp"
#include "ferry/group.hpp"
#include "ferry/known_memory.hpp"

namespace ferry::c {
namespace {

MemoryShape to_shape(const ferry_memory_shape& read) {
  constexpr std::int64_t kNone = -1;
  MemoryShape shape;
  shape.backend = text_or(read.backend, shape.backend.c_str());
  shape.num_ranks = nonzero_or(read.num_ranks, shape.num_ranks);
  shape.ranks_per_node = read.ranks_per_node;
  shape.num_experts = read.num_experts;
  shape.num_tokens = read.num_tokens;
  shape.num_topk = read.num_topk;
  shape.num_recv_rows = read.num_recv_rows;
  shape.num_used_rows = read.num_used_rows == kNone ? 0 : nonzero_or(read.num_used_rows, shape.num_used_rows);
  shape.row_bytes = read.row_bytes;
  shape.scale_row_bytes = read.scale_row_bytes;
  shape.quantized_row_bytes = read.quantized_row_bytes;
  shape.combine_fp8_hidden = read.combine_fp8_hidden;
  shape.layout = static_cast<Layout>(read.layout);
  shape.weights = read.weights != 0;
  shape.symmetric = read.plain_memory == 0;
  shape.max_tokens = read.max_tokens;
  shape.num_node_tokens = read.num_node_tokens;
  shape.num_forwarded_tokens = read.num_forwarded_tokens;
  shape.num_node_entries = read.num_node_entries;
  shape.num_local_experts =
      read.num_local_experts == kNone ? 0 : nonzero_or(read.num_local_experts, shape.num_local_experts);
  shape.num_routings = nonzero_or(read.num_routings, shape.num_routings);
  shape.latency_bytes = static_cast<std::size_t>(read.latency_bytes);
  shape.symmetric_tables = read.symmetric_tables != 0;
  shape.num_logical_experts = read.num_logical_experts;
  shape.placement_on_device = read.placement_on_device != 0;
  shape.verify = read.verify != 0;
  return shape;
}

Status required_bytes(const ferry_memory_shape* given, std::uint64_t* num_bytes) {
  constexpr const char* kCall = "ferry_bytes_required";
  if (num_bytes == nullptr) return invalid(kCall, "the pointer to the number is null");
  ferry_memory_shape read;
  if (Status status = read_struct(kCall, given, read); !status.ok()) return status;
  Result<std::size_t> required = bytes_required(to_shape(read));
  if (required.ok()) *num_bytes = *required;
  return required.status();
}

/// Scope of this thread, and the number of open begin calls in it.
thread_local int num_open = 0;
thread_local std::optional<KnownMemory> known_memory;

}  // namespace
}  // namespace ferry::c

using namespace ferry::c;

ferry_status* ferry_bytes_required(const ferry_memory_shape* shape, uint64_t* num_bytes) {
  return guarded([&] { return required_bytes(shape, num_bytes); });
}

void ferry_known_memory_begin() {
  if (ferry::c::num_open++ == 0) ferry::c::known_memory.emplace();
}

void ferry_known_memory_end() {
  if (ferry::c::num_open > 0 && --ferry::c::num_open == 0) ferry::c::known_memory.reset();
}
