#ifndef FERRY_CUDA_FAR_PARAMS_HPP
#define FERRY_CUDA_FAR_PARAMS_HPP

/// Memory through which latency mode reaches the ranks of other nodes (*far* ranks) without a forwarder: what kernels,
/// the thread that drives the network, and far ranks write in it.
///
/// A rank has an *inbox* that far ranks put into, with the same layout on every rank, and an *outbox* from which its
/// own messages leave. Both are pinned memory of the host, which any network serves, or GPU memory, where cards reach
/// it (GroupOptions::ring_memory). A call of either kind is one message to each far rank: its *front* (a header, and
/// for a dispatch counts and records of tokens) and rows. Calls are numbered as in latency/window.hpp, and received in
/// the same sets. Weights of a combine that far ranks need for their sums go ahead of its message, in a message of
/// their own with the same number.
///
///   word                   at        writer            reader             order, and what it publishes
///   posts[k][r].number     sender    its kernels       its driver         st.release.sys / acquire: the post, and
///                                                                         what its block stored in the outbox
///   done[k][b]             sender    block b + 1 of    its driver         st.release.sys / acquire: what the block
///                                    its send half                        stored of that call's messages
///   left[k][r]             sender    its driver        its kernels        release / ld.acquire.sys: the network has
///                                                                         that message, its outbox may be filled
///   words of a message     receiver  network, for s    its kernels        any / ld.relaxed.sys.b128: themselves
///   arrived[k][s]          receiver  network, for s    its kernels        after the puts before it / ld.acquire.sys:
///                                                                         all of s's message of that number is there
///   granted[k][n % 4]      receiver  its kernels       its driver         st.relaxed.sys / acquire: the receiver has
///                                                                         read what the set held
///   grants[k][r][n % 4]    sender    network, for r    its kernels        relaxed / ld.relaxed.sys: itself; the same
///                                                                         word as r's grants for ranks of its node
///   heard[k][r][n % 4]     sender    its kernels       its kernels        atom.cas.gpu / ld.relaxed.sys: the same
///   seen_left[k][r]        sender    its kernels       its kernels        red.max.gpu / ld.relaxed.sys, or acquire:
///                                                                         the same as left
///
/// A message is put once all blocks have reported that its post counts (FrontShape): the processor gathers their words
/// sooner than the last block could be found by atomics and post.
///
/// `posts`, `done`, `left` and `granted` are in pinned memory. In host memory the receiver's engine writes `arrived`
/// and `grants`; in GPU memory the sender's card does, `arrived` by puts that stay behind the puts of the message
/// (net::Engine::order_puts).
///
/// Fronts and weights are words of 16 bytes (kFarWordBytes), each with its call's number. In GPU memory the rows of a
/// few tokens are words too (kFarWordTokens): a kernel that has loaded a word of the call has its data, so such a
/// message needs no order of the card's writes, no `arrived`, and none of the trips to a card that these take. What is
/// needed is that a card writes 16 aligned bytes at once, as it does when it writes whole packets
/// (docs/network-cards.md). Words of a refused call may come after its set has been granted again; a call that then
/// misses a word ends with a timeout. Other rows are behind `arrived`, in places of their own: bytes of a row must not
/// pass for a word. In host memory every message waits for `arrived`, since the processor may copy in smaller pieces.
///
/// Every header carries the sender's grants (kFarGrantWords), and the kernel that imports it keeps them in `heard`,
/// and `left` in `seen_left`. So as a rule a call finds in memory of the GPU that it may send. If it does not, its
/// first block polls the words of the network, and passes on what they say: `left`, and `grants` or the headers that
/// have arrived, imported or not. The driver sends a grant by itself, as a word in `grants`, only if no header has
/// carried it for a while (FarSource).
///
/// The next message of a kind to a rank is posted only when the one before has left, and the network keeps the order of
/// messages to a rank, so `arrived` never goes back, and one outbox is enough. A message is put into the receiver's set
/// of that call, so the grant of a set is also room in the inbox: the receiver grants a set again behind all that has
/// read it.
///
/// Each set of an inbox also holds, for the words of an error, the record of its source's call. The driver puts a
/// record ahead of the message, if it differs from the one that it has put there last.

#include <cstddef>
#include <cstdint>

#include "cuda/sync/control.hpp"
#include "cuda/sync/rail_params.hpp"
#include "plan/carver.hpp"
#include "plan/host_device.hpp"

namespace ferry::cuda {

inline constexpr int kFarKinds = 2;
/// Kinds of messages: those of calls, and the weights of a combine.
inline constexpr int kFarMessages = kFarKinds + 1;
inline constexpr int kFarWeights = kFarKinds;
/// Sets of each kind, and one more for headers to a rank that has no set for the call.
inline constexpr int kFarSets = 3;
inline constexpr int kFarHeaderSets = kFarSets + 1;
inline constexpr int kFarGrantSlots = 4;
/// Calls of an era, a quarter of the numbers that a word's half can have (latency/turns.cuh).
inline constexpr std::uint64_t kFarEra = std::uint64_t{1} << 30;

/// Whether a grant is of a later call than another of its slot. Words carry half of a number, which may have begun
/// again from 0 (latency/window.hpp).
FERRY_HOST_DEVICE constexpr bool is_later_grant(std::uint64_t word, std::uint64_t other) {
  return static_cast<std::int32_t>(static_cast<std::uint32_t>(word >> 32) - static_cast<std::uint32_t>(other >> 32)) >
         0;
}

/// Bytes from one word that blocks poll to the next. On an H200, 16 blocks that read one line of pinned memory have it
/// after 13 us each, 16 that read lines of their own after 1.2.
inline constexpr std::int64_t kFarWordStride = 128;

/// A word of a message: three payloads of 4 bytes, then half of its call's number.
inline constexpr std::int64_t kFarWordBytes = 16;
inline constexpr int kFarWordPayloads = 3;
/// Words that hold this many payloads.
FERRY_HOST_DEVICE constexpr std::int64_t num_far_words(std::int64_t num_payloads) {
  return (num_payloads + kFarWordPayloads - 1) / kFarWordPayloads;
}

/// Part of the header of a dispatch, behind LatencyHeader, one payload each.
struct FarFields {
  std::int32_t num_rows;      ///< rows of this message
  std::int32_t num_returns;   ///< rows that the combines of this Routing return to the sender
  std::int32_t first_return;  ///< place of the first of these in each set of the sender's returns
  std::int32_t first_sum;     ///< the same where they return a sum for each row of this message
};
inline constexpr int kNumFarFields = sizeof(FarFields) / sizeof(std::uint32_t);
/// Header of every message. Its payloads are LatencyHeader and then FarFields; from kFarGrantWords on the lower 8 bytes
/// of each word are a grant of the sender, [kinds][kFarGrantSlots].
inline constexpr int kFarHeaderWords = 16;
inline constexpr int kFarGrantWords = kFarHeaderWords - kFarKinds * kFarGrantSlots;
inline constexpr std::int64_t kFarHeaderBytes = kFarHeaderWords * kFarWordBytes;
/// Room for a record of a call (FoundRecord): whole lines.
inline constexpr std::int64_t kFarRecordBytes = (std::int64_t{sizeof(FoundRecord)} + 127) / 128 * 128;

/// A message that kernels have finished. Addresses are the network's, in the outbox or in other memory that rows leave
/// from; `_to` are offsets of the network in the receiver's memory.
struct alignas(128) FarPost {
  std::uint64_t number;  ///< number of the call; written last
  std::int64_t record_number;
  std::uint64_t front;
  std::uint64_t front_to;
  std::uint64_t front_shape;  ///< FrontShape
  std::uint64_t rows;         ///< rows that do not follow the front
  std::uint64_t rows_to;
  std::uint64_t rows_bytes;
  std::uint64_t granted[kFarKinds][kFarGrantSlots];  ///< as in the header
};
static_assert(sizeof(FarPost) == 128);

/// The front of a post: how it is put. One word, since kernels write it to memory of the host.
struct FrontShape {
  std::int64_t bytes = 0;
  int set = 0;             ///< in which its receiver receives the message
  bool announced = false;  ///< the receiver waits for `arrived`: not all of the message is words
  int num_blocks = 0;      ///< words of `done` that the driver waits for, from the first on

  FERRY_HOST_DEVICE constexpr std::uint64_t packed() const {
    return static_cast<std::uint64_t>(num_blocks) << kBytesBits << 8 | static_cast<std::uint64_t>(bytes) << 8 |
           static_cast<std::uint64_t>(set) << 1 | (announced ? 1 : 0);
  }
  static constexpr FrontShape of(std::uint64_t packed) {
    return {static_cast<std::int64_t>(packed >> 8 & ((std::uint64_t{1} << kBytesBits) - 1)),
            static_cast<int>(packed >> 1 & 0x7F), (packed & 1) != 0, static_cast<int>(packed >> kBytesBits >> 8)};
  }

 private:
  static constexpr int kBytesBits = 40;
};

/// Counts by which the blocks of a dispatch find places, [R], kMaxRanks.
struct FarPlaces {
  std::uint32_t rows[128];     ///< rows that have a place in the message to each rank
  std::uint32_t returns[128];  ///< rows that each rank returns which have a place
};

/// Words of kernels in memory of the GPU, initially zero.
struct FarState {
  FarPlaces places[2];                                  ///< by the call's number modulo 2
  std::uint32_t kept[128];                              ///< [R]: 1 if FarParams::found holds a record of that rank
  std::uint64_t published[kFarKinds * kFarGrantSlots];  ///< what FarParams::granted holds, or held before
  std::uint64_t weighed[128];  ///< [R] number of the last combine whose weights were posted to that rank
  std::uint64_t cleared[kFarKinds][kFarSets];           ///< era in which the words of a set were cleared
  std::uint64_t seen_left[kFarMessages][128];           ///< [R] FarParams::left, as kernels have seen it
  std::uint64_t heard[kFarKinds][128][kFarGrantSlots];  ///< [R] latest grants of that rank that kernels have seen
};

/// Layout of inbox and outbox, the same on every rank. Trivial, so that kernels take it by value.
struct FarLayout {
  int num_ranks = 0;
  int ranks_per_node = 1;
  int first_near = 0;  ///< first rank of this node
  bool in_gpu = false;
  // Room for the parts of a dispatch's message.
  std::int64_t front_bytes = 0;
  std::int64_t row_words_bytes = 0;  ///< rows that are words, behind the front; 0: none are
  std::int64_t message_bytes = 0;    ///< other rows at its end, and all of it
  // Room for those of a combine.
  std::int64_t sum_words_bytes = 0;     ///< sums that are words behind each header, in calls of few tokens
  std::int64_t return_words_bytes = 0;  ///< other rows that are words, of all far ranks together
  std::int64_t returns_bytes = 0;       ///< other rows
  std::int64_t weights_bytes = 0;
  std::int64_t arrived = 0;   ///< [messages][R][kFarWordStride]
  std::int64_t grants = 0;    ///< [kinds][R][kFarGrantSlots]
  std::int64_t records = 0;   ///< [kinds][kFarHeaderSets][far ranks][kFarRecordBytes]
  std::int64_t headers = 0;   ///< [kinds][far ranks][kFarHeaderBytes] calls without a set
  std::int64_t messages = 0;  ///< [kFarSets][far ranks][message_bytes] dispatch
  std::int64_t sums = 0;      ///< [kFarSets][far ranks][kFarHeaderBytes + sum_words_bytes] combine
  std::int64_t returns = 0;   ///< [kFarSets][return_words_bytes + returns_bytes] combine
  std::int64_t weights = 0;   ///< [kFarSets][far ranks][weights_bytes]
  std::int64_t inbox_bytes = 0;
  /// Outbox: [far ranks][message_bytes] dispatch; [far ranks][kFarHeaderBytes + sum_words_bytes] combine; then
  /// [weights_bytes] for all.
  std::int64_t outbox_bytes = 0;

  struct Shape {
    int num_ranks = 0;
    int ranks_per_node = 1;
    int rank = 0;
    std::int64_t front_bytes = 0;  ///< of a dispatch without the header, all rounded to 128
    std::int64_t row_words_bytes = 0;
    std::int64_t rows_bytes = 0;
    std::int64_t sum_words_bytes = 0;
    std::int64_t return_words_bytes = 0;
    std::int64_t returns_bytes = 0;
    std::int64_t weights_bytes = 0;
    bool in_gpu = false;
  };
  static constexpr FarLayout of(const Shape& shape) {
    FarLayout layout;
    layout.num_ranks = shape.num_ranks;
    layout.ranks_per_node = shape.ranks_per_node;
    layout.first_near = shape.rank / shape.ranks_per_node * shape.ranks_per_node;
    layout.in_gpu = shape.in_gpu;
    layout.front_bytes = kFarHeaderBytes + shape.front_bytes;
    layout.row_words_bytes = shape.in_gpu ? shape.row_words_bytes : 0;
    layout.message_bytes = layout.front_bytes + layout.row_words_bytes + shape.rows_bytes;
    layout.sum_words_bytes = shape.in_gpu ? shape.sum_words_bytes : 0;
    layout.return_words_bytes = shape.in_gpu ? shape.return_words_bytes : 0;
    layout.returns_bytes = shape.returns_bytes;
    layout.weights_bytes = shape.weights_bytes;
    const auto num_ranks = static_cast<std::int64_t>(shape.num_ranks);
    const auto num_far = static_cast<std::int64_t>(layout.num_far());
    plan::Carver carver(nullptr);
    const auto take = [&carver](std::int64_t bytes) {
      const auto at = static_cast<std::int64_t>(carver.used_bytes());
      carver.take<std::byte>(static_cast<std::size_t>(bytes));
      return at;
    };
    layout.arrived = take(kFarMessages * num_ranks * kFarWordStride);
    layout.grants = take(kFarKinds * num_ranks * kFarGrantSlots * 8);
    layout.records = take(kFarKinds * kFarHeaderSets * num_far * kFarRecordBytes);
    layout.headers = take(kFarKinds * num_far * kFarHeaderBytes);
    layout.messages = take(kFarSets * num_far * layout.message_bytes);
    layout.sums = take(kFarSets * num_far * layout.sum_message_bytes());
    layout.returns = take(kFarSets * (layout.return_words_bytes + layout.returns_bytes));
    layout.weights = take(kFarSets * num_far * layout.weights_bytes);
    layout.inbox_bytes = static_cast<std::int64_t>(carver.used_bytes());
    layout.outbox_bytes = num_far * (layout.message_bytes + layout.sum_message_bytes()) + layout.weights_bytes;
    return layout;
  }

  FERRY_HOST_DEVICE constexpr int num_far() const { return num_ranks - ranks_per_node; }
  FERRY_HOST_DEVICE constexpr bool is_far(int rank) const {
    return rank < first_near || rank >= first_near + ranks_per_node;
  }
  /// Far rank number `idx`, and its number.
  FERRY_HOST_DEVICE constexpr int far_rank(int idx) const { return idx < first_near ? idx : idx + ranks_per_node; }
  FERRY_HOST_DEVICE constexpr int far_idx(int rank) const { return rank < first_near ? rank : rank - ranks_per_node; }
  /// The same number as `rank` in another node has for `source`.
  FERRY_HOST_DEVICE constexpr int far_idx_at(int rank, int source) const {
    const int first = rank / ranks_per_node * ranks_per_node;
    return source < first ? source : source - ranks_per_node;
  }

  FERRY_HOST_DEVICE constexpr std::int64_t arrived_at(int message, int source) const {
    return arrived + (std::int64_t{message} * num_ranks + source) * kFarWordStride;
  }
  FERRY_HOST_DEVICE constexpr std::int64_t grant_at(int kind, int receiver, std::uint64_t number) const {
    const std::int64_t idx = (std::int64_t{kind} * num_ranks + receiver) * kFarGrantSlots;
    return grants + (idx + static_cast<std::int64_t>(number % kFarGrantSlots)) * 8;
  }
  // `far_idx`: number of the source at the receiver.
  FERRY_HOST_DEVICE constexpr std::int64_t record_at(int kind, int set, int far_idx) const {
    const std::int64_t of_set = (std::int64_t{kind} * kFarHeaderSets + set) * num_far();
    return records + (of_set + far_idx) * kFarRecordBytes;
  }
  FERRY_HOST_DEVICE constexpr std::int64_t sum_message_bytes() const { return sum_words_bytes + kFarHeaderBytes; }
  /// Header of a message. Other words of a dispatch lie before it, its rows that are no words and the sums of a combine
  /// of few tokens behind it.
  FERRY_HOST_DEVICE constexpr std::int64_t header_at(int kind, int set, int far_idx) const {
    if (set < kFarSets) {
      const std::int64_t idx = std::int64_t{set} * num_far() + far_idx;
      return kind == 0 ? messages + idx * message_bytes + words_before_header() : sums + idx * sum_message_bytes();
    }
    return headers + (std::int64_t{kind} * num_far() + far_idx) * kFarHeaderBytes;
  }
  /// Room before a dispatch's header.
  FERRY_HOST_DEVICE constexpr std::int64_t words_before_header() const {
    return front_bytes - kFarHeaderBytes + row_words_bytes;
  }
  FERRY_HOST_DEVICE constexpr std::int64_t return_words_at(int set) const {
    return returns + set * (return_words_bytes + returns_bytes);
  }
  FERRY_HOST_DEVICE constexpr std::int64_t returns_at(int set) const {
    return return_words_at(set) + return_words_bytes;
  }
  FERRY_HOST_DEVICE constexpr std::int64_t weights_at(int set, int far_idx) const {
    return weights + (std::int64_t{set} * num_far() + far_idx) * weights_bytes;
  }
};

/// A part of a message: its front, or rows that do not follow it.
struct FarPart {
  std::uint64_t from = 0;  ///< address for the network
  std::int64_t to = 0;     ///< offset of the network in the receiver's memory
  std::int64_t bytes = 0;
};

/// Parameters of kernels.
struct FarParams {
  FarLayout layout;
  std::byte* inbox = nullptr;
  std::byte* outbox = nullptr;
  std::uint64_t outbox_of_network = 0;  ///< its address for the network
  std::int64_t inbox_of_network = 0;    ///< the network's offset of an inbox
  FarPost* posts = nullptr;             ///< [messages][R]
  const std::uint64_t* left = nullptr;  ///< [messages][R]
  std::uint64_t* done = nullptr;        ///< [kinds][kMaxCallBlocks]
  std::uint64_t* granted = nullptr;     ///< [kinds][kFarGrantSlots]
  FarState* state = nullptr;
  FoundRecord* found = nullptr;  ///< [ranks of the node, nodes] records of refused calls (rail_params.hpp)
  int rank = 0;

  FERRY_HOST_DEVICE constexpr bool present() const { return layout.num_ranks > 0; }
  /// Index in `found` of a far rank.
  FERRY_HOST_DEVICE constexpr int found_idx(int source) const {
    const int node = source / layout.ranks_per_node;
    return (source - node * layout.ranks_per_node) * (layout.num_ranks / layout.ranks_per_node) + node;
  }
  /// Header of a message in the outbox.
  FERRY_HOST_DEVICE constexpr std::int64_t header_out(int kind, int far_idx) const {
    if (kind == 0) return std::int64_t{far_idx} * layout.message_bytes + layout.words_before_header();
    return layout.num_far() * layout.message_bytes + far_idx * layout.sum_message_bytes();
  }
  FERRY_HOST_DEVICE constexpr std::int64_t weights_out() const {
    return layout.num_far() * (layout.message_bytes + layout.sum_message_bytes());
  }
  /// Part at an offset of the outbox, which goes to one of the receiver's inbox.
  FERRY_HOST_DEVICE constexpr FarPart part(std::int64_t from, std::int64_t to, std::int64_t bytes) const {
    return {outbox_of_network + static_cast<std::uint64_t>(from), inbox_of_network + to, bytes};
  }
};

}  // namespace ferry::cuda

#endif  // FERRY_CUDA_FAR_PARAMS_HPP
