#include "c/status.hpp"

#include <exception>
#include <new>
#include <stdexcept>
#include <string>

namespace ferry::c {
namespace {

static_assert(FERRY_OK == static_cast<int>(ErrorCode::kOk));
static_assert(FERRY_ERROR_INVALID_ARGUMENT == static_cast<int>(ErrorCode::kInvalidArgument));
static_assert(FERRY_ERROR_UNSUPPORTED == static_cast<int>(ErrorCode::kUnsupported));
static_assert(FERRY_ERROR_CAPACITY == static_cast<int>(ErrorCode::kCapacity));
static_assert(FERRY_ERROR_TIMEOUT == static_cast<int>(ErrorCode::kTimeout));
static_assert(FERRY_ERROR_PEER_LOST == static_cast<int>(ErrorCode::kPeerLost));
static_assert(FERRY_ERROR_TRANSPORT == static_cast<int>(ErrorCode::kTransport));
static_assert(FERRY_ERROR_CUDA == static_cast<int>(ErrorCode::kCuda));
static_assert(FERRY_ERROR_SYSTEM == static_cast<int>(ErrorCode::kSystem));
static_assert(FERRY_ERROR_INTERNAL == static_cast<int>(ErrorCode::kInternal));
static_assert(FERRY_ERROR_DATA_CORRUPT == static_cast<int>(ErrorCode::kDataCorrupt));

/// Stands for every failure that cannot be described for lack of memory. Never written and never freed.
ferry_status* no_memory() noexcept {
  static ferry_status status;
  return &status;
}

/// Describes the exception that is being handled, by throwing it again.
Status describe_exception() {
  try {
    throw;
  } catch (const Error& error) {
    return error.status();
  } catch (const std::bad_alloc&) {
    return Status(ErrorCode::kSystem, "out of memory");
  } catch (const std::length_error&) {
    return Status(ErrorCode::kInvalidArgument, "a shape or a number is larger than any memory");
  } catch (const std::exception& error) {
    return Status(ErrorCode::kInternal, std::string("an exception reached the C interface: ") + error.what());
  } catch (...) {
    return Status(ErrorCode::kInternal, "an exception of an unknown type reached the C interface");
  }
}

}  // namespace

ferry_status* to_handle(Status status) noexcept {
  if (status.ok()) return nullptr;
  auto* handle = new (std::nothrow) ferry_status{std::move(status)};
  return handle != nullptr ? handle : no_memory();
}

ferry_status* handle_of_exception() noexcept {
  try {
    return to_handle(describe_exception());
  } catch (...) {
    return no_memory();
  }
}

Status invalid(const char* call, const char* what) {
  return Status(ErrorCode::kInvalidArgument, std::string(call) + ": " + what);
}

}  // namespace ferry::c

using ferry::c::no_memory;

int32_t ferry_status_code(const ferry_status* status) {
  if (status == nullptr) return FERRY_OK;
  return status == no_memory() ? FERRY_ERROR_SYSTEM : static_cast<int32_t>(status->value.code());
}

int32_t ferry_status_peer(const ferry_status* status) { return status == nullptr ? -1 : status->value.peer(); }

const char* ferry_status_message(const ferry_status* status) {
  if (status == nullptr) return "";
  if (status == no_memory()) return "out of memory";
  return status->value.message().data();  // a std::string's, so it ends with a zero
}

void ferry_status_free(ferry_status* status) {
  if (status != no_memory()) delete status;
}

const char* ferry_code_name(int32_t code) {
  return ferry::to_string(static_cast<ferry::ErrorCode>(code)).data();  // a literal, so it ends with a zero
}
