#ifndef FERRY_MEMBERSHIP_ENDPOINT_HPP
#define FERRY_MEMBERSHIP_ENDPOINT_HPP

/// Where a member answers others: a listening socket and the connections that it has accepted. Nothing here waits.

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "bootstrap/tcp_acceptor.hpp"
#include "membership/messages.hpp"

namespace ferry::membership {

/// hello.rank of a process that is no member yet.
inline constexpr std::uint32_t kNoMember = UINT32_MAX;

class Endpoint {
 public:
  /// Names a connection.
  using Key = std::uint64_t;
  /// A letter of a connection, or its end.
  struct Arrival {
    Key key = 0;
    std::uint32_t from = kNoMember;  ///< id that the other end has presented
    std::optional<Letter> letter{};
  };

  /// Listens on a free port of `host`. `num_members`: that it must be able to answer at the same time.
  /// @errors kInvalidArgument, kSystem
  static Result<std::unique_ptr<Endpoint>> open(const std::string& host, const std::string& secret, int num_members);

  std::uint16_t port() const { return port_; }

  void add_poll_entries(std::vector<pollfd>* entries) const;
  bootstrap::Deadline next_deadline(bootstrap::Deadline latest) const { return acceptor_.next_deadline(latest); }
  /// `entries` are those of add_poll_entries after the poll.
  /// @errors kSystem: it cannot accept connections any more
  Status serve(std::span<const pollfd> entries, std::vector<Arrival>* arrivals);
  /// Polls and serves without waiting.
  Status serve_now(std::vector<Arrival>* arrivals);

  /// Without effect on a connection that has ended.
  void send(Key key, const View& view, const Content& content);
  void close(Key key);
  /// Ends a connection when all has been sent and the other end has closed it, or some time later.
  void dismiss(Key key);

 private:
  struct Connection {
    Key key = 0;
    std::uint32_t from = kNoMember;
    bootstrap::Channel channel;
    std::optional<bootstrap::Deadline> dismissed{};
  };

  Endpoint(UniqueFd listener, std::uint16_t port, const std::string& secret, int num_members);
  void welcome(bootstrap::AuthenticatedPeer peer);
  /// Reads from a connection. False: it has ended.
  static bool read(Connection& connection, std::vector<Arrival>* arrivals);

  bootstrap::TcpAcceptor acceptor_;
  std::uint16_t port_;
  std::vector<Connection> connections_;
  Key next_key_ = 1;
};

/// Listening socket on a free port of `host`, and that port.
struct Listener {
  UniqueFd fd{};
  std::uint16_t port = 0;
};
/// @errors kInvalidArgument, kSystem
Result<Listener> listen_anywhere(const std::string& host);

}  // namespace ferry::membership

#endif  // FERRY_MEMBERSHIP_ENDPOINT_HPP
