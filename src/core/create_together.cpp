#include "core/create_together.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cstring>
#include <new>
#include <system_error>

namespace ferry {
namespace {

using Messages = std::vector<std::vector<std::byte>>;

/// Header of each gathered message; the text of a failure follows it, or what the rank has to say.
struct StatusPrefix {
  ErrorCode code = ErrorCode::kOk;
  std::int32_t peer = -1;
};

/// Error of `rank` as it is in its message, which has a prefix; ok if it has none.
Status reported_status(const std::vector<std::byte>& message, int rank, int num_ranks) {
  StatusPrefix theirs;
  std::memcpy(&theirs, message.data(), sizeof(theirs));
  if (theirs.code == ErrorCode::kOk) return {};
  const auto text = std::span(message).subspan(sizeof(theirs));
  const bool has_code = theirs.code > ErrorCode::kOk && theirs.code <= ErrorCode::kDataCorrupt;
  const bool has_peer = theirs.peer >= 0 && theirs.peer < num_ranks;
  return Status(
      has_code ? theirs.code : ErrorCode::kTransport,
      fmt::format("rank {}: {}", rank, std::string_view(reinterpret_cast<const char*>(text.data()), text.size())),
      has_peer ? theirs.peer : rank);
}

/// Error that all ranks return for these messages.
Status first_failure(const Messages& messages, int num_ranks) {
  if (messages.size() != static_cast<std::size_t>(num_ranks)) {
    return Status(ErrorCode::kTransport,
                  fmt::format("Group::create: the bootstrap's all_gather returned {} messages, expected one from each "
                              "of the {} ranks",
                              messages.size(), num_ranks));
  }
  Status first_late;
  for (int rank = 0; rank < num_ranks; ++rank) {
    const std::vector<std::byte>& message = messages[static_cast<std::size_t>(rank)];
    if (message.size() < sizeof(StatusPrefix)) {
      return Status(ErrorCode::kTransport,
                    fmt::format("Group::create: rank {} sent {} bytes, expected at least {}; run the same version "
                                "on every rank",
                                rank, message.size(), sizeof(StatusPrefix)),
                    rank);
    }
    Status failed = reported_status(message, rank, num_ranks);
    if (failed.ok()) continue;
    // A rank that waited in vain has less information than the rank that it waited for, whose error is preferred.
    if (failed.code() != ErrorCode::kTimeout && failed.code() != ErrorCode::kPeerLost) return failed;
    if (first_late.ok()) first_late = std::move(failed);
  }
  return first_late;
}

/// Whether first_failure() is an error, without an allocation that could fail here alone.
bool has_failure(const Messages& messages, int num_ranks) {
  return messages.size() != static_cast<std::size_t>(num_ranks) ||
         std::ranges::any_of(messages, [](const std::vector<std::byte>& message) {
           StatusPrefix theirs;
           if (message.size() < sizeof(theirs)) return true;
           std::memcpy(&theirs, message.data(), sizeof(theirs));
           return theirs.code != ErrorCode::kOk;
         });
}

/// The status, followed by its text or else by `mine`.
std::vector<std::byte> to_message(const Status& status, std::span<const std::byte> mine) {
  const StatusPrefix prefix{status.code(), status.peer()};
  const auto body = status.ok() ? mine : std::as_bytes(std::span(status.message()));
  std::vector<std::byte> message(sizeof(prefix) + body.size());
  std::memcpy(message.data(), &prefix, sizeof(prefix));
  std::ranges::copy(body, message.begin() + sizeof(prefix));
  return message;
}

void strip_prefixes(Messages& messages) {
  for (std::vector<std::byte>& bytes : messages) bytes.erase(bytes.begin(), bytes.begin() + sizeof(StatusPrefix));
}

bool all_are_equal(const Messages& messages) {
  return std::ranges::all_of(messages, [&](const std::vector<std::byte>& one) { return one == messages.front(); });
}

}  // namespace

std::vector<std::byte> empty_message() { return to_message({}, {}); }

Result<Messages> gather_or_fail(Bootstrap& bootstrap, const Status& my_status, std::span<const std::byte> mine,
                                std::int64_t timeout_ns) {
  Result<Messages> gathered = bootstrap.all_gather(to_message(my_status, mine), timeout_ns);
  if (!gathered.ok()) return gathered.status();
  if (Status failure = first_failure(*gathered, bootstrap.num_ranks()); !failure.ok()) {
    // An error that every rank found is about no rank.
    return !my_status.ok() && all_are_equal(*gathered) ? my_status : failure;
  }
  strip_prefixes(*gathered);
  return gathered;
}

Result<Attempt> gather_attempt(Bootstrap& bootstrap, const Status& my_status, std::span<const std::byte> mine,
                               std::int64_t timeout_ns) {
  Result<Messages> gathered = gather_or_fail(bootstrap, {}, to_message(my_status, mine), timeout_ns);
  if (!gathered.ok()) return gathered.status();
  Attempt attempt;
  attempt.failure = first_failure(*gathered, bootstrap.num_ranks());
  if (!attempt.failure.ok()) return attempt;
  attempt.messages = std::move(*gathered);
  strip_prefixes(attempt.messages);
  return attempt;
}

Result<Messages> CreationBootstrap::all_gather(std::span<const std::byte> mine, std::int64_t timeout_ns) {
  ++num_exchanges_;
  Result<Messages> gathered = bootstrap_.all_gather(mine, timeout_ns);
  has_failed_ = has_failed_ || !gathered.ok() || has_failure(*gathered, num_ranks());
  return gathered;
}

Status status_of_exception(std::string_view operation, int rank) {
  try {
    throw;
  } catch (const std::bad_alloc&) {
    return Status(ErrorCode::kSystem,
                  fmt::format("{}: rank {} ran out of memory; raise its limit (ulimit -v), or use a machine with more",
                              operation, rank),
                  rank);
  } catch (const std::system_error& error) {
    return Status(ErrorCode::kSystem, fmt::format("{}: {}", operation, error.what()), rank);
  }
}

}  // namespace ferry
