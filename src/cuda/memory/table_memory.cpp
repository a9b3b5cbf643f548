#include "cuda/memory/table_memory.hpp"

#include <algorithm>
#include <new>

#include "cuda/driver/cuda_call.hpp"
#include "cuda/driver/device_guard.hpp"
#include "cuda/driver/driver.hpp"

namespace ferry::cuda {

Result<std::shared_ptr<TableMemory>> TableMemory::create(std::shared_ptr<DeviceArena> arena) {
  std::array<cudaEvent_t, 2> events{};
  for (cudaEvent_t& event : events) {
    const cudaError_t error = cudaEventCreateWithFlags(&event, cudaEventDisableTiming);
    if (error == cudaSuccess) continue;
    if (events[0] != nullptr) cudaEventDestroy(events[0]);
    return runtime_status(error, "Group::create: making an event");
  }
  return std::make_shared<TableMemory>(std::move(arena), events);
}

TableMemory::~TableMemory() {
  release_all();
  for (const cudaEvent_t event : events_) cudaEventDestroy(event);
}

cudaError_t TableMemory::record_last_call(cudaStream_t stream) {
  const std::lock_guard lock(mutex_);
  if (!resting_earlier_.empty()) last_ = 1 - earlier_;
  // The driver's function, which a group has loaded: the runtime's calls it, and takes longer.
  return as_runtime_error(loaded_driver()->event_record(events_[last_], stream));
}

cudaEvent_t TableMemory::last_call() const {
  const std::lock_guard lock(mutex_);
  return events_[last_];
}

Result<std::byte*> TableMemory::take_block(std::size_t bytes, bool again) {
  if (!again) look_through();
  Result<std::byte*> data = arena_->take(bytes);
  if (!data.ok() && data.status().code() == ErrorCode::kCapacity) {
    // Resting memory may suffice. Every call ends by its deadline, so this wait does too.
    const RelaxedCapture relaxed;
    cudaEventSynchronize(last_call());
    {
      const std::lock_guard lock(mutex_);
      reap();
    }
    give_back_spare();
    data = arena_->take(bytes);
  }
  return data;
}

Result<std::shared_ptr<std::byte>> TableMemory::take(std::size_t bytes, bool again) {
  const Result<std::byte*> data = take_block(bytes, again);
  if (!data.ok()) return data.status();
  {
    const std::lock_guard lock(mutex_);
    held_bytes_ += node::round_up_to_page(bytes);
  }
  return std::shared_ptr<std::byte>(*data, Bury{shared_from_this(), bytes, bytes});
}

Result<std::shared_ptr<std::byte>> TableMemory::take_with_spare(std::size_t bytes, std::size_t spare_bytes) {
  if (spare_bytes == 0) return take(bytes);
  {
    const std::lock_guard lock(mutex_);
    reap();
  }
  // A failure is no error: this allocation neither waits for calls nor takes memory that others hold in reserve.
  const Result<std::byte*> data = arena_->take(bytes + spare_bytes);
  if (!data.ok()) return take(bytes);
  std::shared_ptr<std::byte> block(*data, Bury{shared_from_this(), bytes + spare_bytes, bytes});
  const std::lock_guard lock(mutex_);
  held_bytes_ += node::round_up_to_page(bytes + spare_bytes);
  std::erase_if(with_spare_, [](const auto& other) { return other.expired(); });
  with_spare_.push_back(block);
  return block;
}

bool TableMemory::use(const std::shared_ptr<std::byte>& block, std::size_t bytes) {
  const std::lock_guard lock(mutex_);
  Bury& owner = owner_of(block);
  if (bytes > owner.bytes) return false;
  owner.used_bytes = std::max(owner.used_bytes, bytes);
  return true;
}

std::byte* TableMemory::take_kept(std::size_t bytes) {
  const std::lock_guard lock(mutex_);
  if (num_resting() >= look_at_) {
    release_unused(Unused::kResting);
    look_at_ = num_resting() + kMostUnseen;
  }
  const auto same = std::find_if(kept_.begin(), kept_.end(), [bytes](const Kept& kept) { return kept.bytes == bytes; });
  if (same == kept_.end()) return nullptr;
  std::byte* const data = same->data;
  kept_.erase(same);
  return data;
}

Result<std::shared_ptr<std::byte>> TableMemory::take_for_calls(std::size_t bytes) {
  const std::size_t pages = node::round_up_to_page(bytes);
  if (std::byte* const kept = take_kept(pages)) {
    return std::shared_ptr<std::byte>(kept, Keep{shared_from_this(), pages});
  }
  const Result<std::byte*> data = take_block(bytes, false);
  if (!data.ok()) return data.status();
  {
    const std::lock_guard lock(mutex_);
    held_bytes_ += pages;
  }
  return std::shared_ptr<std::byte>(*data, Keep{shared_from_this(), pages});
}

void TableMemory::shrink(const std::shared_ptr<std::byte>& block, std::size_t bytes) {
  const std::lock_guard lock(mutex_);
  cut(block.get(), owner_of(block), bytes);
}

void TableMemory::cut(std::byte* data, Bury& owner, std::size_t bytes) {
  const std::size_t held = node::round_up_to_page(owner.bytes);
  const std::size_t kept = node::round_up_to_page(bytes);
  owner.bytes = bytes;
  owner.used_bytes = std::min(owner.used_bytes, bytes);
  if (kept == held) return;
  arena_->give(data + kept, held - kept);
  held_bytes_ -= held - kept;
}

void TableMemory::give_back_spare() {
  std::vector<std::shared_ptr<std::byte>> blocks;  // the last owner must not release a block under the lock
  const std::lock_guard lock(mutex_);
  for (const std::weak_ptr<std::byte>& block : with_spare_) {
    blocks.push_back(block.lock());
    if (blocks.back() == nullptr) continue;
    Bury& owner = owner_of(blocks.back());
    if (owner.used_bytes < owner.bytes) cut(blocks.back().get(), owner, owner.used_bytes);
  }
  with_spare_.clear();
}

Result<Buffer> TableMemory::allocate(std::size_t bytes) {
  const Result<std::byte*> data = take_block(bytes, false);
  if (!data.ok()) return data.status();
  auto owner = std::shared_ptr<void>(*data, [memory = shared_from_this(), bytes](void* block) {
    memory->bury_buffer(static_cast<std::byte*>(block), bytes);
  });
  if (bytes > 0) {
    if (Status status = arena_->zero(*data, bytes); !status.ok()) return status;
  }
  return Buffer(std::move(owner), *data, bytes);
}

std::size_t TableMemory::held_bytes() {
  const std::lock_guard lock(mutex_);
  reap();
  return held_bytes_;
}

void TableMemory::close() {
  const std::lock_guard lock(mutex_);
  closed_ = true;
  reap();
}

void TableMemory::after_calls(std::function<void()> release) try {
  const std::lock_guard lock(mutex_);
  resting_.push_back(std::move(release));
  if (closed_) reap();
} catch (const std::bad_alloc&) {
  // Called from destructors: memory that cannot be recorded stays allocated until the group ends.
}

void TableMemory::bury(std::byte* data, std::size_t bytes) {
  after_calls([this, data, bytes] {
    arena_->give(data, bytes);
    held_bytes_ -= node::round_up_to_page(bytes);
  });
}

void TableMemory::keep(std::byte* data, std::size_t bytes) try {
  const std::lock_guard lock(mutex_);
  kept_.push_back({data, bytes});
  if (closed_) reap();
} catch (const std::bad_alloc&) {
  // As in after_calls.
}

void TableMemory::bury_buffer(std::byte* data, std::size_t bytes) {
  after_calls([this, data, bytes] { arena_->give(data, bytes); });
  // At once if no call is under way: memory_usage shows it, and a program may drop a Buffer to make room.
  const std::lock_guard lock(mutex_);
  reap();
}

void TableMemory::release_finished() {
  const std::lock_guard lock(mutex_);
  release_unused(Unused::kResting);
}

void TableMemory::look_through() {
  const std::lock_guard lock(mutex_);
  reap();
}

void TableMemory::reap() { release_unused(kept_.empty() ? Unused::kResting : Unused::kKeptToo); }

void TableMemory::release_unused(Unused what) {
  const bool kept = what == Unused::kKeptToo;
  if (resting_.empty() && resting_earlier_.empty() && !kept) return;
  if (closed_) return release_all();
  const DeviceGuard guard(arena_->device());
  if (!guard.status().ok()) return;
  const RelaxedCapture relaxed;
  const auto is_over = [this](std::size_t event) {
    const Result<bool> done = is_done(events_[event]);
    return done.ok() && *done;
  };
  if (!resting_earlier_.empty()) {
    if (!is_over(earlier_)) return;
    for (const auto& release : resting_earlier_) release();
    resting_earlier_.clear();
  }
  if (resting_.empty() && !kept) return;
  if (is_over(last_)) {
    release_resting();
    if (kept) release_kept();
    return;
  }
  earlier_ = last_;
  resting_earlier_.swap(resting_);
}

void TableMemory::release_resting() {
  for (std::vector<std::function<void()>>* rest : {&resting_earlier_, &resting_}) {
    for (const auto& release : *rest) release();
    rest->clear();
  }
}

void TableMemory::release_all() {
  release_resting();
  release_kept();
}

void TableMemory::release_kept() {
  for (const Kept& kept : kept_) {
    arena_->give(kept.data, kept.bytes);
    held_bytes_ -= kept.bytes;
  }
  kept_.clear();
}

}  // namespace ferry::cuda
