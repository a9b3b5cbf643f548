#ifndef FERRY_BOOTSTRAP_TCP_ROOT_HPP
#define FERRY_BOOTSTRAP_TCP_ROOT_HPP

/// Rank 0 of a formed group: gathers every rank's message and hands all of them to everybody.

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "bootstrap/channel.hpp"
#include "ferry/bootstrap.hpp"

namespace ferry::bootstrap {

class TcpRoot final : public Bootstrap {
 public:
  /// `channels[i]` leads to rank i + 1.
  explicit TcpRoot(std::vector<Channel> channels);

  int rank() const override { return 0; }
  int num_ranks() const override { return num_ranks_; }
  Result<std::vector<std::vector<std::byte>>> all_gather(std::span<const std::byte> mine,
                                                         std::int64_t timeout_ns) override;

 private:
  struct Peer {
    Channel channel;
    std::size_t rank = 0;
    bool takes_part = false;  // something of this all-gather has come from it
    bool given_up = false;
    std::optional<std::vector<std::byte>> message;
    std::size_t num_parts_queued = 0;
  };

  Status collect(Deadline deadline, std::int64_t timeout_ns);
  Status read_from(Peer* peer);
  Status take(Peer* peer, Frame frame);
  std::vector<bool> arrived() const;
  Status distribute(const std::vector<std::vector<std::byte>>& messages, Deadline deadline, std::int64_t timeout_ns);
  Status feed(Peer* peer, const std::vector<std::vector<std::byte>>& messages);
  /// Makes `verdict` the answer of this and every later call, here and on all ranks.
  Status fail(const Status& verdict, std::int64_t timeout_ns);

  int num_ranks_;
  std::vector<Peer> peers_;  // empty once the group has failed
  std::uint64_t gather_idx_ = 0;
  Status failure_;
};

}  // namespace ferry::bootstrap

#endif  // FERRY_BOOTSTRAP_TCP_ROOT_HPP
