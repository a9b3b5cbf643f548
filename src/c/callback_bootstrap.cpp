#include "c/callback_bootstrap.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <chrono>

namespace ferry::c {
namespace {

std::int64_t now_ns() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

}  // namespace

CallbackBootstrap::CallbackBootstrap(const ferry_callback_options& options)
    : options_(options), local_address_(options.local_address != nullptr ? options.local_address : "") {}

Status CallbackBootstrap::gather(std::span<const std::byte> mine, std::span<std::byte> all, std::int64_t timeout_ns) {
  const std::int32_t code = options_.all_gather(options_.user, mine.data(), mine.size(), all.data(), timeout_ns);
  if (code == FERRY_OK) return {};
  const bool known = code > FERRY_OK && code <= FERRY_ERROR_DATA_CORRUPT;
  return Status(known ? static_cast<ErrorCode>(code) : ErrorCode::kTransport,
                fmt::format("rank {}: all_gather: the program's callback returned {}{}, expected 0", options_.rank,
                            code, known ? fmt::format(" ({})", ferry_code_name(code)) : ""));
}

Status CallbackBootstrap::gather_lengths(std::size_t length, std::vector<std::uint64_t>& lengths,
                                         std::int64_t timeout_ns) {
  const std::uint64_t mine = length;
  lengths.resize(static_cast<std::size_t>(options_.num_ranks));
  Status status = gather(std::as_bytes(std::span(&mine, 1)), std::as_writable_bytes(std::span(lengths)), timeout_ns);
  if (!status.ok()) return status;
  // All ranks see the same lengths, so all refuse alike, before memory is allocated.
  for (std::size_t rank = 0; rank < lengths.size(); ++rank) {
    if (lengths[rank] <= kMaxBootstrapMessageBytes) continue;
    return Status(ErrorCode::kInvalidArgument,
                  fmt::format("all_gather: the message of rank {} has {} bytes, expected at most {}", rank,
                              lengths[rank], kMaxBootstrapMessageBytes),
                  static_cast<int>(rank));
  }
  return {};
}

Result<std::vector<std::vector<std::byte>>> CallbackBootstrap::all_gather(std::span<const std::byte> mine,
                                                                          std::int64_t timeout_ns) {
  if (!failed_.ok()) return failed_;
  const std::int64_t deadline_ns = now_ns() + timeout_ns;
  std::vector<std::uint64_t> lengths;
  failed_ = gather_lengths(mine.size(), lengths, timeout_ns);
  if (!failed_.ok()) return failed_;

  const auto longest = static_cast<std::size_t>(*std::ranges::max_element(lengths));
  std::vector<std::vector<std::byte>> messages(lengths.size());
  if (longest == 0) return messages;
  std::vector<std::byte> padded(longest);
  std::ranges::copy(mine, padded.begin());
  std::vector<std::byte> all(longest * lengths.size());
  failed_ = gather(padded, all, std::max<std::int64_t>(deadline_ns - now_ns(), 1));
  if (!failed_.ok()) return failed_;
  for (std::size_t rank = 0; rank < messages.size(); ++rank) {
    const auto first = all.begin() + static_cast<std::ptrdiff_t>(rank * longest);
    messages[rank].assign(first, first + static_cast<std::ptrdiff_t>(lengths[rank]));
  }
  return messages;
}

}  // namespace ferry::c
