#include "hop/call_notice.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cstring>
#include <limits>

namespace ferry::hop {
namespace {

constexpr std::int64_t kMaxCount = std::numeric_limits<std::int32_t>::max();
constexpr std::size_t kMessageBegin = offsetof(CallNotice, record) + offsetof(CallRecord, message);
constexpr std::size_t kMessageEnd = kMessageBegin + kCallMessageBytes;

Status wrong(std::string what) { return Status(ErrorCode::kTransport, std::move(what)); }

bool is_known(ErrorCode code) { return code >= ErrorCode::kOk && code <= ErrorCode::kInternal; }

bool is_known(Operation operation) { return operation >= Operation::kRoute && operation <= Operation::kDestroy; }

/// Messages end in logs and terminals, and in Python strings, which are UTF-8 or an error.
void make_plain(std::span<char> text) {
  std::replace_if(
      text.begin(), text.end(), [](char letter) { return letter < ' ' || letter > '~'; }, '?');
}

}  // namespace

Status parse_call_notice(std::span<const std::byte, sizeof(CallNotice)> bytes, std::uint64_t call, CallNotice* notice) {
  // All but the message, which hardly any notice has.
  const auto copy_numbers = [](std::byte* to, const std::byte* from) {
    std::memcpy(to, from, kMessageBegin);
    std::memcpy(to + kMessageEnd, from + kMessageEnd, sizeof(CallNotice) - kMessageEnd);
  };
  CallNotice said;
  copy_numbers(reinterpret_cast<std::byte*>(&said), bytes.data());
  const CallRecord& record = said.record;
  if (said.call != call) return wrong(fmt::format("announced call {}, expected {}", said.call, call));
  if (!is_known(record.operation) || !is_known(record.code)) {
    return wrong(fmt::format("announced operation {} with error code {}, expected 0 to {} with 0 to {}",
                             static_cast<std::int32_t>(record.operation), static_cast<std::int32_t>(record.code),
                             static_cast<std::int32_t>(Operation::kDestroy),
                             static_cast<std::int32_t>(ErrorCode::kInternal)));
  }
  if (record.message_bytes < 0 || record.message_bytes > static_cast<std::int32_t>(kCallMessageBytes)) {
    return wrong(
        fmt::format("announced a message of {} bytes, expected 0 to {}", record.message_bytes, kCallMessageBytes));
  }
  if (said.max_recv_rows < 0 || said.max_recv_rows > kMaxCount || said.num_entries < 0 ||
      said.num_entries > kMaxCount) {
    return wrong(fmt::format("announced {} entries and max_recv_rows {}, expected 0 to {} of each", said.num_entries,
                             said.max_recv_rows, kMaxCount));
  }
  copy_numbers(reinterpret_cast<std::byte*>(notice), reinterpret_cast<const std::byte*>(&said));
  if (record.code == ErrorCode::kOk) {
    notice->record.message_bytes = 0;
  } else {
    const auto length = static_cast<std::size_t>(record.message_bytes);
    std::memcpy(notice->record.message.data(), bytes.data() + kMessageBegin, length);
    make_plain(std::span(notice->record.message).first(length));
  }
  return {};
}

node::Verdict usable_verdict(std::span<const std::byte, sizeof(node::Verdict)> bytes, int num_ranks) {
  node::Verdict verdict;
  std::memcpy(&verdict, bytes.data(), bytes.size());
  if (!is_known(verdict.code) || verdict.code == ErrorCode::kOk) verdict.code = ErrorCode::kTransport;
  if (verdict.culprit < 0 || verdict.culprit >= num_ranks) verdict.culprit = -1;
  verdict.message_bytes = std::clamp<std::int32_t>(verdict.message_bytes, 0, node::kVerdictMessageBytes);
  make_plain(std::span(verdict.message).first(static_cast<std::size_t>(verdict.message_bytes)));
  return verdict;
}

}  // namespace ferry::hop
