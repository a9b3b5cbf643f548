#include "cuda/one_sided/errors.hpp"

#include <fmt/format.h>

#include <array>
#include <atomic>
#include <string>
#include <string_view>

namespace ferry::cuda {
namespace {

using ::ferry::device::Call;
using ::ferry::device::Code;
using ::ferry::device::ErrorRecord;

std::string_view name_of(std::int32_t call) {
  constexpr std::array<std::string_view, 13> kNames = {
      "put",   "get",     "signal", "fetch_add", "compare_swap", "wait_until", "fence",
      "quiet", "barrier", "swap",   "fetch_and", "fetch_or",     "fetch_xor"};
  const auto idx = static_cast<std::size_t>(call);
  return idx < kNames.size() ? kNames[idx] : "a call";
}

std::string_view words_of(std::int32_t comparison) {
  constexpr std::array<std::string_view, 6> kWords = {"equal to", "not equal to", "greater than",
                                                      "at least", "less than",    "at most"};
  const auto idx = static_cast<std::size_t>(comparison);
  return idx < kWords.size() ? kWords[idx] : "compared with";
}

std::string describe_wait(const ErrorRecord& record) {
  const auto call = static_cast<Call>(record.call);
  if (call == Call::kWaitUntil) {
    return fmt::format("the word at offset {} of symmetric memory was {}, expected {} {}", record.offset, record.seen,
                       words_of(record.comparison), record.expected);
  }
  if (call == Call::kBarrier && record.rank >= 0) {
    return fmt::format("rank {} had come to {} barriers of the team, expected {}", record.rank, record.seen,
                       record.expected);
  }
  if (call == Call::kQuiet || call == Call::kFence) return "earlier operations were not complete";
  return fmt::format("no answer from rank {} about offset {}", record.rank, record.offset);
}

Status describe(const ErrorRecord& record, const Status& presence) {
  const std::string name = fmt::format("{} on the GPU", name_of(record.call));
  switch (static_cast<Code>(record.code)) {
    case Code::kInvalidArgument:
      return Status(
          ErrorCode::kInvalidArgument,
          fmt::format("{}: rank {}, {} bytes at offset {} of symmetric memory: no such rank, or not inside it, "
                      "or a word or value that is not at a multiple of its size; nothing was sent",
                      name, record.rank, record.num_bytes, static_cast<std::int64_t>(record.offset)));
    case Code::kPeerLost: {
      const int peer = record.rank >= 0 ? record.rank : presence.peer();
      return Status(ErrorCode::kPeerLost,
                    fmt::format("{}: {} when a rank was lost{}{}", name, describe_wait(record),
                                presence.ok() ? "" : ": ", presence.message()),
                    peer);
    }
    default:
      return Status(ErrorCode::kTimeout,
                    fmt::format("{}: timed out after {} ms: {}; did every rank make its part of the call?", name,
                                record.timeout_ns / 1'000'000, describe_wait(record)),
                    record.rank);
  }
}

}  // namespace

Status take_error(ErrorRecord& record, const Status& presence) {
  const std::atomic_ref state(record.state);
  if (state.load(std::memory_order_acquire) == 0) return {};
  Status status = describe(record, presence);
  state.store(0, std::memory_order_release);
  return status;
}

}  // namespace ferry::cuda
