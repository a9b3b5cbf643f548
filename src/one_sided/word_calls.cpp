/// Signals and atomics of a OneSided.

#include <fmt/format.h>

#include <cstdint>
#include <string_view>
#include <type_traits>

#include "one_sided/core.hpp"

namespace ferry {
namespace {

using one_sided::Core;
using one_sided::FetchCall;
using one_sided::FetchOp;

template <typename Word>
Status signal_checked(const Core& core, int rank, const Word* word, Word value, SignalOp op, Stream stream) {
  if (Status status = core.check_call("signal", rank, stream); !status.ok()) return status;
  const Result<std::size_t> offset = core.find_word("signal", word, sizeof(Word));
  if (!offset.ok()) return offset.status();
  if (Status status = one_sided::check_op("signal", op); !status.ok()) return status;
  return core.backend->signal(
      {.rank = rank, .offset = *offset, .value = value, .op = op, .stream = stream, .word_bytes = sizeof(Word)});
}

/// Arguments of a fetch, as the caller gave them.
template <typename Word>
struct FetchArguments {
  FetchOp op;
  int rank;
  Word* word;
  Word value;
  Word expected;
};

template <typename Word>
Result<FetchCall> check_fetch(const Core& core, const FetchArguments<Word>& in, Stream stream) {
  const std::string_view operation = one_sided::name_of(in.op);
  if (Status status = core.check_call(operation, in.rank, stream); !status.ok()) return status;
  const Result<std::size_t> offset = core.find_word(operation, in.word, sizeof(Word));
  if (!offset.ok()) return offset.status();
  return FetchCall{.rank = in.rank,
                   .offset = *offset,
                   .op = in.op,
                   .word_bytes = sizeof(Word),
                   .value = in.value,
                   .expected = in.expected,
                   .stream = stream};
}

template <typename Word>
Status fetch(const Core& core, const FetchArguments<Word>& in, std::type_identity_t<Word>* fetched, Stream stream) {
  const Result<FetchCall> call = check_fetch(core, in, stream);
  if (!call.ok()) return core.noted(call.status());
  if (fetched == nullptr || reinterpret_cast<std::uintptr_t>(fetched) % sizeof(Word) != 0) {
    return core.noted(Status(ErrorCode::kInvalidArgument,
                             fmt::format("{}: fetched is {}, expected an address for {} bytes, aligned to as many",
                                         one_sided::name_of(in.op), static_cast<const void*>(fetched), sizeof(Word))));
  }
  return core.noted(core.backend->fetch(*call, fetched));
}

template <typename Word>
Result<Word> fetch_now(const Core& core, const FetchArguments<Word>& in) {
  const Result<FetchCall> call = check_fetch(core, in, {});
  if (!call.ok()) return core.noted(call.status());
  const Result<std::uint64_t> before = core.backend->fetch_now(*call);
  if (!before.ok()) return core.noted(before.status());
  return static_cast<Word>(*before);
}

}  // namespace

Status OneSided::signal(int rank, std::uint64_t* word, std::uint64_t value, SignalOp op, Stream stream) {
  return core_->noted(signal_checked(*core_, rank, word, value, op, stream));
}

Status OneSided::signal(int rank, std::uint32_t* word, std::uint32_t value, SignalOp op, Stream stream) {
  return core_->noted(signal_checked(*core_, rank, word, value, op, stream));
}

Status OneSided::fetch_add(int rank, std::uint64_t* word, std::uint64_t value, std::uint64_t* fetched, Stream stream) {
  return fetch<std::uint64_t>(*core_, {FetchOp::kAdd, rank, word, value, 0}, fetched, stream);
}

Result<std::uint64_t> OneSided::fetch_add(int rank, std::uint64_t* word, std::uint64_t value) {
  return fetch_now<std::uint64_t>(*core_, {FetchOp::kAdd, rank, word, value, 0});
}

Status OneSided::fetch_add(int rank, std::uint32_t* word, std::uint32_t value, std::uint32_t* fetched, Stream stream) {
  return fetch<std::uint32_t>(*core_, {FetchOp::kAdd, rank, word, value, 0}, fetched, stream);
}

Result<std::uint32_t> OneSided::fetch_add(int rank, std::uint32_t* word, std::uint32_t value) {
  return fetch_now<std::uint32_t>(*core_, {FetchOp::kAdd, rank, word, value, 0});
}

Status OneSided::swap(int rank, std::uint64_t* word, std::uint64_t value, std::uint64_t* fetched, Stream stream) {
  return fetch<std::uint64_t>(*core_, {FetchOp::kSwap, rank, word, value, 0}, fetched, stream);
}

Result<std::uint64_t> OneSided::swap(int rank, std::uint64_t* word, std::uint64_t value) {
  return fetch_now<std::uint64_t>(*core_, {FetchOp::kSwap, rank, word, value, 0});
}

Status OneSided::swap(int rank, std::uint32_t* word, std::uint32_t value, std::uint32_t* fetched, Stream stream) {
  return fetch<std::uint32_t>(*core_, {FetchOp::kSwap, rank, word, value, 0}, fetched, stream);
}

Result<std::uint32_t> OneSided::swap(int rank, std::uint32_t* word, std::uint32_t value) {
  return fetch_now<std::uint32_t>(*core_, {FetchOp::kSwap, rank, word, value, 0});
}

Status OneSided::fetch_and(int rank, std::uint64_t* word, std::uint64_t value, std::uint64_t* fetched, Stream stream) {
  return fetch<std::uint64_t>(*core_, {FetchOp::kAnd, rank, word, value, 0}, fetched, stream);
}

Result<std::uint64_t> OneSided::fetch_and(int rank, std::uint64_t* word, std::uint64_t value) {
  return fetch_now<std::uint64_t>(*core_, {FetchOp::kAnd, rank, word, value, 0});
}

Status OneSided::fetch_and(int rank, std::uint32_t* word, std::uint32_t value, std::uint32_t* fetched, Stream stream) {
  return fetch<std::uint32_t>(*core_, {FetchOp::kAnd, rank, word, value, 0}, fetched, stream);
}

Result<std::uint32_t> OneSided::fetch_and(int rank, std::uint32_t* word, std::uint32_t value) {
  return fetch_now<std::uint32_t>(*core_, {FetchOp::kAnd, rank, word, value, 0});
}

Status OneSided::fetch_or(int rank, std::uint64_t* word, std::uint64_t value, std::uint64_t* fetched, Stream stream) {
  return fetch<std::uint64_t>(*core_, {FetchOp::kOr, rank, word, value, 0}, fetched, stream);
}

Result<std::uint64_t> OneSided::fetch_or(int rank, std::uint64_t* word, std::uint64_t value) {
  return fetch_now<std::uint64_t>(*core_, {FetchOp::kOr, rank, word, value, 0});
}

Status OneSided::fetch_or(int rank, std::uint32_t* word, std::uint32_t value, std::uint32_t* fetched, Stream stream) {
  return fetch<std::uint32_t>(*core_, {FetchOp::kOr, rank, word, value, 0}, fetched, stream);
}

Result<std::uint32_t> OneSided::fetch_or(int rank, std::uint32_t* word, std::uint32_t value) {
  return fetch_now<std::uint32_t>(*core_, {FetchOp::kOr, rank, word, value, 0});
}

Status OneSided::fetch_xor(int rank, std::uint64_t* word, std::uint64_t value, std::uint64_t* fetched, Stream stream) {
  return fetch<std::uint64_t>(*core_, {FetchOp::kXor, rank, word, value, 0}, fetched, stream);
}

Result<std::uint64_t> OneSided::fetch_xor(int rank, std::uint64_t* word, std::uint64_t value) {
  return fetch_now<std::uint64_t>(*core_, {FetchOp::kXor, rank, word, value, 0});
}

Status OneSided::fetch_xor(int rank, std::uint32_t* word, std::uint32_t value, std::uint32_t* fetched, Stream stream) {
  return fetch<std::uint32_t>(*core_, {FetchOp::kXor, rank, word, value, 0}, fetched, stream);
}

Result<std::uint32_t> OneSided::fetch_xor(int rank, std::uint32_t* word, std::uint32_t value) {
  return fetch_now<std::uint32_t>(*core_, {FetchOp::kXor, rank, word, value, 0});
}

Status OneSided::compare_swap(int rank, std::uint64_t* word, std::uint64_t expected, std::uint64_t desired,
                              std::uint64_t* fetched, Stream stream) {
  return fetch<std::uint64_t>(*core_, {FetchOp::kCompareSwap, rank, word, desired, expected}, fetched, stream);
}

Result<std::uint64_t> OneSided::compare_swap(int rank, std::uint64_t* word, std::uint64_t expected,
                                             std::uint64_t desired) {
  return fetch_now<std::uint64_t>(*core_, {FetchOp::kCompareSwap, rank, word, desired, expected});
}

Status OneSided::compare_swap(int rank, std::uint32_t* word, std::uint32_t expected, std::uint32_t desired,
                              std::uint32_t* fetched, Stream stream) {
  return fetch<std::uint32_t>(*core_, {FetchOp::kCompareSwap, rank, word, desired, expected}, fetched, stream);
}

Result<std::uint32_t> OneSided::compare_swap(int rank, std::uint32_t* word, std::uint32_t expected,
                                             std::uint32_t desired) {
  return fetch_now<std::uint32_t>(*core_, {FetchOp::kCompareSwap, rank, word, desired, expected});
}

}  // namespace ferry
