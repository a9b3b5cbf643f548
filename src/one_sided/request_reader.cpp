#include "one_sided/request_reader.hpp"

#include <fmt/format.h>

#include <atomic>
#include <chrono>
#include <string_view>

namespace ferry::one_sided {
namespace {

using device::kLapBit;
using device::kRequestWords;
using device::Request;
using device::RequestOp;
using Word = std::atomic_ref<std::uint64_t>;

/// Polls between two reads of the clock while only a part of a request has arrived.
constexpr unsigned kLooksPerClock = 256;

std::int64_t now_ns() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

bool is_inside(std::uint64_t offset, std::uint64_t num_bytes, std::uint64_t limit) {
  return offset <= limit && num_bytes <= limit - offset;
}

bool is_word_inside(std::uint64_t offset, std::uint64_t word_bytes, std::uint64_t limit) {
  return offset % word_bytes == 0 && is_inside(offset, word_bytes, limit);
}

bool moves_bytes(RequestOp op) {
  return op == RequestOp::kPut || op == RequestOp::kPutSignalSet || op == RequestOp::kPutSignalAdd ||
         op == RequestOp::kGet;
}

bool changes_word(RequestOp op) {
  return op == RequestOp::kPutValue || op == RequestOp::kPutValueSignalSet || op == RequestOp::kPutValueSignalAdd ||
         device::is_atomic(op);
}

}  // namespace

const Request* RequestReader::front() {
  if (has_front_) return &front_;
  if (!status_.ok()) return nullptr;
  std::uint64_t* const slot = ring_.words + num_taken_ % ring_.num_slots * kRequestWords;
  const std::uint64_t lap = device::lap_bit(num_taken_, ring_.num_slots);
  std::uint64_t words[kRequestWords];
  bool all = true;
  bool any = false;
  for (std::uint32_t i = 0; i < kRequestWords; ++i) {
    words[i] = Word(slot[i]).load(std::memory_order_acquire);  // acquires the memory that the request names
    const bool here = (words[i] & kLapBit) == lap;
    all = all && here;
    any = any || here;
  }
  if (!all) {
    watch_writer(any);
    return nullptr;
  }
  num_partial_looks_ = 0;
  const std::uint64_t number = words[kRequestWords - 1] & ~kLapBit;
  front_ = device::request_of(words);
  const Status status =
      number == num_taken_
          ? check(front_)
          : Status(ErrorCode::kInternal, fmt::format("one-sided request {}: its slot holds number {}; the ring was "
                                                     "overwritten, perhaps by a store of the program's "
                                                     "outside of its own memory",
                                                     num_taken_, number));
  has_front_ = status.ok();
  if (!has_front_) fail(status);
  return has_front_ ? &front_ : nullptr;
}

void RequestReader::pop() {
  has_front_ = false;
  Word(ring_.counts->consumed).store(++num_taken_, std::memory_order_release);
}

/// Watches the writer when no request can be taken. A request that has arrived in part, or that a later one has
/// overtaken, must be complete before the deadline.
void RequestReader::watch_writer(bool any_word) {
  if (!any_word) {
    const std::uint64_t next = num_taken_ + 1;
    const std::uint64_t word =
        Word(ring_.words[next % ring_.num_slots * kRequestWords]).load(std::memory_order_relaxed);
    // If all requests in a full ring were taken, the next slot may still hold one of an older lap.
    any_word = (word & kLapBit) == device::lap_bit(next, ring_.num_slots);
  }
  if (!any_word) {
    num_partial_looks_ = 0;
    return;
  }
  if (num_partial_looks_++ == 0) partial_since_ns_ = now_ns();
  if (num_partial_looks_ % kLooksPerClock != 0) return;
  if (now_ns() - partial_since_ns_ >= limits_.timeout_ns) {
    fail(Status(ErrorCode::kTimeout,
                fmt::format("one-sided request {}: its writer has not finished it after {} ms; did a kernel end in the "
                            "middle of it?",
                            num_taken_, limits_.timeout_ns / 1'000'000)));
  }
}

Status RequestReader::check(const Request& request) const {
  const auto bad = [this](std::string_view what, std::uint64_t observed, std::uint64_t limit) {
    return Status(ErrorCode::kInvalidArgument,
                  fmt::format("one-sided request {}: {} is {}, expected less than {}, inside symmetric memory and, for "
                              "words, a multiple of their size",
                              num_taken_, what, observed, limit));
  };
  const auto op = static_cast<std::uint8_t>(request.op);
  if (op == 0 || op > device::kLastRequestOp) return bad("the operation", op, device::kLastRequestOp + 1U);
  if (request.op == RequestOp::kQuiet) return {};
  const auto num_peers = static_cast<std::uint64_t>(limits_.num_peers);
  if (request.op == RequestOp::kFence && request.peer == device::kEveryPeer) return {};
  if (request.peer >= num_peers) return bad("the rank", request.peer, num_peers);
  if (moves_bytes(request.op)) {
    // Local bytes are in symmetric memory, which has the same size on all ranks, or in staging; never in both.
    const bool is_staged = request.local_offset >= limits_.remote_bytes;
    const std::uint64_t local_end = is_staged ? limits_.local_bytes : limits_.remote_bytes;
    if (!is_inside(request.local_offset, request.num_bytes, local_end)) {
      return bad("the end of the local bytes", request.local_offset + request.num_bytes, local_end + 1);
    }
    if (!is_inside(request.remote_offset, request.num_bytes, limits_.remote_bytes)) {
      return bad("the end of the remote bytes", request.remote_offset + request.num_bytes, limits_.remote_bytes + 1);
    }
  }
  if (request.is_narrow) {
    if (!device::is_atomic(request.op)) return bad("the flag of a word of 4 bytes", 1, 1);
    constexpr std::uint64_t kEnd = std::uint64_t{1} << 32;
    if (request.value >= kEnd) return bad("the value for a word of 4 bytes", request.value, kEnd);
    if (request.operand >= kEnd) return bad("the operand for a word of 4 bytes", request.operand, kEnd);
  }
  const std::size_t word_bytes = request.is_narrow ? sizeof(std::uint32_t) : sizeof(std::uint64_t);
  if (changes_word(request.op) && !is_word_inside(request.remote_offset, word_bytes, limits_.remote_bytes)) {
    return bad("the offset of the word", request.remote_offset, limits_.remote_bytes);
  }
  if (device::has_signal(request.op) &&
      !is_word_inside(request.signal_offset, sizeof(std::uint64_t), limits_.remote_bytes)) {
    return bad("the offset of the signal", request.signal_offset, limits_.remote_bytes);
  }
  return {};
}

void RequestReader::complete(std::uint64_t end) { Word(ring_.counts->completed).store(end, std::memory_order_release); }

void RequestReader::lose_reply(std::uint32_t reply, bool staging_in_use) {
  const std::uint64_t word = device::reply_word(reply, 0) >> 32 | (staging_in_use ? device::kStagingInUse : 0);
  Word(ring_.replies[reply % device::kNumReplies].lost).store(word, std::memory_order_release);
}

void RequestReader::lose() { Word(ring_.counts->lost).fetch_add(1, std::memory_order_release); }

void RequestReader::answer(std::uint32_t reply, std::uint64_t value) {
  device::RequestReply& answer = ring_.replies[reply % device::kNumReplies];
  Word(answer.words[0]).store(device::reply_word(reply, value), std::memory_order_release);
  Word(answer.words[1]).store(device::reply_word(reply, value >> 32), std::memory_order_release);
}

bool RequestReader::is_broken() const { return Word(ring_.counts->broken).load(std::memory_order_acquire) != 0; }

void RequestReader::fail(const Status& why) {
  if (!status_.ok()) return;
  status_ = why;
  Word(ring_.counts->failed).store(1, std::memory_order_release);
}

}  // namespace ferry::one_sided
