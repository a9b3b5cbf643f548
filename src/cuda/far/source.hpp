#ifndef FERRY_CUDA_FAR_SOURCE_HPP
#define FERRY_CUDA_FAR_SOURCE_HPP

/// Passes what kernels have posted for far ranks (params.hpp) to the driver of the network, and tells them when it has
/// left.

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <vector>

#include "core/agreement.hpp"
#include "cuda/far/params.hpp"
#include "one_sided/driver.hpp"

namespace ferry::cuda {

/// Time for which a grant waits for a message whose header carries it: longer than from the end of a call to the next
/// call of its step, even with a launch by the host between them; no other time was tried. Only a rank with three calls
/// under way waits for such a grant.
inline constexpr std::int64_t kHoldGrantsNs = 50'000;

/// Time for which the driver polls for the blocks of a post. Blocks wait longer for weights of a rank that is late, and
/// those of a kernel that found the group broken never report; the driver then looks as often as it does at rest.
inline constexpr std::int64_t kBlocksPatienceNs = 1'000'000'000;

class FarSource final : public one_sided::RequestSource {
 public:
  struct Options {
    FarLayout layout;
    int rank = 0;
    FarPost* posts = nullptr;  ///< the host's addresses of the words in FarParams
    /// Memory from which words and records leave, num_staging_bytes(): that of the engine.
    std::byte* staging = nullptr;
    std::uint64_t* done = nullptr;     ///< as above
    std::uint64_t* left = nullptr;     ///< as above
    std::uint64_t* granted = nullptr;  ///< as above; what it holds at first the far ranks know
    /// Copies the record of a call of this rank; false if there is none any more.
    std::function<bool(std::int64_t number, CallRecord* record)> copy_record;
    /// The driver polls for this time after the last movement; negative: always.
    std::int64_t poll_ns = 0;
    std::int64_t hold_grants_ns = kHoldGrantsNs;
  };
  explicit FarSource(Options options);
  static std::size_t num_staging_bytes(const FarLayout& layout);
  ~FarSource() override;
  FarSource(const FarSource&) = delete;
  FarSource& operator=(const FarSource&) = delete;

  const one_sided::NetworkRequest* front(const one_sided::CanIssue& can_issue) override;
  void taken() override;
  bool needs_polling() const override;

  struct Traffic {
    std::uint64_t sent_bytes = 0;
    std::uint64_t num_messages = 0;
  };
  /// Messages to a far rank, and their bytes, that were passed on so far. Any thread.
  Traffic traffic(int rank) const;

  /// Kernels may post soon. Any thread.
  void expect_posts();
  /// True if kernels have posted something at which no thread has looked. Any thread.
  bool has_news() const;
  /// True if the network has every message that kernels have posted, or its rank is lost; messages whose blocks have
  /// not all reported do not count. Any thread.
  bool all_left() const;

 private:
  class Departure;
  /// Records and words on their way to one rank. They do not change before they have left, but for grants, of which
  /// later ones may leave.
  struct Staging {
    std::array<FoundRecord, kFarKinds> records;
    std::array<std::uint64_t, kFarMessages> numbers;
    std::array<std::array<std::uint64_t, kFarGrantSlots>, kFarKinds> grants;
  };
  using Grants = std::array<std::array<std::uint64_t, kFarGrantSlots>, kFarKinds>;
  /// A rank and the requests to it, in order.
  struct Peer {
    int rank = 0;
    std::deque<one_sided::NetworkRequest> requests;
    std::array<std::uint64_t, kFarMessages> posted{};
    Grants told{};  ///< latest grants that were sent, by headers or by themselves
    std::array<std::unique_ptr<Departure>, kFarMessages> departures;
    Staging* staging = nullptr;
    std::array<std::array<std::uint64_t, kFarHeaderSets>, kFarKinds> records{};  ///< digests of those in its inbox
  };

  std::uint64_t sum_of_words() const;
  void look();
  std::uint64_t look_at(Peer& peer, int kind);
  int num_done(int kind, std::uint64_t number, int num_blocks, int first = 0) const;
  bool is_whole(int kind, const FarPost& post, std::uint64_t number);
  bool put_record(Peer& peer, int kind, const FarPost& post);
  void put_word(Peer& peer, std::int64_t offset, std::uint64_t* staged, std::uint64_t word);
  void note_carried(Peer& peer, const FarPost& post);
  void send_grants_of(Peer& peer);

  const Options options_;
  std::vector<Peer> peers_;
  std::vector<std::atomic<std::uint64_t>> sent_bytes_;    // by number of the far rank, as is the next
  std::vector<std::atomic<std::uint64_t>> num_messages_;  // puts, and words that are set
  Peer* offered_ = nullptr;
  bool has_taken_ = false;  // since front() had nothing
  Grants granted_{};
  /// Blocks of each kind's latest call that were found done, from the first on.
  struct DoneBlocks {
    std::uint64_t number = 0;
    int count = 0;
    std::int64_t until_ns = 0;  // others are polled for until then; 0: no post waits for others
  };
  std::array<DoneBlocks, kFarKinds> done_{};
  std::int64_t held_until_ns_ = 0;  // grants that no header has carried are sent then; 0: there are none
  std::atomic<std::int64_t> moved_ns_{0};
  std::atomic<std::uint64_t> seen_sum_{0};  // of the words that kernels write, when they were looked at last
};

}  // namespace ferry::cuda

#endif  // FERRY_CUDA_FAR_SOURCE_HPP
