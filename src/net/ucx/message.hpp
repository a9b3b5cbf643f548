#ifndef FERRY_NET_UCX_MESSAGE_HPP
#define FERRY_NET_UCX_MESSAGE_HPP

/// The header of an active message, which carries no other data.

#include <bit>
#include <cstdint>

#include "net/blob.hpp"

namespace ferry::net::ucx {

enum class MessageKind : std::uint32_t {
  kHello = 1,     ///< only sets up the connection, so that a peer's death is detected before the first put
  kNotify = 2,    ///< `value` on `channel`
  kGoodbye = 3,   ///< the sender closes: it will put nothing more, and asks the receiver to stop
  kFarewell = 4,  ///< answers a goodbye: none of the sender's puts is in flight, and no more will follow
};

inline constexpr std::uint32_t kMessageMagic = 0x4d'42'4e'46;  // "FNBM"
inline constexpr unsigned kMessageId = 0;

struct Message {
  std::uint32_t magic = kMessageMagic;
  MessageKind kind = MessageKind::kHello;
  Token receiver{};  ///< the end it is for: only peers that received its address know it
  std::uint32_t sender = 0;
  std::uint32_t channel = 0;
  std::uint64_t value = 0;
};
static_assert(sizeof(Message) == 40, "peers read its bytes as they are in memory");
static_assert(std::endian::native == std::endian::little, "its byte order on the wire");

}  // namespace ferry::net::ucx

#endif  // FERRY_NET_UCX_MESSAGE_HPP
