/// Call headers and error records from rail peers (rail/call_header.hpp): an accepted header must be valid for all its
/// later uses: agreement, route's counting, and readable messages.
///
/// Input: number of the call (u8), number of ranks (u8), then the bytes of the ranks' headers and of an error record.

#include <algorithm>
#include <array>
#include <cstring>
#include <limits>
#include <memory>
#include <vector>

#include "fuzz_target.hpp"
#include "input_reader.hpp"
#include "rail/call_header.hpp"

namespace ferry::test {
namespace {

using rail::CallHeader;

constexpr std::size_t kMaxRanks = 4;
// Room for an error message with some numbers in it.
constexpr std::size_t kMessageRoomBytes = 512;

bool is_plain(std::span<const char> text) {
  return std::all_of(text.begin(), text.end(), [](char letter) { return letter >= ' ' && letter <= '~'; });
}

/// Rebuilds the header from its fields, as a rank would have written it.
CallHeader say_again(const CallHeader& header) {
  CallHeader again;
  again.call = header.call;
  again.record.operation = header.record.operation;
  again.record.num_fields = header.record.num_fields;
  again.record.fields = header.record.fields;
  again.max_recv_rows = header.max_recv_rows;
  again.num_entries = header.num_entries;
  const auto length = static_cast<std::size_t>(header.record.message_bytes);
  if (header.record.code == ErrorCode::kOk) {
    again.record.message_bytes = header.record.message_bytes;
    std::copy_n(header.record.message.begin(), length, again.record.message.begin());
    return again;
  }
  again.record.set_status(Status(header.record.code, std::string(header.record.message.data(), length)));
  return again;
}

bool accepts(std::span<const std::byte, sizeof(CallHeader)> bytes, std::uint64_t call, CallHeader* header) {
  const CallHeader before = *header;
  const AllocationWatch watch;
  const Status status = rail::parse_call_header(bytes, call, header);
  require(watch.largest_bytes() <= kMessageRoomBytes, "parsing a header does not allocate");
  if (!status.ok()) {
    require_refusal(status, ErrorCode::kTransport);
    require(std::memcmp(&before, header, sizeof(before)) == 0, "a refused header changes nothing");
    return false;
  }
  const CallRecord& record = header->record;
  require(header->call == call, "a header belongs to this call");
  require(to_string(record.operation) != "unknown call", "an operation has a name");
  require(to_string(record.code) != "unknown", "an error code has a name");
  constexpr std::int64_t kMost = std::numeric_limits<std::int32_t>::max();
  require(header->max_recv_rows >= 0 && header->max_recv_rows <= kMost, "rows fit tables of rows");
  require(header->num_entries >= 0 && header->num_entries <= kMost, "entries fit tables of entries");
  require(record.message_bytes >= 0 && record.message_bytes <= static_cast<std::int32_t>(kCallMessageBytes),
          "a message is inside its bounds");
  const bool failed = record.code != ErrorCode::kOk;
  require(failed || has_placement_digest(record.operation) || record.message_bytes == 0,
          "only successful calls with a placement carry a text");
  const auto text = std::span(record.message).first(static_cast<std::size_t>(record.message_bytes));
  require(!failed || is_plain(text), "a message is printable");

  CallHeader raw;
  std::memcpy(&raw, bytes.data(), sizeof(raw));
  require(raw.record.code == record.code && raw.record.operation == record.operation &&
              raw.record.fields == record.fields && raw.max_recv_rows == header->max_recv_rows &&
              raw.num_entries == header->num_entries,
          "an accepted header keeps the sent fields");
  for (std::size_t i = 0; i < text.size(); ++i) {
    const char letter = raw.record.message[i];
    require(text[i] == (!failed || is_plain(std::span(&letter, 1)) ? letter : '?'),
            "only characters of messages that are not printable are changed");
  }
  const CallHeader again = say_again(*header);
  CallHeader second;
  const auto again_bytes = std::as_bytes(std::span(&again, 1));
  require(rail::parse_call_header(again_bytes.first<sizeof(CallHeader)>(), call, &second).ok(),
          "an accepted header can be encoded again");
  require(same_bytes(std::as_bytes(std::span(&second, 1)), again_bytes), "a parsed header has one encoding");
  return true;
}

void check_agreed(std::span<const CallHeader> headers) {
  std::vector<const CallRecord*> records;
  for (const CallHeader& header : headers) records.push_back(&header.record);
  const Status agreed = check_agreement(records);
  const auto failed = std::find_if(records.begin(), records.end(),
                                   [](const CallRecord* record) { return record->code != ErrorCode::kOk; });
  const auto differs = std::find_if(records.begin(), records.end(), [&](const CallRecord* record) {
    const std::size_t count = field_names(records[0]->operation).size();
    return record->operation != records[0]->operation ||
           !std::equal(record->fields.begin(), record->fields.begin() + static_cast<std::ptrdiff_t>(count),
                       records[0]->fields.begin());
  });
  require(agreed.ok() == (failed == records.end() && differs == records.end()), "ranks with equal calls agree");
  if (agreed.ok()) return;
  const auto culprit = failed != records.end() ? failed : differs;
  require(agreed.peer() == culprit - records.begin(), "the first rank that differs is named");
  require(agreed.code() == (failed != records.end() ? (*failed)->code : ErrorCode::kInvalidArgument),
          "a rank's own error comes first");
  require(is_plain(agreed.message()), "the message of a disagreement is printable");
}

void fuzz_error_record(std::span<const std::byte> given, int num_ranks) {
  std::array<std::byte, sizeof(ErrorRecord)> bytes{};
  std::copy_n(given.begin(), std::min(given.size(), bytes.size()), bytes.begin());
  const ErrorRecord record = rail::usable_error_record(bytes, num_ranks);
  require(record.code != ErrorCode::kOk && to_string(record.code) != "unknown", "a record is a failure with a name");
  require(record.culprit >= -1 && record.culprit < num_ranks, "a culprit is a rank or -1");
  require(record.message_bytes >= 0 && record.message_bytes <= static_cast<std::int32_t>(kErrorMessageBytes),
          "a message is inside its bounds");
  require(is_plain(std::span(record.message).first(static_cast<std::size_t>(record.message_bytes))),
          "a message is printable");
  std::array<std::byte, sizeof(ErrorRecord)> sent;
  std::memcpy(sent.data(), &record, sizeof(record));
  const ErrorRecord parsed = rail::usable_error_record(sent, num_ranks);
  require(std::memcmp(&parsed, &record, sizeof(record)) == 0, "an error record is passed on unchanged");
  ErrorRecord raw;
  std::memcpy(&raw, bytes.data(), sizeof(raw));
  require(raw.code == record.code || record.code == ErrorCode::kTransport, "a code that exists is kept");
  require(raw.culprit == record.culprit || record.culprit == -1, "a culprit that exists is kept");
}

}  // namespace

void fuzz_one(std::span<const std::byte> input) {
  InputReader reader(input);
  const std::uint64_t call = reader.take<std::uint8_t>();
  const std::size_t num_ranks = 1 + reader.take<std::uint8_t>() % kMaxRanks;
  std::vector<CallHeader> headers;
  for (std::size_t rank = 0; rank < num_ranks; ++rank) {
    // On the heap, so that the sanitizer detects an access beyond the end.
    const auto bytes =
        std::make_unique<std::array<std::byte, sizeof(CallHeader)>>(reader.take_array<sizeof(CallHeader)>());
    CallHeader header;
    if (accepts(*bytes, call, &header)) headers.push_back(header);
  }
  if (!headers.empty()) check_agreed(headers);
  fuzz_error_record(reader.take_at_most(sizeof(ErrorRecord)), static_cast<int>(num_ranks));
}

}  // namespace ferry::test
