#include "cuda/memory/arena_exchange.hpp"

#include <fmt/format.h>

#include <array>
#include <cstdint>
#include <cstring>
#include <optional>
#include <span>
#include <string>
#include <utility>

#include "core/create_together.hpp"
#include "cuda/driver/cuda_call.hpp"
#include "cuda/driver/driver.hpp"
#include "node/same_process.hpp"

namespace ferry::cuda {

using GpuId = std::array<std::uint8_t, 16>;

/// A rank's message to the others about its GPU and arena. Plain bytes, exchanged through the bootstrap.
struct ArenaAnnouncement {
  node::LinkToken token{};  ///< for ranks of the same process
  GpuId gpu{};
  std::uint64_t size_bytes = 0;
  std::int32_t device = 0;  ///< ordinal in the rank's own process, for messages
  MemoryPath path = MemoryPath::kVmm;
};

namespace {

Result<GpuId> gpu_id(int device) {
  Result<const Driver*> table = driver();
  if (!table.ok()) return table.status();
  CUdevice handle = 0;
  CUuuid uuid{};
  CUresult result = (*table)->device_get(&handle, device);
  if (result == CUDA_SUCCESS) result = (*table)->device_get_uuid(&uuid, handle);
  if (Status status = driver_status(result, fmt::format("Group::create: asking for the UUID of GPU {}", device));
      !status.ok()) {
    return status;
  }
  GpuId id;
  static_assert(sizeof(uuid.bytes) == sizeof(id));
  std::memcpy(id.data(), uuid.bytes, id.size());
  return id;
}

/// Text of a UUID as nvidia-smi -L prints it.
std::string to_string(const GpuId& id) {
  std::string text = "GPU-";
  for (std::size_t i = 0; i < id.size(); ++i) {
    if (i == 4 || i == 6 || i == 8 || i == 10) text += '-';
    text += fmt::format("{:02x}", id[i]);
  }
  return text;
}

/// Message of a rank: its announcement, then the size of each rank's place, 0 where it has none.
std::vector<std::byte> to_message(const ArenaAnnouncement& mine, const PeerPlaces& places) {
  const auto bytes = std::as_bytes(std::span(&mine, 1));
  std::vector<std::byte> message(bytes.begin(), bytes.end());
  for (const PeerPlace& place : places) {
    const std::uint64_t size_bytes = place.size_bytes();
    const auto size = std::as_bytes(std::span(&size_bytes, 1));
    message.insert(message.end(), size.begin(), size.end());
  }
  return message;
}

/// Size of the place that some rank has for `rank`, whose message is absent; 0: none has one.
std::uint64_t size_of_place(const std::vector<std::vector<std::byte>>& messages, std::size_t rank) {
  const std::size_t offset = sizeof(ArenaAnnouncement) + rank * sizeof(std::uint64_t);
  std::uint64_t size_bytes = 0;
  for (const std::vector<std::byte>& message : messages) {
    if (size_bytes == 0 && message.size() >= offset + sizeof(size_bytes)) {
      std::memcpy(&size_bytes, message.data() + offset, sizeof(size_bytes));
    }
  }
  return size_bytes;
}

Result<std::vector<ArenaAnnouncement>> exchange(const BackendContext& context, const Status& my_status,
                                                const ArenaAnnouncement& mine, const PeerPlaces& places) {
  const std::vector<std::byte> message = to_message(mine, places);
  Result<std::vector<std::vector<std::byte>>> all =
      gather_or_fail(*context.bootstrap, my_status, message, context.options.timeout_ns);
  if (!all.ok()) return all.status();
  std::vector<ArenaAnnouncement> announcements(all->size());
  for (std::size_t rank = 0; rank < all->size(); ++rank) {
    ArenaAnnouncement& theirs = announcements[rank];
    const std::vector<std::byte>& bytes = (*all)[rank];
    if (context.is_absent(static_cast<int>(rank))) {
      // As it will be: the process that takes its place must fit those that ranks have for it.
      theirs = mine;
      if (const std::uint64_t size_bytes = size_of_place(*all, rank); size_bytes != 0) theirs.size_bytes = size_bytes;
      continue;
    }
    if (bytes.size() == message.size()) std::memcpy(&theirs, bytes.data(), sizeof(theirs));
    if (bytes.size() == message.size() && (theirs.path == MemoryPath::kVmm || theirs.path == MemoryPath::kIpc))
      continue;
    return Status(ErrorCode::kTransport,
                  fmt::format("Group::create: rank {} announced its GPU in {} bytes and memory of kind {}, expected {} "
                              "bytes and 0 or 1; run the same build on every rank",
                              rank, bytes.size(), static_cast<int>(theirs.path), message.size()),
                  static_cast<int>(rank));
  }
  return announcements;
}

/// Whether this rank's GPU can load and store the memory of the GPUs of its node's ranks. Asks only about GPUs that
/// this process sees; for others, mapping fails if it cannot.
Status check_reach(const node::Peers& peers, const std::vector<ArenaAnnouncement>& announcements) {
  const int my_rank = peers.rank();
  const ArenaAnnouncement& mine = announcements[static_cast<std::size_t>(my_rank)];
  int num_devices = 0;
  if (Status status = runtime_status(cudaGetDeviceCount(&num_devices), "Group::create: counting GPUs"); !status.ok()) {
    return status;
  }
  std::vector<GpuId> visible;
  for (int device = 0; device < num_devices; ++device) {
    Result<GpuId> id = gpu_id(device);
    if (!id.ok()) return id.status();
    visible.push_back(*id);
  }
  for (std::size_t rank = 0; rank < announcements.size(); ++rank) {
    const ArenaAnnouncement& theirs = announcements[rank];
    if (theirs.gpu == mine.gpu || !peers.includes(static_cast<int>(rank))) continue;
    for (int device = 0; device < num_devices; ++device) {
      if (visible[static_cast<std::size_t>(device)] != theirs.gpu) continue;
      int reachable = 0;
      if (Status status = runtime_status(
              cudaDeviceCanAccessPeer(&reachable, mine.device, device),
              fmt::format("Group::create: asking whether GPU {} can access GPU {}", mine.device, device));
          !status.ok()) {
        return status;
      }
      if (reachable != 0) continue;
      return Status(
          ErrorCode::kUnsupported,
          fmt::format("Group::create: rank {}'s GPU {} ({}) cannot access the memory of rank {}'s GPU {} ({}); "
                      "backend \"cuda\" needs peer-to-peer access between all GPUs of a group (nvidia-smi topo "
                      "-p2p rw): choose other GPUs, enable it, or use backend \"cpu\"",
                      my_rank, mine.device, to_string(mine.gpu), rank, theirs.device, to_string(theirs.gpu)),
          static_cast<int>(rank));
    }
  }
  return {};
}

}  // namespace

Result<std::unique_ptr<ArenaExchange>> ArenaExchange::create(const BackendContext& context, node::Peers& peers,
                                                             std::shared_ptr<DeviceArena> arena, PeerPlaces& places,
                                                             std::size_t head_bytes) {
  const std::int64_t timeout_ns = context.options.timeout_ns;
  ArenaAnnouncement mine;
  Status status = node::fill_random(mine.token.data(), mine.token.size());
  Result<GpuId> id = gpu_id(arena->device());
  if (status.ok()) status = id.status();
  if (id.ok()) mine.gpu = *id;
  mine.size_bytes = arena->size_bytes();
  mine.device = arena->device();
  mine.path = arena->path();
  const node::Offered<DeviceArena> offer(mine.token, arena);
  places.resize(static_cast<std::size_t>(context.topology.num_ranks));
  Result<std::vector<ArenaAnnouncement>> announcements = exchange(context, status, mine, places);
  if (!announcements.ok()) return announcements.status();

  auto result = std::make_unique<ArenaExchange>(Private{}, peers.rank(), arena);
  status = check_reach(peers, *announcements);
  if (status.ok()) status = result->meet({context, peers, *announcements, places, head_bytes});
  // No rank announces memory before all of them listen: one that has failed would not answer.
  Result<std::vector<std::vector<std::byte>>> listening = gather_or_fail(*context.bootstrap, status, {}, timeout_ns);
  if (!listening.ok()) return listening.status();
  status = arena->set_announce(
      [service = result->service_.get()](const ArenaChunk& chunk) { return service->announce(chunk); });
  Result<std::vector<std::vector<std::byte>>> mapped = gather_or_fail(*context.bootstrap, status, {}, timeout_ns);
  if (!mapped.ok()) return mapped.status();
  if (status = result->adopt_bases(peers); !status.ok()) return status;
  return result;
}

Result<std::shared_ptr<PeerMapping>> ArenaExchange::place_of(const Meeting& meeting, int rank) const {
  const auto idx = static_cast<std::size_t>(rank);
  const ArenaAnnouncement& theirs = meeting.announcements[idx];
  if (meeting.context.is_absent(rank) && theirs.path != MemoryPath::kVmm) {
    return Status(
        ErrorCode::kUnsupported,
        fmt::format("it is absent, and memory of GPU {} is shared by way of \"{}\", at addresses that change; "
                    "create a group of the ranks that are present",
                    arena_->device(), to_string(theirs.path)));
  }
  std::shared_ptr<PeerMapping>& place = meeting.places[idx].mapping;
  if (place == nullptr) {
    Result<std::unique_ptr<PeerMapping>> mapping =
        PeerMapping::create(arena_->device(), theirs.path, theirs.size_bytes);
    if (!mapping.ok()) return mapping.status();
    if (theirs.path != MemoryPath::kVmm) return std::shared_ptr<PeerMapping>(std::move(*mapping));
    place = std::move(*mapping);
  }
  place->clear();
  if (meeting.context.is_absent(rank)) {
    Status status = place->stand_in(meeting.head_bytes);
    return status.ok() ? Result<std::shared_ptr<PeerMapping>>(place) : status;
  }
  if (theirs.path == MemoryPath::kVmm && theirs.size_bytes == place->size_bytes()) return place;
  return Status(ErrorCode::kUnsupported,
                fmt::format("its arena of {} bytes (\"{}\") is to take the place of one of {} bytes; set the same "
                            "GroupOptions::arena_bytes, on GPUs of one kind",
                            theirs.size_bytes, to_string(theirs.path), place->size_bytes()));
}

/// Finds the arenas of this process, reserves addresses for those of others, and starts to listen to them.
Status ArenaExchange::meet(const Meeting& meeting) {
  const auto& [context, peers, announcements, places, head_bytes] = meeting;
  std::vector<ArenaService::Peer> listened;
  peers_.resize(announcements.size());
  for (std::size_t i = 0; i < announcements.size(); ++i) {
    const int rank = static_cast<int>(i);
    if (!peers.includes(rank)) continue;
    const ArenaAnnouncement& theirs = announcements[i];
    Peer& peer = peers_[i];
    std::shared_ptr<DeviceArena>& same_process = peer.place.same_process;
    if (rank == rank_) {
      same_process = arena_;
    } else if (context.is_absent(rank) && places[i].same_process != nullptr) {
      same_process = places[i].same_process;
    } else if (peers.peer(rank).same_process) {
      same_process = node::find_offered<DeviceArena>(theirs.token);
      if (same_process == nullptr) {
        return Status(ErrorCode::kPeerLost, fmt::format("Group::create: rank {} gave up", rank), rank);
      }
      if (Status status = same_process->grant_access(arena_->device()); !status.ok()) {
        return Status(status.code(), fmt::format("Group::create: using memory of rank {}: {}", rank, status.message()),
                      rank);
      }
    } else {
      Result<std::shared_ptr<PeerMapping>> mapping = place_of(meeting, rank);
      if (!mapping.ok()) {
        return Status(mapping.status().code(),
                      fmt::format("Group::create: rank {}: {}", rank, mapping.status().message()), rank);
      }
      peer.place.mapping = std::move(*mapping);
      if (!context.is_absent(rank)) listened.push_back({rank, peers.peer(rank).link.get(), peer.place.mapping.get()});
    }
    if (rank != rank_ && places[i].same_process == nullptr) places[i].same_process = same_process;
    peer.size_bytes = same_process != nullptr ? same_process->size_bytes() : peer.place.mapping->size_bytes();
  }
  if (arena_->path() == MemoryPath::kIpc) {
    Importers importers;
    for (const ArenaService::Peer& peer : listened) {
      Result<std::unique_ptr<node::PeerLink>> link = peer.link->share();
      if (!link.ok()) return link.status();
      importers.push_back(std::move(*link));
      shared_links_.push_back(peer.link);
    }
    arena_->set_importers(std::move(importers));
  }
  service_ = std::make_unique<ArenaService>(
      listened, ArenaService::Options{context.options.timeout_ns, context.options.mask_lost_ranks});
  return service_->start();
}

Status ArenaExchange::adopt_bases(const node::Peers& peers) {
  for (int rank = peers.first_rank(); rank < peers.end_rank(); ++rank) {
    Peer& peer = peers_[static_cast<std::size_t>(rank)];
    const PeerPlace& place = peer.place;
    peer.base = place.same_process != nullptr ? place.same_process->base() : place.mapping->base();
    if (peer.base != nullptr) continue;
    return Status(
        ErrorCode::kTransport,
        fmt::format("Group::create: rank {} never announced its memory; run the same build on every rank", rank), rank);
  }
  return {};
}

ArenaExchange::~ArenaExchange() {
  if (service_ != nullptr) {
    service_->cancel();
    // Waits for the growth that has just been cancelled, so that no thread is left in the service.
    static_cast<void>(arena_->set_announce(nullptr));
    service_.reset();
  }
  peers_.clear();
  // No memory of the peers is open here any more. The links stay open with the arena, so their end does not show it.
  for (const node::PeerLink* link : shared_links_) link->end_sending();
}

}  // namespace ferry::cuda
