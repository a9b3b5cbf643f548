#ifndef FERRY_NET_UCX_MESSAGE_HPP
#define FERRY_NET_UCX_MESSAGE_HPP

/// What travels as an active message: the header of one, without data.

#include <bit>
#include <cstdint>

#include "net/blob.hpp"

namespace ferry::net::ucx {

enum class MessageKind : std::uint32_t {
  kHello = 1,     ///< nothing but the connection it sets up: so that a peer's death is noticed before the first put
  kNotify = 2,    ///< `value` on `channel`
  kGoodbye = 3,   ///< the sender closes: it will put nothing more, and asks the receiver to stop
  kFarewell = 4,  ///< answers a goodbye: none of the sender's puts is under way any more, and no more will come
};

inline constexpr std::uint32_t kMessageMagic = 0x4d'42'4e'46;  // "FNBM"
inline constexpr unsigned kMessageId = 0;

struct Message {
  std::uint32_t magic = kMessageMagic;
  MessageKind kind = MessageKind::kHello;
  Token
      receiver{};  ///< whose message it is: strangers, and networks whose address came into other hands, do not know it
  std::uint32_t sender = 0;
  std::uint32_t channel = 0;
  std::uint64_t value = 0;
};
static_assert(sizeof(Message) == 40, "peers read it as it lies in memory");
static_assert(std::endian::native == std::endian::little, "so is its order of bytes");

}  // namespace ferry::net::ucx

#endif  // FERRY_NET_UCX_MESSAGE_HPP
