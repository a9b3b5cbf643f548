#include "ferry/status.hpp"

namespace ferry {

std::string_view to_string(ErrorCode code) {
  switch (code) {
    case ErrorCode::kOk:
      return "kOk";
    case ErrorCode::kInvalidArgument:
      return "kInvalidArgument";
    case ErrorCode::kUnsupported:
      return "kUnsupported";
    case ErrorCode::kCapacity:
      return "kCapacity";
    case ErrorCode::kTimeout:
      return "kTimeout";
    case ErrorCode::kPeerLost:
      return "kPeerLost";
    case ErrorCode::kTransport:
      return "kTransport";
    case ErrorCode::kCuda:
      return "kCuda";
    case ErrorCode::kSystem:
      return "kSystem";
    case ErrorCode::kInternal:
      return "kInternal";
    case ErrorCode::kDataCorrupt:
      return "kDataCorrupt";
  }
  return "unknown";
}

Status::Status(ErrorCode code, std::string message, int peer) {
  if (code != ErrorCode::kOk) detail_ = std::make_shared<const Detail>(Detail{code, peer, std::move(message)});
}

std::string Status::to_string() const {
  std::string text(ferry::to_string(code()));
  if (detail_) text.append(": ").append(detail_->message);
  return text;
}

}  // namespace ferry
