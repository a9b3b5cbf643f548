#include "emulator/node_ranks.hpp"

#include <algorithm>
#include <cstring>

namespace ferry::emulator {
namespace {

std::size_t to_size(int value) { return static_cast<std::size_t>(value); }

}  // namespace

NodeRanks::NodeRanks(const Options& options) : options_(options), machine_(options.seed), random_(options.seed) {
  const std::size_t num_peers = to_size(options.num_nodes) - 1;
  const std::size_t rings_bytes = num_peers * options.num_chunks * options.chunk_bytes;
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
    one.words.resize(to_size(options.num_nodes));
    one.chunks_in = DeviceMemory(rings_bytes);
    one.chunks_out = DeviceMemory(rings_bytes);
    one.num_sent.resize(to_size(options.num_nodes));
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
                 .words = own.words.data(),
                 .chunks_in = own.chunks_in.data(),
                 .chunks_out = own.chunks_out.data(),
                 .num_chunks = options_.num_chunks,
                 .chunk_bytes = options_.chunk_bytes};
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

/// Moves the next chunk of the ring from `rank` to its rail peer, and the peer's progress in the other direction.
bool NodeRanks::move_chunk(int rank, int to_node) {
  const int my_node = node_of(rank);
  const int peer = to_node * options_.ranks_per_node + rank % options_.ranks_per_node;
  Rank& from = one(rank);
  Rank& to = one(peer);
  net::RingWords& out = from.words[to_size(to_node)];
  net::RingWords& in = to.words[to_size(my_node)];
  if (!to.is_cut && out.credits != in.used) {
    about_to_store();
    out.credits = in.used;
    return true;
  }
  std::uint64_t& num_sent = from.num_sent[to_size(to_node)];
  if (from.is_cut || from.chunks_left == 0 || num_sent == out.filled) return false;
  if (from.chunks_left > 0) --from.chunks_left;
  const std::size_t slot = num_sent % options_.num_chunks;
  const cuda::NodePlace sender = place(rank);
  const cuda::NodePlace receiver = place(peer);
  const std::size_t offset = slot * options_.chunk_bytes;
  std::memcpy(const_cast<std::byte*>(receiver.rails.chunks_in) + receiver.rails.ring_offset(my_node) + offset,
              sender.rails.chunks_out + sender.rails.ring_offset(to_node) + offset, out.chunk_bytes[slot]);
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
  return std::ranges::any_of(rings, [this](const auto& ring) { return move_chunk(ring.first, ring.second); });
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
      const Rank& to = *ranks_[to_size(node * options_.ranks_per_node + rank % options_.ranks_per_node)];
      const net::RingWords& in = to.words[to_size(node_of(rank))];
      if (from.words[to_size(node)].filled != in.used || from.words[to_size(node)].credits != in.used) return false;
    }
  }
  return true;
}

}  // namespace ferry::emulator
