#include "rail/call_header.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cstring>
#include <limits>

namespace ferry::rail {
namespace {

constexpr std::int64_t kMaxCount = std::numeric_limits<std::int32_t>::max();
constexpr std::size_t kMessageBegin = offsetof(CallHeader, record) + offsetof(CallRecord, message);
constexpr std::size_t kMessageEnd = kMessageBegin + kCallMessageBytes;

Status wrong(std::string what) { return Status(ErrorCode::kTransport, std::move(what)); }

bool is_known(ErrorCode code) { return code >= ErrorCode::kOk && code <= ErrorCode::kDataCorrupt; }

bool is_known(Operation operation) { return operation >= Operation::kRoute && operation <= Operation::kDestroy; }

/// Messages appear in logs and terminals and become Python strings, which must be valid UTF-8.
void make_plain(std::span<char> text) {
  std::replace_if(
      text.begin(), text.end(), [](char letter) { return letter < ' ' || letter > '~'; }, '?');
}

}  // namespace

Status parse_call_header(std::span<const std::byte, sizeof(CallHeader)> bytes, std::uint64_t call, CallHeader* header) {
  // Copy everything except the message, which few headers contain.
  const auto copy_numbers = [](std::byte* to, const std::byte* from) {
    std::memcpy(to, from, kMessageBegin);
    std::memcpy(to + kMessageEnd, from + kMessageEnd, sizeof(CallHeader) - kMessageEnd);
  };
  CallHeader sent;
  copy_numbers(reinterpret_cast<std::byte*>(&sent), bytes.data());
  const CallRecord& record = sent.record;
  if (sent.call != call) return wrong(fmt::format("announced call {}, expected {}", sent.call, call));
  if (!is_known(record.operation) || !is_known(record.code)) {
    return wrong(fmt::format("announced operation {} with error code {}, expected 0 to {} with 0 to {}",
                             static_cast<std::int32_t>(record.operation), static_cast<std::int32_t>(record.code),
                             static_cast<std::int32_t>(Operation::kDestroy),
                             static_cast<std::int32_t>(ErrorCode::kDataCorrupt)));
  }
  if (record.message_bytes < 0 || record.message_bytes > static_cast<std::int32_t>(kCallMessageBytes)) {
    return wrong(
        fmt::format("announced a message of {} bytes, expected 0 to {}", record.message_bytes, kCallMessageBytes));
  }
  if (sent.max_recv_rows < 0 || sent.max_recv_rows > kMaxCount || sent.num_entries < 0 ||
      sent.num_entries > kMaxCount) {
    return wrong(fmt::format("announced {} entries and max_recv_rows {}, expected 0 to {} of each", sent.num_entries,
                             sent.max_recv_rows, kMaxCount));
  }
  copy_numbers(reinterpret_cast<std::byte*>(header), reinterpret_cast<const std::byte*>(&sent));
  const bool failed = record.code != ErrorCode::kOk;
  const bool has_digest = !failed && has_placement_digest(record.operation);
  if (!failed && !has_digest) header->record.message_bytes = 0;
  const auto length = static_cast<std::size_t>(header->record.message_bytes);
  std::memcpy(header->record.message.data(), bytes.data() + kMessageBegin, length);
  if (failed) make_plain(std::span(header->record.message).first(length));
  return {};
}

ErrorRecord usable_error_record(std::span<const std::byte, sizeof(ErrorRecord)> bytes, int num_ranks) {
  ErrorRecord record;
  std::memcpy(&record, bytes.data(), bytes.size());
  if (!is_known(record.code) || record.code == ErrorCode::kOk) record.code = ErrorCode::kTransport;
  if (record.culprit < 0 || record.culprit >= num_ranks) record.culprit = -1;
  record.message_bytes = std::clamp<std::int32_t>(record.message_bytes, 0, kErrorMessageBytes);
  make_plain(std::span(record.message).first(static_cast<std::size_t>(record.message_bytes)));
  return record;
}

}  // namespace ferry::rail
