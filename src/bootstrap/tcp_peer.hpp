#ifndef FERRY_BOOTSTRAP_TCP_PEER_HPP
#define FERRY_BOOTSTRAP_TCP_PEER_HPP

/// Ranks 1 … num_ranks - 1 of a formed group: send to rank 0, get everybody's from it.

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "bootstrap/channel.hpp"
#include "ferry/bootstrap.hpp"

namespace ferry::bootstrap {

class TcpPeer final : public Bootstrap {
 public:
  TcpPeer(Channel channel, int rank, int num_ranks)
      : channel_(std::move(channel)), rank_(rank), num_ranks_(num_ranks) {}

  int rank() const override { return rank_; }
  int num_ranks() const override { return num_ranks_; }
  Result<std::vector<std::vector<std::byte>>> all_gather(std::span<const std::byte> mine,
                                                         std::int64_t timeout_ns) override;

 private:
  Status receive_parts(std::vector<std::vector<std::byte>>* parts);
  Status exchange(std::int64_t timeout_ns, std::vector<std::vector<std::byte>>* parts);
  Status fail(Status verdict);

  std::optional<Channel> channel_;  // empty once the group has failed
  int rank_;
  int num_ranks_;
  std::uint64_t gather_idx_ = 0;
  Status failure_;
};

}  // namespace ferry::bootstrap

#endif  // FERRY_BOOTSTRAP_TCP_PEER_HPP
