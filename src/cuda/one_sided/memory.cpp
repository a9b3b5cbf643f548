#include "cuda/one_sided/memory.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <string>

#include "core/create_together.hpp"
#include "cuda/driver/cuda_call.hpp"
#include "cuda/driver/device_guard.hpp"
#include "cuda/one_sided/kernels.hpp"
#include "cuda/one_sided/registered_memory.hpp"
#include "one_sided/near_ranks.hpp"
#include "plan/carver.hpp"
#include "plan/to_size.hpp"

namespace ferry::cuda {
namespace {

/// 50 GB/s with 20 us of latency keep 1 MB in flight; eight times as much, so that kernels and proxy overlap.
constexpr std::uint64_t kNumSlots = 512;
constexpr std::uint64_t kSlotBytes = std::uint64_t{16} << 10;
constexpr std::size_t kStagingBytes = (kNumSlots + ::ferry::device::kNumReplies) * kSlotBytes;

std::size_t team_words(const Topology& topology) { return to_size(kMaxTeams) * to_size(topology.num_ranks); }

/// Tables of kernels in the arena, or with a null base their size.
struct Tables {
  ::ferry::device::KernelState* state;
  ::ferry::device::World* world;
  std::byte** peer_heaps;
  std::uint64_t* epochs;
  ::ferry::device::TeamMate* team_mates;
  std::size_t size_bytes;

  static Tables at(std::byte* base, const Topology& topology) {
    plan::Carver carver(base);
    Tables tables{};
    tables.state = carver.take<::ferry::device::KernelState>(1);
    tables.world = carver.take<::ferry::device::World>(1);
    tables.peer_heaps = carver.take<std::byte*>(to_size(topology.ranks_per_node));
    tables.epochs = carver.take<std::uint64_t>(to_size(kMaxTeams));
    tables.team_mates = carver.take<::ferry::device::TeamMate>(team_words(topology));
    tables.size_bytes = carver.used_bytes();
    return tables;
  }
};

}  // namespace

Status OneSidedMemory::examine_device(int wanted) {
  int num_devices = 0;
  Status status = runtime_status(cudaGetDeviceCount(&num_devices), "OneSided::create: counting GPUs");
  device_ = wanted;
  if (status.ok() && wanted == kCurrentDevice) {
    status = runtime_status(cudaGetDevice(&device_), "OneSided::create: asking for the current GPU");
  }
  if (!status.ok()) return status;
  if (device_ < 0 || device_ >= num_devices) {
    return Status(ErrorCode::kInvalidArgument,
                  fmt::format("OneSided::create: OneSidedOptions::device is {}, expected {} (the current one) or 0 to "
                              "{}: this process sees {} GPUs",
                              wanted, kCurrentDevice, num_devices - 1, num_devices));
  }
  int num_sms = 0;
  status = runtime_status(cudaDeviceGetAttribute(&num_sms, cudaDevAttrMultiProcessorCount, device_),
                          "OneSided::create: examining the GPU");
  num_sms_ = static_cast<unsigned>(std::max(num_sms, 1));
  return status;
}

/// Makes the parts that need no peer.
Status OneSidedMemory::make_local_parts(const one_sided::Context& context) {
  if (Status status = examine_device(context.base.options.device); !status.ok()) return status;
  const DeviceGuard guard(device_);
  if (!guard.status().ok()) return guard.status();
  const RelaxedCapture relaxed;
  Status status =
      runtime_status(load_one_sided_kernels(), fmt::format("OneSided::create: loading kernels on GPU {}", device_),
                     "this build has no code for the GPU: set CMAKE_CUDA_ARCHITECTURES and build again");
  if (!status.ok()) return status;
  Result<std::shared_ptr<OwnStream>> stream = OwnStream::create();
  if (!stream.ok()) return stream.status();
  stream_ = *stream;

  const bool over_nodes = context.base.topology.num_nodes() > 1;
  const auto carve = [&](std::byte* base) {
    plan::Carver carver(base);
    // Parts that take whole pairs of cache lines come first.
    errors_ = carver.take<::ferry::device::ErrorRecord>(1);
    if (over_nodes) {
      ring_.num_slots = kNumSlots;
      ring_.counts = carver.take<::ferry::device::RequestCounts>(1);
      ring_.replies = carver.take<::ferry::device::RequestReply>(to_size(::ferry::device::kNumReplies));
      ring_.words = carver.take<std::uint64_t>(kNumSlots * ::ferry::device::kRequestWords);
      staging_bytes_ = kStagingBytes;
      staging_ = carver.take<std::byte>(staging_bytes_);
    }
    result_ = carver.take<std::uint64_t>(1);
    return carver.used_bytes();
  };
  Result<PinnedBlock> pinned = take_pinned(carve(nullptr));
  if (!pinned.ok()) return pinned.status();
  pinned_ = std::move(*pinned);
  carve(pinned_.data.get());

  const std::size_t heap_bytes = over_nodes ? 0 : total_bytes_;
  const std::size_t tables_bytes = node::round_up_to_page(Tables::at(nullptr, context.base.topology).size_bytes);
  const Result<MemoryPath> path = choose_memory_path(device_);
  if (!path.ok()) return path.status();
  Result<std::shared_ptr<DeviceArena>> arena = DeviceArena::create(device_, heap_bytes + tables_bytes, *path, stream_);
  if (!arena.ok()) return arena.status();
  arena_ = *arena;
  // One block, so that the heap is at the same place of every rank's arena.
  Result<std::byte*> block = arena_->take(heap_bytes + tables_bytes);
  if (!block.ok()) return block.status();
  if (*block != arena_->base()) {
    return Status(ErrorCode::kInternal,
                  "OneSided::create: symmetric memory is not first in its arena; please report this");
  }
  status = arena_->zero(*block, heap_bytes + tables_bytes);
  if (!status.ok()) return status;
  const Tables tables = Tables::at(*block + heap_bytes, context.base.topology);
  world_.state = tables.state;
  world_.stored = tables.world;
  world_.peer_heaps = tables.peer_heaps;
  epochs_ = tables.epochs;
  team_mates_ = tables.team_mates;
  return {};
}

Status OneSidedMemory::upload(void* to, const void* from, std::size_t num_bytes, std::string_view what) {
  const RelaxedCapture relaxed;
  Status status = runtime_status(cudaMemcpyAsync(to, from, num_bytes, cudaMemcpyHostToDevice, stream()), what);
  return status.ok() ? runtime_status(cudaStreamSynchronize(stream()), what) : status;
}

/// Sets the addresses of this node's heaps as this rank's GPU sees them: the last fields of the World.
Status OneSidedMemory::adopt_heaps(const one_sided::Context& context) {
  const Topology& topology = context.base.topology;
  const DeviceGuard guard(device_);
  if (!guard.status().ok()) return guard.status();
  const int first = topology.node_of(topology.rank) * topology.ranks_per_node;
  for (int rank = first; rank < first + topology.ranks_per_node; ++rank) {
    if (exchange_ != nullptr) {
      peer_heaps_.push_back(exchange_->peer_base(rank));
      continue;
    }
    Result<std::shared_ptr<std::byte>> block = register_memory(fabric_->peer_heap(rank), total_bytes_);
    if (!block.ok()) return block.status();
    peer_heaps_.push_back(block->get());
    registered_.push_back(std::move(*block));
  }
  world_.heap = peer_heaps_[to_size(topology.rank - first)];
  one_sided::set_near_ranks(world_, peer_heaps_);
  Status status =
      upload(const_cast<std::byte**>(world_.peer_heaps), peer_heaps_.data(), peer_heaps_.size() * sizeof(std::byte*),
             "OneSided::create: uploading the addresses of the peers");
  if (!status.ok()) return status;
  return upload(const_cast<::ferry::device::World*>(world_.stored), &world_, sizeof(world_),
                "OneSided::create: uploading what kernels know of it");
}

Result<std::unique_ptr<OneSidedMemory>> OneSidedMemory::create(const one_sided::Context& context) {
  const BackendContext& base = context.base;
  auto memory = std::make_unique<OneSidedMemory>();
  memory->total_bytes_ = node::round_up_to_page(context.heap_bytes + team_words(base.topology) * sizeof(std::uint64_t));
  const auto agree = [&base](const Status& status) {
    return gather_or_fail(*base.bootstrap, status, {}, base.options.timeout_ns).status();
  };
  if (Status status = agree(memory->make_local_parts(context)); !status.ok()) return status;
  const bool over_nodes = base.topology.num_nodes() > 1;
  Result<std::unique_ptr<one_sided::Fabric>> fabric =
      one_sided::Fabric::create(base, over_nodes ? memory->total_bytes_ : 0);
  if (!fabric.ok()) return fabric.status();
  memory->fabric_ = std::move(*fabric);
  if (!over_nodes) {
    PeerPlaces places;
    Result<std::unique_ptr<ArenaExchange>> exchange =
        ArenaExchange::create(base, memory->fabric_->peers(), memory->arena_, places, 0);
    if (!exchange.ok()) return exchange.status();
    memory->exchange_ = std::move(*exchange);
  }

  ::ferry::device::World& world = memory->world_;
  world.rank = base.topology.rank;
  world.num_ranks = base.topology.num_ranks;
  world.ranks_per_node = base.topology.ranks_per_node;
  world.first_in_node = base.topology.node_of(base.topology.rank) * base.topology.ranks_per_node;
  world.heap_bytes = context.heap_bytes;
  world.gpu_words = !over_nodes;
  world.timeout_ns = static_cast<std::uint64_t>(base.options.timeout_ns);
  world.errors = memory->on_device(memory->errors_);
  if (over_nodes) {
    const one_sided::RequestRingMemory& ring = memory->ring_;
    world.ring.words = memory->on_device(ring.words);
    world.ring.num_slots = ring.num_slots;
    world.ring.counts = memory->on_device(ring.counts);
    world.ring.replies = memory->on_device(ring.replies);
    world.ring.state = &world.state->ring;
    world.ring.staging = memory->on_device(memory->staging_);
    world.ring.staging_offset = memory->total_bytes_;
    world.ring.slot_bytes = kSlotBytes;
  }
  memory->has_mates_.resize(to_size(kMaxTeams));
  if (Status status = agree(memory->adopt_heaps(context)); !status.ok()) return status;
  return memory;
}

std::byte* OneSidedMemory::peer_heap(int rank) const {
  return fabric_->in_node(rank) ? peer_heaps_[to_size(rank % world_.ranks_per_node)] : nullptr;
}

Result<::ferry::device::TeamView> OneSidedMemory::view_of(const one_sided::TeamState& team) {
  const std::size_t num_ranks = to_size(world_.num_ranks);
  const std::size_t slot = to_size(team.my_slot());
  ::ferry::device::TeamMate* const mates = team_mates_ + slot * num_ranks;
  if (!has_mates_[slot]) {
    std::vector<::ferry::device::TeamMate> made;
    for (std::size_t place = 0; place < team.ranks.size(); ++place) {
      const int behind = (team.slots[place] - team.my_slot()) * world_.num_ranks + team.my_place;
      made.push_back({.rank = team.ranks[place], .word = behind});
    }
    const DeviceGuard guard(device_);
    if (!guard.status().ok()) return guard.status();
    Status status = upload(mates, made.data(), made.size() * sizeof(made[0]), "uploading a team");
    if (!status.ok()) return status;
    has_mates_[slot] = true;
  }
  ::ferry::device::TeamView view;
  view.num_ranks = static_cast<int>(team.ranks.size());
  view.rank = team.my_place;
  view.mates = mates;
  view.arrived = reinterpret_cast<std::uint64_t*>(world_.heap + world_.heap_bytes) + slot * num_ranks;
  view.epoch = epochs_ + slot;
  return view;
}

one_sided::RingSource::Options OneSidedMemory::ring_options() const {
  one_sided::RingSource::Options options;
  options.ring = ring_;
  options.limits = {.num_peers = world_.num_ranks,
                    .local_bytes = total_bytes_ + staging_bytes_,
                    .remote_bytes = total_bytes_,
                    .timeout_ns = fabric_->timeout_ns()};
  options.heap = world_.heap;
  options.staging = staging_;
  for (int rank = 0; rank < world_.num_ranks; ++rank) options.peer_heaps.push_back(peer_heap(rank));
  options.heap_offset = fabric_->engine_offset(0);
  options.num_parts = &one_sided::Driver::num_parts;
  return options;
}

}  // namespace ferry::cuda
