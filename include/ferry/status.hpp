#ifndef FERRY_STATUS_HPP
#define FERRY_STATUS_HPP

/// Failure reports of calls: `Status` and `Result<T>`. Nothing in Ferry throws unless the caller asks for it by
/// `.value()`.

#include <cstdint>
#include <memory>
#include <stdexcept>
#include <string>
#include <string_view>
#include <utility>
#include <variant>

#include "ferry/export.hpp"

namespace ferry {

/// Kind of failure. The numbers are stable: they also cross process and language boundaries. docs/errors.md lists what
/// remains usable after each.
enum class ErrorCode : std::int32_t {
  kOk = 0,               ///< no failure
  kInvalidArgument = 1,  ///< a shape, dtype, stride, id or pointer is wrong; nothing was sent, nothing was changed
  kUnsupported = 2,      ///< valid, but this build, backend or machine cannot do it
  kCapacity = 3,         ///< more rows, tokens or bytes than the caller made room for; nothing was sent
  kTimeout = 4,          ///< a wait outlasted its deadline; `peer()` is the rank it waited for
  kPeerLost = 5,         ///< a rank died or left; `peer()` is that rank
  kTransport = 6,        ///< the network engine or a bootstrap connection failed
  kCuda = 7,             ///< a CUDA call failed
  kSystem = 8,           ///< a system call failed (out of memory, too many open files, …)
  kInternal = 9,         ///< a bug in Ferry; please report it
  kDataCorrupt = 10,     ///< rows arrived with other bytes than were sent (GroupOptions::verify)
};

/// The enumerator's name, e.g. "kTimeout".
FERRY_API std::string_view to_string(ErrorCode code);

/// Result of a call. One pointer wide; null when ok. Copyable, and safe to read from many threads.
class [[nodiscard]] Status {
 public:
  /// No failure.
  Status() = default;

  /// A failure. `message`: failed operation, place, observed and expected values, remedy; `peer`: the rank at fault, -1
  /// if none.
  FERRY_API Status(ErrorCode code, std::string message, int peer = -1);

  bool ok() const { return detail_ == nullptr; }
  explicit operator bool() const { return ok(); }
  ErrorCode code() const { return detail_ ? detail_->code : ErrorCode::kOk; }
  /// The rank that was waited for, died or disagreed; -1 if no single rank is at fault.
  int peer() const { return detail_ ? detail_->peer : -1; }
  /// Empty when ok. Valid as long as this Status (or a copy) lives.
  std::string_view message() const { return detail_ ? std::string_view(detail_->message) : std::string_view(); }
  /// "kTimeout: dispatch: …", or "kOk".
  FERRY_API std::string to_string() const;

 private:
  struct Detail {
    ErrorCode code;
    int peer;
    std::string message;
  };
  std::shared_ptr<const Detail> detail_;
};

/// Exception thrown by `.value()`, for callers that prefer exceptions.
class FERRY_API Error : public std::runtime_error {
 public:
  explicit Error(Status status) : std::runtime_error(status.to_string()), status_(std::move(status)) {}
  const Status& status() const { return status_; }

 private:
  Status status_;
};

/// Throws `Error` unless `status` is ok.
inline void throw_if_error(Status status) {
  if (!status.ok()) throw Error(std::move(status));
}

/// A `T`, or the Status of the failure.
template <typename T>
class [[nodiscard]] Result {
 public:
  Result(T value) : content_(std::in_place_index<0>, std::move(value)) {}         // NOLINT(google-explicit-constructor)
  Result(Status status) : content_(std::in_place_index<1>, std::move(status)) {}  // NOLINT(google-explicit-constructor)

  bool ok() const { return content_.index() == 0; }
  explicit operator bool() const { return ok(); }
  /// Ok when there is a value.
  Status status() const { return ok() ? Status() : std::get<1>(content_); }

  /// The value; throws `Error` if there is none.
  T& value() & {
    require();
    return std::get<0>(content_);
  }
  const T& value() const& {
    require();
    return std::get<0>(content_);
  }
  T value() && {  // by value: a reference would dangle in `for (auto& x : call().value())`
    require();
    return std::get<0>(std::move(content_));
  }

  /// The value; undefined if there is none (check `ok()` first).
  T& operator*() & { return *std::get_if<0>(&content_); }
  const T& operator*() const& { return *std::get_if<0>(&content_); }
  T* operator->() { return std::get_if<0>(&content_); }
  const T* operator->() const { return std::get_if<0>(&content_); }

 private:
  void require() const {
    if (!ok()) throw Error(std::get<1>(content_));
  }
  std::variant<T, Status> content_;
};

}  // namespace ferry

#endif  // FERRY_STATUS_HPP
