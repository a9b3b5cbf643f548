#include "cuda/far/source.hpp"

#include <algorithm>
#include <cstring>
#include <utility>

#include "node/futex.hpp"
#include "plan/to_size.hpp"

namespace ferry::cuda {
namespace {

using one_sided::NetworkRequest;
using Word = std::atomic_ref<std::uint64_t>;

std::byte* address_of(std::uint64_t host_address) {
  return reinterpret_cast<std::byte*>(static_cast<std::uintptr_t>(host_address));  // NOLINT(performance-no-int-to-ptr)
}

net::AtomicOp set_to(std::int64_t offset, std::uint64_t value) {
  return {.kind = net::AtomicOp::Kind::kSet, .offset = to_size(offset), .operand = value};
}

/// Offset of the network for one of an inbox.
std::size_t in_network(const FarLayout& layout, std::int64_t offset) {
  return (layout.in_gpu ? net::kGpuOffset : 0) + to_size(offset);
}

bool is_inside(const FarLayout& layout, std::uint64_t offset, std::uint64_t num_bytes) {
  const std::size_t begin = in_network(layout, 0);
  const auto size = static_cast<std::uint64_t>(layout.inbox_bytes);
  return num_bytes == 0 || (offset >= begin && offset - begin <= size && num_bytes <= size - (offset - begin));
}

/// Hash of a record (FNV-1a), by which equal ones are recognised.
std::uint64_t digest_of(const FoundRecord& record) {
  std::uint64_t digest = 0xCBF2'9CE4'8422'2325;
  constexpr std::uint64_t kPrime = 0x100'0000'01B3;
  const auto* const words = reinterpret_cast<const std::uint64_t*>(&record);
  static_assert(sizeof(FoundRecord) % sizeof(std::uint64_t) == 0);
  for (std::size_t i = 0; i < sizeof(FoundRecord) / sizeof(std::uint64_t); ++i) digest = (digest ^ words[i]) * kPrime;
  return digest;
}

}  // namespace

/// Tells kernels that the network has the latest message of a kind, or that its receiver is lost: what kernels then
/// wait for ends by itself.
class FarSource::Departure final : public one_sided::Completion {
 public:
  explicit Departure(std::uint64_t* left) : left_(left) {}

  void begin(std::uint64_t number) { number_ = number; }
  void done(std::uint64_t /*value*/) override { Word(*left_).store(number_, std::memory_order_release); }
  void lost(int /*peer*/) override { Word(*left_).store(number_, std::memory_order_release); }

 private:
  std::uint64_t* left_;
  std::uint64_t number_ = 0;
};

FarSource::FarSource(Options options)
    : options_(std::move(options)),
      sent_bytes_(to_size(options_.layout.num_far())),
      num_messages_(to_size(options_.layout.num_far())) {
  const FarLayout& layout = options_.layout;
  for (int place = 0; place < layout.num_far(); ++place) {
    Peer peer;
    // Ranks of a node begin with far ranks of their own, so that no far rank gets the first message of all.
    peer.rank = layout.far_rank((place + options_.rank - layout.first_near) % layout.num_far());
    for (int kind = 0; kind < kFarMessages; ++kind) {
      peer.departures[to_size(kind)] = std::make_unique<Departure>(options_.left + kind * layout.num_ranks + peer.rank);
    }
    const FoundRecord none{};  // as inboxes are at first
    for (auto& sets : peer.records) sets.fill(digest_of(none));
    peer.staging = reinterpret_cast<Staging*>(options_.staging) + layout.far_idx(peer.rank);
    // Engines connect when something is sent: this changes nothing, whenever it arrives.
    const net::AtomicOp nothing{.kind = net::AtomicOp::Kind::kAdd, .offset = 0};
    peer.requests.push_back({.kind = NetworkRequest::Kind::kAtomic, .peer = peer.rank, .op = nothing, .counts = false});
    peers_.push_back(std::move(peer));
  }
  for (int kind = 0; kind < kFarKinds; ++kind) {
    for (std::size_t slot = 0; slot < kFarGrantSlots; ++slot) {
      granted_[to_size(kind)][slot] = options_.granted[to_size(kind) * kFarGrantSlots + slot];
    }
  }
  for (Peer& peer : peers_) peer.told = granted_;
  expect_posts();
}

FarSource::~FarSource() = default;

std::size_t FarSource::num_staging_bytes(const FarLayout& layout) {
  return to_size(layout.num_far()) * sizeof(Staging);
}

FarSource::Traffic FarSource::traffic(int rank) const {
  const std::size_t idx = to_size(options_.layout.far_idx(rank));
  return {sent_bytes_[idx].load(std::memory_order_relaxed), num_messages_[idx].load(std::memory_order_relaxed)};
}

void FarSource::expect_posts() { moved_ns_.store(node::monotonic_ns(), std::memory_order_seq_cst); }

std::uint64_t FarSource::sum_of_words() const {
  std::uint64_t sum = 0;
  for (int kind = 0; kind < kFarKinds; ++kind) {
    for (int slot = 0; slot < kFarGrantSlots; ++slot) {
      sum += Word(options_.granted[kind * kFarGrantSlots + slot]).load(std::memory_order_relaxed);
    }
  }
  for (int kind = 0; kind < kFarMessages; ++kind) {
    for (int idx = 0; idx < options_.layout.num_far(); ++idx) {
      const int rank = options_.layout.far_rank(idx);
      sum += Word(options_.posts[kind * options_.layout.num_ranks + rank].number).load(std::memory_order_relaxed);
    }
  }
  return sum;
}

bool FarSource::has_news() const { return sum_of_words() != seen_sum_.load(std::memory_order_relaxed); }

bool FarSource::all_left() const {
  const FarLayout& layout = options_.layout;
  for (int kind = 0; kind < kFarMessages; ++kind) {
    for (int idx = 0; idx < layout.num_far(); ++idx) {
      const int at = kind * layout.num_ranks + layout.far_rank(idx);
      const std::uint64_t posted = Word(options_.posts[at].number).load(std::memory_order_acquire);
      if (Word(options_.left[at]).load(std::memory_order_acquire) >= posted) continue;
      // Until it has left, no kernel changes the post. One whose blocks are missing never leaves.
      const int num_blocks = FrontShape::of(options_.posts[at].front_shape).num_blocks;
      if (num_done(kind, posted, num_blocks) == num_blocks) return false;
    }
  }
  return true;
}

bool FarSource::needs_polling() const {
  const std::int64_t now_ns = node::monotonic_ns();
  const auto waits = [now_ns](const DoneBlocks& done) { return now_ns < done.until_ns; };
  return held_until_ns_ != 0 || options_.poll_ns < 0 || std::any_of(done_.begin(), done_.end(), waits) ||
         now_ns - moved_ns_.load(std::memory_order_seq_cst) < options_.poll_ns;
}

const NetworkRequest* FarSource::front(const one_sided::CanIssue& can_issue) {
  for (const bool looks : {true, false}) {
    for (Peer& peer : peers_) {
      if (peer.requests.empty() || !can_issue(peer.rank)) continue;
      offered_ = &peer;
      return &peer.requests.front();
    }
    if (looks) look();
  }
  if (std::exchange(has_taken_, false)) expect_posts();
  return nullptr;
}

void FarSource::taken() {
  offered_->requests.pop_front();
  offered_ = nullptr;
  has_taken_ = true;
}

void FarSource::look() {
  std::uint64_t sum = 0;
  for (int kind = 0; kind < kFarKinds; ++kind) {
    for (std::size_t slot = 0; slot < kFarGrantSlots; ++slot) {
      const std::uint64_t word =
          Word(options_.granted[to_size(kind) * kFarGrantSlots + slot]).load(std::memory_order_acquire);
      sum += word;
      std::uint64_t& granted = granted_[to_size(kind)][slot];
      if (!is_later_grant(word, granted)) continue;
      granted = word;
      if (held_until_ns_ == 0) held_until_ns_ = node::monotonic_ns() + options_.hold_grants_ns;
    }
  }
  // Far ranks wait for weights before they send anything else.
  for (const int kind : {kFarWeights, 1, 0}) {
    for (Peer& peer : peers_) sum += look_at(peer, kind);
  }
  seen_sum_.store(sum, std::memory_order_relaxed);
  if (held_until_ns_ == 0 || node::monotonic_ns() < held_until_ns_) return;
  held_until_ns_ = 0;
  for (Peer& peer : peers_) send_grants_of(peer);
}

/// Notes the grants that a message carries. The first ones of an era go by themselves nevertheless, so that no word of
/// a slot survives until half of its number returns.
void FarSource::note_carried(Peer& peer, const FarPost& post) {
  for (int kind = 0; kind < kFarKinds; ++kind) {
    for (std::size_t slot = 0; slot < kFarGrantSlots; ++slot) {
      std::uint64_t& told = peer.told[to_size(kind)][slot];
      const std::uint64_t word = post.granted[kind][slot];
      if (is_later_grant(word, told) && (word >> 32) % kFarEra >= kFarGrantSlots) told = word;
    }
  }
}

/// Sends the grants that no message to this rank has carried.
void FarSource::send_grants_of(Peer& peer) {
  for (int kind = 0; kind < kFarKinds; ++kind) {
    for (std::size_t slot = 0; slot < kFarGrantSlots; ++slot) {
      std::uint64_t& told = peer.told[to_size(kind)][slot];
      const std::uint64_t word = granted_[to_size(kind)][slot];
      if (!is_later_grant(word, told)) continue;
      told = word;
      put_word(peer, options_.layout.grant_at(kind, options_.rank, slot), &peer.staging->grants[to_size(kind)][slot],
               word);
    }
  }
}

/// Sets a word of the peer's inbox behind all that was put before. `staged`: memory that it may leave from.
void FarSource::put_word(Peer& peer, std::int64_t offset, std::uint64_t* staged, std::uint64_t word) {
  if (!options_.layout.in_gpu) {
    peer.requests.push_back(
        {.kind = NetworkRequest::Kind::kAtomic, .peer = peer.rank, .op = set_to(offset, word), .counts = false});
    return;
  }
  *staged = word;
  peer.requests.push_back({.kind = NetworkRequest::Kind::kOrder, .peer = peer.rank});
  peer.requests.push_back({.kind = NetworkRequest::Kind::kPut,
                           .peer = peer.rank,
                           .offset = in_network(options_.layout, offset),
                           .local = reinterpret_cast<std::byte*>(staged),
                           .num_bytes = sizeof word});
  peer.requests.push_back({.kind = NetworkRequest::Kind::kShow, .peer = peer.rank});
}

/// Puts the record of a message's call where the peer looks for it, unless it is there. Returns whether it did.
bool FarSource::put_record(Peer& peer, int kind, const FarPost& post) {
  const FarLayout& layout = options_.layout;
  const int own_idx = layout.far_idx_at(peer.rank, options_.rank);
  const int set = FrontShape::of(post.front_shape).set;
  if (set >= kFarHeaderSets) return false;
  FoundRecord& record = peer.staging->records[to_size(kind)];
  record.present = options_.copy_record(post.record_number, &record.record) ? 1 : 0;
  if (record.present == 0) record.record = {};
  const std::uint64_t digest = digest_of(record);
  if (std::exchange(peer.records[to_size(kind)][to_size(set)], digest) == digest) return false;
  peer.requests.push_back({.kind = NetworkRequest::Kind::kPut,
                           .peer = peer.rank,
                           .offset = in_network(layout, layout.record_at(kind, set, own_idx)),
                           .local = reinterpret_cast<std::byte*>(&record),
                           .num_bytes = sizeof record});
  return true;
}

/// Blocks of those that a post of call `number` counts which have stored what they send, from block `first` on up to
/// the first that has not.
int FarSource::num_done(int kind, std::uint64_t number, int num_blocks, int first) const {
  std::uint64_t* const words = options_.done + kind * kMaxCallBlocks;
  int count = first;
  while (count < std::min(num_blocks, kMaxCallBlocks) && Word(words[count]).load(std::memory_order_acquire) >= number) {
    ++count;
  }
  return count;
}

/// Whether all blocks that a post counts have stored what they send.
bool FarSource::is_whole(int kind, const FarPost& post, std::uint64_t number) {
  const int num_blocks = FrontShape::of(post.front_shape).num_blocks;
  if (num_blocks == 0) return true;
  DoneBlocks& done = done_[to_size(kind)];
  if (done.number != number) done = {number, 0, node::monotonic_ns() + kBlocksPatienceNs};
  done.count = num_done(kind, number, num_blocks, done.count);
  if (done.count < num_blocks) return false;
  done.until_ns = 0;
  return true;
}

/// Returns the number of the last post that needs no further look. A post whose blocks are missing needs one as long as
/// they are polled for.
std::uint64_t FarSource::look_at(Peer& peer, int kind) {
  const FarLayout& layout = options_.layout;
  FarPost& post = options_.posts[kind * layout.num_ranks + peer.rank];
  const std::uint64_t number = Word(post.number).load(std::memory_order_acquire);
  if (peer.posted[to_size(kind)] == number) return number;
  if (!is_whole(kind, post, number)) {
    return node::monotonic_ns() < done_[to_size(kind)].until_ns ? peer.posted[to_size(kind)] : number;
  }
  peer.posted[to_size(kind)] = number;
  const FrontShape shape = FrontShape::of(post.front_shape);
  const std::uint64_t front_bytes = to_size(shape.bytes);
  if (!is_inside(layout, post.front_to, front_bytes) || !is_inside(layout, post.rows_to, post.rows_bytes)) {
    return number;
  }
  if (kind != kFarWeights) {
    // A record is there when its message is.
    if (put_record(peer, kind, post) && layout.in_gpu) {
      peer.requests.push_back({.kind = NetworkRequest::Kind::kOrder, .peer = peer.rank});
    }
    note_carried(peer, post);
  }
  const auto put = [&peer](NetworkRequest::Kind how, std::uint64_t from, std::uint64_t to, std::uint64_t num_bytes) {
    peer.requests.push_back({.kind = how,
                             .peer = peer.rank,
                             .offset = to_size(static_cast<std::int64_t>(to)),
                             .local = address_of(from),
                             .num_bytes = num_bytes});
  };
  const bool has_rows = post.rows_bytes > 0;
  if (has_rows) put(NetworkRequest::Kind::kPut, post.rows, post.rows_to, post.rows_bytes);
  const std::int64_t arrived = layout.arrived_at(kind, options_.rank);
  if (layout.in_gpu) {
    put(NetworkRequest::Kind::kPut, post.front, post.front_to, front_bytes);
    if (shape.announced) {
      put_word(peer, arrived, &peer.staging->numbers[to_size(kind)], number);
    } else {
      peer.requests.push_back({.kind = NetworkRequest::Kind::kShow, .peer = peer.rank});
    }
  } else {
    put(NetworkRequest::Kind::kPutSignal, post.front, post.front_to, front_bytes);
    peer.requests.back().op = set_to(arrived, number);
  }
  const std::size_t idx = to_size(layout.far_idx(peer.rank));
  sent_bytes_[idx].fetch_add(front_bytes + post.rows_bytes, std::memory_order_relaxed);
  num_messages_[idx].fetch_add(1U + (has_rows ? 1U : 0U) + (shape.announced ? 1U : 0U), std::memory_order_relaxed);
  Departure& departure = *peer.departures[to_size(kind)];
  departure.begin(number);
  peer.requests.push_back({.kind = NetworkRequest::Kind::kRelease, .peer = peer.rank, .completion = &departure});
  return number;
}

}  // namespace ferry::cuda
