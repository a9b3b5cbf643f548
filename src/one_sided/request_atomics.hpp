#ifndef FERRY_ONE_SIDED_REQUEST_ATOMICS_HPP
#define FERRY_ONE_SIDED_REQUEST_ATOMICS_HPP

/// Atomics that requests of kernels ask for.

#include <cstdint>

#include "ferry/device/proxy_request.hpp"
#include "net/remote_words.hpp"

namespace ferry::one_sided {

inline net::AtomicOp::Kind atomic_kind_of(device::RequestOp op) {
  using device::RequestOp;
  using Kind = net::AtomicOp::Kind;
  switch (op) {
    case RequestOp::kSignalAdd:
    case RequestOp::kPutSignalAdd:
    case RequestOp::kPutValueSignalAdd:
    case RequestOp::kFetchAdd:
      return Kind::kAdd;
    case RequestOp::kCompareSwap:
      return Kind::kCompareSwap;
    case RequestOp::kFetchAnd:
      return Kind::kAnd;
    case RequestOp::kFetchOr:
      return Kind::kOr;
    case RequestOp::kFetchXor:
      return Kind::kXor;
    default:
      return Kind::kSet;
  }
}

/// Atomic of a request with a signal or of an is_atomic one, at its offset in symmetric memory.
inline net::AtomicOp atomic_of(const device::Request& request) {
  return {.kind = atomic_kind_of(request.op),
          .word_bytes = request.is_narrow ? sizeof(std::uint32_t) : sizeof(std::uint64_t),
          .offset = device::has_signal(request.op) ? request.signal_offset : request.remote_offset,
          .operand = request.value,
          .compare = device::has_signal(request.op) ? 0 : request.operand};
}

}  // namespace ferry::one_sided

#endif  // FERRY_ONE_SIDED_REQUEST_ATOMICS_HPP
