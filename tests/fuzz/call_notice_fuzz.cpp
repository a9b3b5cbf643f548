/// What rail peers say of their calls and of the end of a group (hop/call_notice.hpp): what is accepted must be fit for
/// all that follows, which is agreement, route's counting, and messages for people.
///
/// Input: number of the call (u8), ranks (u8), then bytes: of the ranks' notices, and of a verdict.

#include <algorithm>
#include <array>
#include <cstring>
#include <limits>
#include <memory>
#include <vector>

#include "fuzz_target.hpp"
#include "hop/call_notice.hpp"
#include "input_reader.hpp"

namespace ferry::test {
namespace {

using hop::CallNotice;

constexpr std::size_t kMaxRanks = 4;
// Room for a refusal with some numbers in it.
constexpr std::size_t kMessageRoomBytes = 512;

bool is_plain(std::span<const char> text) {
  return std::all_of(text.begin(), text.end(), [](char letter) { return letter >= ' ' && letter <= '~'; });
}

/// The notice as a rank would have written it, from scratch.
CallNotice say_again(const CallNotice& notice) {
  CallNotice again;
  again.call = notice.call;
  again.record.operation = notice.record.operation;
  again.record.num_fields = notice.record.num_fields;
  again.record.fields = notice.record.fields;
  again.max_recv_rows = notice.max_recv_rows;
  again.num_entries = notice.num_entries;
  if (notice.record.code == ErrorCode::kOk) return again;
  const auto length = static_cast<std::size_t>(notice.record.message_bytes);
  again.record.set_status(Status(notice.record.code, std::string(notice.record.message.data(), length)));
  return again;
}

bool accepts(std::span<const std::byte, sizeof(CallNotice)> bytes, std::uint64_t call, CallNotice* notice) {
  const CallNotice before = *notice;
  const AllocationWatch watch;
  const Status status = hop::parse_call_notice(bytes, call, notice);
  require(watch.largest_bytes() <= kMessageRoomBytes, "a notice makes nobody allocate");
  if (!status.ok()) {
    require_refusal(status, ErrorCode::kTransport);
    require(std::memcmp(&before, notice, sizeof(before)) == 0, "what is refused leaves no traces");
    return false;
  }
  const CallRecord& record = notice->record;
  require(notice->call == call, "a notice is of this call");
  require(to_string(record.operation) != "unknown call", "an operation has a name");
  require(to_string(record.code) != "unknown", "an error code has a name");
  constexpr std::int64_t kMost = std::numeric_limits<std::int32_t>::max();
  require(notice->max_recv_rows >= 0 && notice->max_recv_rows <= kMost, "rows fit tables of rows");
  require(notice->num_entries >= 0 && notice->num_entries <= kMost, "entries fit tables of entries");
  require(record.message_bytes >= 0 && record.message_bytes <= static_cast<std::int32_t>(kCallMessageBytes),
          "a message is inside of its room");
  require(record.code != ErrorCode::kOk || record.message_bytes == 0, "success says nothing");
  const auto text = std::span(record.message).first(static_cast<std::size_t>(record.message_bytes));
  require(is_plain(text), "a message can be shown to people");

  CallNotice raw;
  std::memcpy(&raw, bytes.data(), sizeof(raw));
  require(raw.record.code == record.code && raw.record.operation == record.operation &&
              raw.record.fields == record.fields && raw.max_recv_rows == notice->max_recv_rows &&
              raw.num_entries == notice->num_entries,
          "what is accepted is what was said");
  for (std::size_t i = 0; i < text.size(); ++i) {
    const char letter = raw.record.message[i];
    require(text[i] == (is_plain(std::span(&letter, 1)) ? letter : '?'), "only what cannot be shown is changed");
  }
  const CallNotice again = say_again(*notice);
  CallNotice second;
  const auto again_bytes = std::as_bytes(std::span(&again, 1));
  require(hop::parse_call_notice(again_bytes.first<sizeof(CallNotice)>(), call, &second).ok(),
          "what is accepted can be said again");
  require(same_bytes(std::as_bytes(std::span(&second, 1)), again_bytes), "a notice that was parsed has one spelling");
  return true;
}

void check_agreed(std::span<const CallNotice> notices) {
  std::vector<const CallRecord*> records;
  for (const CallNotice& notice : notices) records.push_back(&notice.record);
  const Status agreed = check_agreement(records);
  const auto failed = std::find_if(records.begin(), records.end(),
                                   [](const CallRecord* record) { return record->code != ErrorCode::kOk; });
  const auto differs = std::find_if(records.begin(), records.end(), [&](const CallRecord* record) {
    const std::size_t count = field_names(records[0]->operation).size();
    return record->operation != records[0]->operation ||
           !std::equal(record->fields.begin(), record->fields.begin() + static_cast<std::ptrdiff_t>(count),
                       records[0]->fields.begin());
  });
  require(agreed.ok() == (failed == records.end() && differs == records.end()), "ranks agree that do the same");
  if (agreed.ok()) return;
  const auto culprit = failed != records.end() ? failed : differs;
  require(agreed.peer() == culprit - records.begin(), "the first that differs is named");
  require(agreed.code() == (failed != records.end() ? (*failed)->code : ErrorCode::kInvalidArgument),
          "a rank's own error comes first");
  require(is_plain(agreed.message()), "a disagreement can be shown to people");
}

void fuzz_verdict(std::span<const std::byte> given, int num_ranks) {
  std::array<std::byte, sizeof(node::Verdict)> bytes{};
  std::copy_n(given.begin(), std::min(given.size(), bytes.size()), bytes.begin());
  const node::Verdict verdict = hop::usable_verdict(bytes, num_ranks);
  require(verdict.code != ErrorCode::kOk && to_string(verdict.code) != "unknown", "a verdict is a failure with a name");
  require(verdict.culprit >= -1 && verdict.culprit < num_ranks, "a culprit is a rank or nobody");
  require(verdict.message_bytes >= 0 && verdict.message_bytes <= static_cast<std::int32_t>(node::kVerdictMessageBytes),
          "a verdict is inside of its room");
  require(is_plain(std::span(verdict.message).first(static_cast<std::size_t>(verdict.message_bytes))),
          "a verdict can be shown to people");
  std::array<std::byte, sizeof(node::Verdict)> told;
  std::memcpy(told.data(), &verdict, sizeof(verdict));
  const node::Verdict heard = hop::usable_verdict(told, num_ranks);
  require(std::memcmp(&heard, &verdict, sizeof(verdict)) == 0, "a verdict is told on as it was heard");
  node::Verdict raw;
  std::memcpy(&raw, bytes.data(), sizeof(raw));
  require(raw.code == verdict.code || verdict.code == ErrorCode::kTransport, "a code that exists is kept");
  require(raw.culprit == verdict.culprit || verdict.culprit == -1, "a culprit that exists is kept");
}

}  // namespace

void fuzz_one(std::span<const std::byte> input) {
  InputReader reader(input);
  const std::uint64_t call = reader.take<std::uint8_t>();
  const std::size_t num_ranks = 1 + reader.take<std::uint8_t>() % kMaxRanks;
  std::vector<CallNotice> notices;
  for (std::size_t rank = 0; rank < num_ranks; ++rank) {
    // On the heap, so that the sanitizer sees a step beyond the end.
    const auto bytes =
        std::make_unique<std::array<std::byte, sizeof(CallNotice)>>(reader.take_array<sizeof(CallNotice)>());
    CallNotice notice;
    if (accepts(*bytes, call, &notice)) notices.push_back(notice);
  }
  if (!notices.empty()) check_agreed(notices);
  fuzz_verdict(reader.take_at_most(sizeof(node::Verdict)), static_cast<int>(num_ranks));
}

}  // namespace ferry::test
