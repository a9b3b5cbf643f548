#include "emulator/node_ranks.hpp"

#include <algorithm>
#include <cstring>

namespace ferry::emulator {
namespace {

std::size_t to_size(int value) { return static_cast<std::size_t>(value); }

/// The two kinds of rings: for items, and for call headers, with room for a header in each of two chunks.
constexpr std::size_t kItems = 0;
constexpr std::size_t kCalls = 1;
constexpr std::size_t kCallChunks = 2;
constexpr std::size_t kCallChunkBytes = 2048;

}  // namespace

NodeRanks::NodeRanks(const Options& options) : options_(options), machine_(options.seed), random_(options.seed) {
  const std::size_t num_peers = to_size(options.num_nodes) - 1;
  for (int rank = 0; rank < num_ranks(); ++rank) {
    streams_.push_back(machine_.add_stream());
    auto& one = *ranks_.emplace_back(std::make_unique<Rank>());
    one.arena = DeviceMemory(options.arena_bytes);
    const std::size_t control_bytes = cuda::Control::at(nullptr, to_size(options.ranks_per_node)).size_bytes;
    std::fill_n(one.arena.data(), control_bytes, std::byte{0});
    one.used_bytes = control_bytes;
    one.state = std::make_unique<cuda::RailState>();
    one.log = reinterpret_cast<cuda::RailLog*>(allocate(rank, sizeof(cuda::RailLog)));
    *one.log = {};
    one.found.resize(to_size(num_ranks()));
    for (std::size_t which = 0; which < one.rings.size(); ++which) {
      Rings& rings = one.rings[which];
      const std::size_t ring_bytes =
          which == kCalls ? kCallChunks * kCallChunkBytes : options.num_chunks * options.chunk_bytes;
      rings.words.resize(to_size(options.num_nodes));
      rings.chunks_in = DeviceMemory(num_peers * ring_bytes);
      rings.chunks_out = DeviceMemory(num_peers * ring_bytes);
      rings.num_sent.resize(to_size(options.num_nodes));
    }
  }
  network_ = machine_.add_stream();
}

cuda::NodePlace NodeRanks::place(int rank) {
  Rank& own = one(rank);
  const int first_rank = node_of(rank) * options_.ranks_per_node;
  cuda::NodePlace place;
  place.group_rank = rank;
  place.ranks_per_node = options_.ranks_per_node;
  place.ranks.rank = rank - first_rank;
  place.ranks.num_ranks = options_.ranks_per_node;
  for (int local = 0; local < options_.ranks_per_node; ++local) {
    place.ranks.peer_bases[local] = one(first_rank + local).arena.data();
  }
  place.ranks.control = cuda::Control::at(own.arena.data(), to_size(options_.ranks_per_node));
  place.ranks.report = &own.report;
  place.ranks.timeout_ns = kTimeoutNs;
  place.rails = {.node = node_of(rank),
                 .num_nodes = options_.num_nodes,
                 .state = own.state.get(),
                 .log = own.log,
                 .rings = {},
                 .call_rings = {}};
  const auto rings_of = [&own](std::size_t which, std::size_t num_chunks, std::size_t chunk_bytes) {
    Rings& rings = own.rings[which];
    return cuda::RailRings{.words = rings.words.data(),
                           .chunks_in = rings.chunks_in.data(),
                           .chunks_out = rings.chunks_out.data(),
                           .num_chunks = num_chunks,
                           .chunk_bytes = chunk_bytes};
  };
  place.rails.rings = rings_of(kItems, options_.num_chunks, options_.chunk_bytes);
  if (options_.has_call_rings) place.rails.call_rings = rings_of(kCalls, kCallChunks, kCallChunkBytes);
  return place;
}

std::byte* NodeRanks::allocate(int rank, std::size_t bytes) {
  Rank& own = one(rank);
  constexpr std::size_t kAlignment = 256;
  own.used_bytes = (own.used_bytes + kAlignment - 1) / kAlignment * kAlignment;
  std::byte* const data = own.arena.data() + own.used_bytes;
  own.used_bytes += bytes;
  if (own.used_bytes > own.arena.size()) std::abort();  // the test needs a larger arena
  return data;
}

std::size_t NodeRanks::num_chunks_of(std::size_t which) const {
  return which == kCalls ? kCallChunks : options_.num_chunks;
}

/// Moves the next chunk of the ring from `rank` to its rail peer, and the peer's progress in the other direction.
bool NodeRanks::move_chunk(int rank, int to_node, std::size_t which) {
  const int my_node = node_of(rank);
  const int peer = to_node * options_.ranks_per_node + rank % options_.ranks_per_node;
  Rank& from = one(rank);
  Rank& to = one(peer);
  net::RingWords& out = from.rings[which].words[to_size(to_node)];
  net::RingWords& in = to.rings[which].words[to_size(my_node)];
  const std::size_t num_chunks = num_chunks_of(which);
  if (!to.is_cut && in.used[out.credits % num_chunks] == out.credits + 1) {
    about_to_store();
    ++out.credits;
    return true;
  }
  std::uint64_t& num_sent = from.rings[which].num_sent[to_size(to_node)];
  if (from.is_cut || from.chunks_left == 0 || !net::is_filled(out.filled[num_sent % num_chunks], num_sent)) {
    return false;
  }
  if (from.chunks_left > 0) --from.chunks_left;
  const cuda::RailParams sender = place(rank).rails;
  const cuda::RailParams receiver = place(peer).rails;
  const cuda::RailRings& source = which == kCalls ? sender.call_rings : sender.rings;
  const cuda::RailRings& target = which == kCalls ? receiver.call_rings : receiver.rings;
  const std::size_t slot = num_sent % source.num_chunks;
  const std::size_t offset = slot * source.chunk_bytes;
  std::memcpy(const_cast<std::byte*>(target.chunks_in) + receiver.ring_offset(target, my_node) + offset,
              source.chunks_out + sender.ring_offset(source, to_node) + offset, net::bytes_of_filled(out.filled[slot]));
  about_to_store();
  in.arrived = ++num_sent;
  return true;
}

bool NodeRanks::move_one() {
  std::vector<std::pair<int, int>> rings;
  for (int rank = 0; rank < num_ranks(); ++rank) {
    for (int node = 0; node < options_.num_nodes; ++node) {
      if (node != node_of(rank)) rings.emplace_back(rank, node);
    }
  }
  std::ranges::shuffle(rings, random_);
  const std::size_t first = options_.has_call_rings ? random_() % 2 : kItems;
  return std::ranges::any_of(rings, [this, first](const auto& ring) {
    if (move_chunk(ring.first, ring.second, first)) return true;
    return options_.has_call_rings && move_chunk(ring.first, ring.second, 1 - first);
  });
}

void NodeRanks::limit_blocks(unsigned max_blocks) {
  for (const cudaStream_t stream : streams_) machine_.limit_blocks(stream, max_blocks);
}

void NodeRanks::delay(int rank, std::uint64_t time_ns) {
  machine_.launch(stream(rank), {}, [time_ns] {
    const std::uint64_t start_ns = now_ns();
    while (now_ns() - start_ns < time_ns) poll();
  });
}

std::string NodeRanks::run() {
  num_busy_ = num_ranks();
  for (int rank = 0; rank < num_ranks(); ++rank) machine_.enqueue(stream(rank), [this] { --num_busy_; });
  machine_.launch(network_, {1, 32, 0}, [this] {
    if (ferry::emulator::place().thread.x != 0) return;
    while (num_busy_ > 0) {
      poll();
      if (random_() % static_cast<unsigned>(options_.moves_one_in) == 0) move_one();
    }
    while (move_one()) {
    }
  });
  return machine_.run();
}

bool NodeRanks::is_drained() const {
  for (int rank = 0; rank < num_ranks(); ++rank) {
    const Rank& from = *ranks_[to_size(rank)];
    for (int node = 0; node < options_.num_nodes; ++node) {
      if (node == node_of(rank)) continue;
      for (std::size_t which = 0; which < from.rings.size(); ++which) {
        const net::RingWords& out = from.rings[which].words[to_size(node)];
        const std::uint64_t num_sent = from.rings[which].num_sent[to_size(node)];
        const bool is_sent = !net::is_filled(out.filled[num_sent % num_chunks_of(which)], num_sent);
        if (!is_sent || out.credits != num_sent) return false;
      }
    }
  }
  return true;
}

}  // namespace ferry::emulator
