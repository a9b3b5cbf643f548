#include "c/structs.hpp"

#include <fmt/format.h>

namespace ferry::c {

Status check_struct_size(const char* call, const StructVersion& version, std::uint64_t given_bytes) {
  if (given_bytes >= version.first_bytes && given_bytes <= kMaxStructBytes) return {};
  return Status(ErrorCode::kInvalidArgument,
                fmt::format("{}: struct_size of the {} is {}, expected {} to {}; set it to sizeof({})", call,
                            version.name, given_bytes, version.first_bytes, kMaxStructBytes, version.name));
}

Status check_unknown(const char* call, const StructVersion& version, std::span<const std::byte> unknown) {
  if (std::ranges::all_of(unknown, [](std::byte byte) { return byte == std::byte{0}; })) return {};
  return Status(ErrorCode::kUnsupported,
                fmt::format("{}: the {} sets a member that this library (ABI version {}) does not know; leave it zero, "
                            "or use a libferry that is as new as the header",
                            call, version.name, ferry_abi_version()));
}

}  // namespace ferry::c
