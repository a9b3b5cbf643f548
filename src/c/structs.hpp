#ifndef FERRY_C_STRUCTS_HPP
#define FERRY_C_STRUCTS_HPP

/// Structs of programs compiled with an older or a newer header than this library's.

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <string>
#include <type_traits>

#include "ferry/ferry.h"
#include "ferry/status.hpp"

namespace ferry::c {

/// Name of a struct, and its size in its first release, which never changes because programs of that time keep passing
/// it.
struct StructVersion {
  const char* name = "";
  std::size_t first_bytes = 0;
};

template <typename T>
inline constexpr StructVersion kVersionOf{};
template <>
inline constexpr StructVersion kVersionOf<ferry_tcp_options>{"ferry_tcp_options", 48};
template <>
inline constexpr StructVersion kVersionOf<ferry_callback_options>{"ferry_callback_options", 40};
template <>
inline constexpr StructVersion kVersionOf<ferry_group_options>{"ferry_group_options", 96};
template <>
inline constexpr StructVersion kVersionOf<ferry_membership_options>{"ferry_membership_options", 48};
template <>
inline constexpr StructVersion kVersionOf<ferry_join_options>{"ferry_join_options", 80};
template <>
inline constexpr StructVersion kVersionOf<ferry_membership_view>{"ferry_membership_view", 80};
template <>
inline constexpr StructVersion kVersionOf<ferry_next_view_options>{"ferry_next_view_options", 24};
template <>
inline constexpr StructVersion kVersionOf<ferry_topology>{"ferry_topology", 24};
template <>
inline constexpr StructVersion kVersionOf<ferry_memory_usage>{"ferry_memory_usage", 48};
template <>
inline constexpr StructVersion kVersionOf<ferry_route_input>{"ferry_route_input", 136};
template <>
inline constexpr StructVersion kVersionOf<ferry_route_options>{"ferry_route_options", 72};
template <>
inline constexpr StructVersion kVersionOf<ferry_dispatch_input>{"ferry_dispatch_input", 200};
template <>
inline constexpr StructVersion kVersionOf<ferry_dispatch_output>{"ferry_dispatch_output", 328};
template <>
inline constexpr StructVersion kVersionOf<ferry_dispatch_options>{"ferry_dispatch_options", 32};
template <>
inline constexpr StructVersion kVersionOf<ferry_combine_input>{"ferry_combine_input", 328};
template <>
inline constexpr StructVersion kVersionOf<ferry_combine_output>{"ferry_combine_output", 136};
template <>
inline constexpr StructVersion kVersionOf<ferry_combine_options>{"ferry_combine_options", 32};
template <>
inline constexpr StructVersion kVersionOf<ferry_latency_dispatch_input>{"ferry_latency_dispatch_input", 328};
template <>
inline constexpr StructVersion kVersionOf<ferry_latency_dispatch_output>{"ferry_latency_dispatch_output", 136};
template <>
inline constexpr StructVersion kVersionOf<ferry_latency_dispatch_options>{"ferry_latency_dispatch_options", 80};
template <>
inline constexpr StructVersion kVersionOf<ferry_latency_combine_input>{"ferry_latency_combine_input", 136};
template <>
inline constexpr StructVersion kVersionOf<ferry_latency_combine_output>{"ferry_latency_combine_output", 72};
template <>
inline constexpr StructVersion kVersionOf<ferry_latency_combine_options>{"ferry_latency_combine_options", 32};
template <>
inline constexpr StructVersion kVersionOf<ferry_latency_shape>{"ferry_latency_shape", 56};
template <>
inline constexpr StructVersion kVersionOf<ferry_channel_tables_output>{"ferry_channel_tables_output", 328};
template <>
inline constexpr StructVersion kVersionOf<ferry_execution_options>{"ferry_execution_options", 24};
template <>
inline constexpr StructVersion kVersionOf<ferry_dispatch_layout_options>{"ferry_dispatch_layout_options", 104};
template <>
inline constexpr StructVersion kVersionOf<ferry_dispatch_layout_output>{"ferry_dispatch_layout_output", 264};
template <>
inline constexpr StructVersion kVersionOf<ferry_memory_shape>{"ferry_memory_shape", 152};
template <>
inline constexpr StructVersion kVersionOf<ferry_gating_options>{"ferry_gating_options", 72};
template <>
inline constexpr StructVersion kVersionOf<ferry_balance_options>{"ferry_balance_options", 120};
template <>
inline constexpr StructVersion kVersionOf<ferry_balance_sizes>{"ferry_balance_sizes", 48};
template <>
inline constexpr StructVersion kVersionOf<ferry_move_plan_options>{"ferry_move_plan_options", 24};
template <>
inline constexpr StructVersion kVersionOf<ferry_one_sided_options>{"ferry_one_sided_options", 64};
template <>
inline constexpr StructVersion kVersionOf<ferry_placement>{"ferry_placement", 104};
template <>
inline constexpr StructVersion kVersionOf<ferry_load_counters>{"ferry_load_counters", 200};
template <>
inline constexpr StructVersion kVersionOf<ferry_arrivals>{"ferry_arrivals", 264};
template <>
inline constexpr StructVersion kVersionOf<ferry_arrival_tables_output>{"ferry_arrival_tables_output", 392};
template <>
inline constexpr StructVersion kVersionOf<ferry_arrival_tables_options>{"ferry_arrival_tables_options", 48};
template <>
inline constexpr StructVersion kVersionOf<ferry_expansion_options>{"ferry_expansion_options", 32};
template <>
inline constexpr StructVersion kVersionOf<ferry_expand_input>{"ferry_expand_input", 328};
template <>
inline constexpr StructVersion kVersionOf<ferry_expand_output>{"ferry_expand_output", 264};
template <>
inline constexpr StructVersion kVersionOf<ferry_reduce_input>{"ferry_reduce_input", 264};
template <>
inline constexpr StructVersion kVersionOf<ferry_reduce_output>{"ferry_reduce_output", 136};

/// Larger than any struct will be: a larger struct_size is uninitialised.
inline constexpr std::size_t kMaxStructBytes = 4096;

/// @errors kInvalidArgument: below the first size, or above kMaxStructBytes
Status check_struct_size(const char* call, const StructVersion& version, std::uint64_t given_bytes);

/// Checks that bytes that this library does not know are zero.
/// @errors kUnsupported: they are not zero
Status check_unknown(const char* call, const StructVersion& version, std::span<const std::byte> unknown);

/// Reads a caller's struct into the one that this library knows; the caller's may be null, older or newer.
/// @errors kInvalidArgument: struct_size; kUnsupported: it sets a member that this library does not know
template <typename T>
Status read_struct(const char* call, const T* given, T& known) {
  static_assert(std::is_trivially_copyable_v<T>);
  static_assert(kVersionOf<T>.first_bytes > sizeof(known.struct_size), "add the struct to the list above");
  static_assert(kVersionOf<T>.first_bytes <= sizeof(T), "structs only grow");
  known = T{};
  if (given == nullptr) return {};
  Status status = check_struct_size(call, kVersionOf<T>, given->struct_size);
  if (!status.ok()) return status;
  const std::span bytes(reinterpret_cast<const std::byte*>(given), static_cast<std::size_t>(given->struct_size));
  const std::size_t num_known = std::min(bytes.size(), sizeof(T));
  status = check_unknown(call, kVersionOf<T>, bytes.subspan(num_known));
  if (status.ok()) std::memcpy(&known, bytes.data(), num_known);
  return status;
}

/// Fills the members of a caller's struct that both sides know, and zeroes those that this library does not know.
/// @errors kInvalidArgument: null, struct_size
template <typename T>
Status write_struct(const char* call, T known, T* wanted) {
  if (wanted == nullptr) {
    return Status(ErrorCode::kInvalidArgument, std::string(call) + ": the " + kVersionOf<T>.name + " to fill is null");
  }
  Status status = check_struct_size(call, kVersionOf<T>, wanted->struct_size);
  if (!status.ok()) return status;
  known.struct_size = wanted->struct_size;
  const std::span bytes(reinterpret_cast<std::byte*>(wanted), static_cast<std::size_t>(known.struct_size));
  const std::size_t num_known = std::min(bytes.size(), sizeof(T));
  std::memcpy(bytes.data(), &known, num_known);
  std::ranges::fill(bytes.subspan(num_known), std::byte{0});
  return {};
}

}  // namespace ferry::c

#endif  // FERRY_C_STRUCTS_HPP
