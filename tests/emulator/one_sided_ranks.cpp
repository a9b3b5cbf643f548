#include "emulator/one_sided_ranks.hpp"

#include <algorithm>
#include <cstring>
#include <utility>

#include "one_sided/near_ranks.hpp"
#include "plan/to_size.hpp"

namespace ferry::emulator {
namespace {

using one_sided::NetworkRequest;
using Kind = one_sided::NetworkRequest::Kind;

/// Whether `later` must wait for `earlier` to the same peer, as the engine's interface requires.
bool must_wait(const NetworkRequest& later, const NetworkRequest& earlier) {
  if (later.peer != earlier.peer) return false;
  if (later.kind == Kind::kFlush) return earlier.kind != Kind::kGet && earlier.kind != Kind::kFlush;
  // Only the signal of a put follows puts.
  return later.kind == Kind::kPutSignal && earlier.kind == Kind::kPut;
}

}  // namespace

OneSidedRanks::OneSidedRanks(const Options& options)
    : options_(options), machine_(options.seed), random_(options.seed) {
  for (int rank = 0; rank < options.num_ranks; ++rank) {
    streams_.push_back(machine_.add_stream());
    Rank& own = *ranks_.emplace_back(std::make_unique<Rank>());
    own.heap.resize(options.heap_bytes);
    own.staging.resize((options.num_slots + device::kNumReplies) * options.slot_bytes);
    own.words.resize(options.num_slots * device::kRequestWords);
    own.replies.resize(device::kNumReplies);
    for (int i = 0; i < options.num_ranks; ++i) {
      own.mates.push_back({.rank = i, .word = (i - rank) * options.num_ranks + rank});
    }
  }
  network_ = machine_.add_stream();
  for (int rank = 0; rank < options.num_ranks; ++rank) {
    const int first = node_of(rank) * options.ranks_per_node;
    for (int i = 0; i < options.ranks_per_node; ++i) one(rank).peer_heaps.push_back(heap(first + i));
    if (has_network()) make_source(rank);
  }
}

OneSidedRanks::~OneSidedRanks() = default;

void OneSidedRanks::make_source(int rank) {
  Rank& own = one(rank);
  one_sided::RingSource::Options options;
  options.ring = {
      .words = own.words.data(), .num_slots = options_.num_slots, .counts = &own.counts, .replies = own.replies.data()};
  options.limits = {.num_peers = options_.num_ranks,
                    .local_bytes = own.heap.size() + own.staging.size(),
                    .remote_bytes = own.heap.size(),
                    .timeout_ns = 600'000'000'000};
  options.heap = own.heap.data();
  options.staging = own.staging.data();
  for (int peer = 0; peer < options_.num_ranks; ++peer) {
    options.peer_heaps.push_back(node_of(peer) == node_of(rank) ? heap(peer) : nullptr);
  }
  options.num_parts = [](const NetworkRequest& /*request*/) { return std::uint64_t{1}; };
  options.lost = [this, rank](int /*peer*/) {
    if (tells_losses_) one(rank).errors.stop = device::stop_word::kRankLost;
  };
  options.max_held_bytes = options_.max_held_bytes;
  own.source = std::make_unique<one_sided::RingSource>(std::move(options));
}

device::World OneSidedRanks::world(int rank) {
  Rank& own = one(rank);
  device::World world;
  world.rank = rank;
  world.num_ranks = options_.num_ranks;
  world.ranks_per_node = options_.ranks_per_node;
  world.heap = own.heap.data();
  world.heap_bytes = own.heap.size();
  world.first_in_node = node_of(rank) * options_.ranks_per_node;
  world.peer_heaps = own.peer_heaps.data();
  world.gpu_words = !has_network();
  one_sided::set_near_ranks(world, own.peer_heaps);
  world.timeout_ns = kTimeoutNs;
  world.errors = &own.errors;
  world.state = &own.state;
  if (has_network()) {
    world.ring.words = own.words.data();
    world.ring.num_slots = options_.num_slots;
    world.ring.counts = &own.counts;
    world.ring.replies = own.replies.data();
    world.ring.state = &own.state.ring;
    world.ring.staging = own.staging.data();
    world.ring.staging_offset = own.heap.size();
    world.ring.slot_bytes = options_.slot_bytes;
  }
  world.stored = &own.world;
  own.world = world;
  return world;
}

device::TeamView OneSidedRanks::team(int rank) {
  Rank& own = one(rank);
  const std::size_t words_bytes = to_size(options_.num_ranks) * sizeof(std::uint64_t);
  std::byte* const end = own.heap.data() + own.heap.size();
  device::TeamView team;
  team.num_ranks = options_.num_ranks;
  team.rank = rank;
  team.mates = own.mates.data();
  team.arrived = reinterpret_cast<std::uint64_t*>(end - to_size(options_.num_ranks - rank) * words_bytes);
  team.epoch = &own.epoch;
  return team;
}

void OneSidedRanks::launch(int rank, const GridShape& shape, std::function<void()> kernel) {
  machine_.launch(streams_[to_size(rank)], shape, std::move(kernel));
}

bool OneSidedRanks::can_issue(Rank& from, int peer) {
  if (std::ranges::none_of(from.under_way, [peer](const Operation& op) { return op.request.peer == peer; })) {
    from.fenced.erase(peer);
  }
  return !from.fenced.contains(peer);
}

/// Takes the next request of the ring into the network.
bool OneSidedRanks::take(Rank& from) {
  const NetworkRequest* const next = from.source->front([&from](int peer) { return can_issue(from, peer); });
  if (next == nullptr) return false;
  if (one(next->peer).is_lost) {
    if (next->completion != nullptr) next->completion->lost(next->peer);
    from.source->taken();
    return true;
  }
  if (next->kind == Kind::kFence) {
    from.fenced.insert(next->peer);
    from.source->taken();
    return true;
  }
  Operation operation{*next, {}};
  if (next->copy_source) operation.bytes.assign(next->local, next->local + next->num_bytes);
  if (next->kind == Kind::kPutSignal) {
    operation.request.kind = Kind::kPut;
    from.under_way.push_back(operation);
    operation.request.kind = Kind::kPutSignal;  // the remaining part
  }
  from.under_way.push_back(std::move(operation));
  from.source->taken();
  return true;
}

/// Completes some operation that may arrive.
bool OneSidedRanks::move(Rank& from) {
  std::deque<Operation>& operations = from.under_way;
  if (operations.empty()) return false;
  const std::size_t first = random_() % operations.size();
  for (std::size_t i = 0; i < operations.size(); ++i) {
    const std::size_t idx = (first + i) % operations.size();
    const auto begin = operations.begin();
    const auto at = begin + static_cast<std::ptrdiff_t>(idx);
    if (one(at->request.peer).is_lost) {
      one_sided::Completion* const completion = at->request.completion;
      const int peer = at->request.peer;
      operations.erase(at);
      if (completion != nullptr) completion->lost(peer);
      return true;
    }
    if (one(at->request.peer).is_stalled) continue;
    if (std::any_of(begin, at, [at](const Operation& earlier) { return must_wait(at->request, earlier.request); })) {
      continue;
    }
    Operation operation = std::move(*at);
    operations.erase(at);
    apply(operation);
    return true;
  }
  return false;
}

void OneSidedRanks::apply(Operation& operation) {
  const NetworkRequest& request = operation.request;
  std::byte* const heap = this->heap(request.peer);
  about_to_store();
  std::uint64_t before = 0;
  switch (request.kind) {
    case Kind::kPut:
      std::memcpy(heap + request.offset, request.copy_source ? operation.bytes.data() : request.local,
                  request.num_bytes);
      break;
    case Kind::kGet:
      std::memcpy(request.local, heap + request.offset, request.num_bytes);
      break;
    case Kind::kPutSignal:
    case Kind::kAtomic:
      before = net::apply_atomic(heap, request.op);
      break;
    default:
      break;
  }
  if (request.completion != nullptr) request.completion->done(before);
}

std::string OneSidedRanks::run() {
  num_busy_ = num_ranks();
  for (const cudaStream_t stream : streams_) machine_.enqueue(stream, [this] { --num_busy_; });
  machine_.launch(network_, {1, 32, 0}, [this] {
    if (ferry::emulator::place().thread.x != 0) return;
    while (has_network() && num_busy_ > 0) {
      poll();
      for (const std::unique_ptr<Rank>& rank : ranks_) {
        if (random_() % 2 == 0) take(*rank);
        if (random_() % 4 == 0) move(*rank);
      }
    }
    for (const std::unique_ptr<Rank>& rank : ranks_) {
      while (has_network() && (take(*rank) || move(*rank))) {
      }
    }
  });
  return machine_.run();
}

}  // namespace ferry::emulator
