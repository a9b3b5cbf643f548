#include "symmetric_pool.hpp"

#include <sys/types.h>

#include <algorithm>
#include <iterator>
#include <new>
#include <unordered_map>
#include <utility>

namespace ferry::python {
namespace {

/// Largest step that is taken ahead: four outputs of 8192 rows of 14 KiB.
constexpr std::size_t kMaxStepBytes = std::size_t{512} << 20;

/// Segments are multiples of this: a page of the group's memory.
constexpr std::size_t kPageBytes = 4096;

thread_local SymmetricPool* entered = nullptr;

struct Segments {
  std::mutex mutex;
  std::unordered_map<void*, SymmetricPool::Segment> by_address;  // guarded by mutex
};

/// Never destroyed: torch still frees segments while the process exits.
Segments& segments() {
  static auto* const all = new Segments;
  return *all;
}

}  // namespace

SymmetricPool::Chunk::Chunk(Buffer buffer) : buffer_(std::move(buffer)) { free_[0] = size_bytes(); }

bool SymmetricPool::Chunk::is_unused() const { return free_.size() == 1 && free_.begin()->second == size_bytes(); }

std::optional<std::size_t> SymmetricPool::Chunk::take(std::size_t bytes) {
  const auto found = std::find_if(free_.begin(), free_.end(), [bytes](const auto& one) { return one.second >= bytes; });
  if (found == free_.end()) return std::nullopt;
  const auto [offset, size] = *found;
  if (size > bytes) free_[offset + bytes] = size - bytes;
  free_.erase(offset);
  return offset;
}

void SymmetricPool::Chunk::give(std::size_t offset, std::size_t bytes) {
  auto here = free_.emplace(offset, bytes).first;
  if (const auto next = std::next(here); next != free_.end() && offset + bytes == next->first) {
    here->second += next->second;
    free_.erase(next);
  }
  if (here == free_.begin()) return;
  if (const auto before = std::prev(here); before->first + before->second == offset) {
    before->second += here->second;
    free_.erase(here);
  }
}

void SymmetricPool::enter() { entered = this; }

void SymmetricPool::leave() { entered = nullptr; }

std::optional<SymmetricPool::Segment> SymmetricPool::take_from_chunks(std::size_t bytes) {
  const std::lock_guard lock(mutex_);
  for (const std::shared_ptr<Chunk>& chunk : chunks_) {
    if (const std::optional<std::size_t> offset = chunk->take(bytes)) {
      return Segment{weak_from_this(), chunk, *offset, bytes};
    }
  }
  return std::nullopt;
}

Status SymmetricPool::grow(std::size_t bytes) {
  std::size_t held_bytes = 0;
  {
    const std::lock_guard lock(mutex_);
    for (const std::shared_ptr<Chunk>& chunk : chunks_) held_bytes += chunk->size_bytes();
  }
  const std::size_t step_bytes = std::max(bytes, std::min(held_bytes, kMaxStepBytes));
  Result<Buffer> buffer = group_->allocate(step_bytes);
  if (!buffer.ok() && step_bytes > bytes) buffer = group_->allocate(bytes);
  if (!buffer.ok()) return buffer.status();
  auto chunk = std::make_shared<Chunk>(std::move(*buffer));
  const std::lock_guard lock(mutex_);
  chunks_.push_back(std::move(chunk));
  return {};
}

void* SymmetricPool::take(std::size_t bytes) try {
  const std::size_t rounded = std::max<std::size_t>((bytes + kPageBytes - 1) / kPageBytes, 1) * kPageBytes;
  std::optional<Segment> segment = take_from_chunks(rounded);
  if (!segment) {
    if (const Status status = grow(rounded); !status.ok()) {
      const std::lock_guard lock(mutex_);
      error_ = status;
      return nullptr;
    }
    segment = take_from_chunks(rounded);
    if (!segment) return nullptr;
  }
  void* const data = segment->chunk->at(segment->offset);
  Segments& all = segments();
  const std::lock_guard lock(all.mutex);
  all.by_address[data] = std::move(*segment);
  return data;
} catch (const std::bad_alloc&) {
  return nullptr;
}

Status SymmetricPool::take_error() {
  const std::lock_guard lock(mutex_);
  return std::exchange(error_, Status());
}

void SymmetricPool::retire(Segment segment) {
  const std::lock_guard lock(mutex_);
  retired_.push_back(std::move(segment));
}

void SymmetricPool::reclaim() {
  // Freed after the lock, as the group has locks of its own.
  std::vector<std::shared_ptr<Chunk>> unused;
  std::vector<Segment> retired;
  const std::lock_guard lock(mutex_);
  retired.swap(retired_);
  for (const Segment& segment : retired) segment.chunk->give(segment.offset, segment.bytes);
  const auto first = std::stable_partition(chunks_.begin(), chunks_.end(),
                                           [](const std::shared_ptr<Chunk>& chunk) { return !chunk->is_unused(); });
  unused.assign(std::make_move_iterator(first), std::make_move_iterator(chunks_.end()));
  chunks_.erase(first, chunks_.end());
}

}  // namespace ferry::python

extern "C" {

/// Signatures of torch.cuda.memory.CUDAPluggableAllocator. Between SymmetricPool::leave and enter every allocation
/// fails.
__attribute__((visibility("default"))) void* ferry_segment_alloc(ssize_t bytes, int /*device*/, void* /*stream*/) {
  return ferry::python::entered == nullptr || bytes < 0 ? nullptr
                                                        : ferry::python::entered->take(static_cast<std::size_t>(bytes));
}

__attribute__((visibility("default"))) void ferry_segment_free(void* data, ssize_t /*bytes*/, int /*device*/,
                                                               void* /*stream*/) {
  using namespace ferry::python;
  SymmetricPool::Segment segment;
  {
    Segments& all = segments();
    const std::lock_guard lock(all.mutex);
    const auto found = all.by_address.find(data);
    if (found == all.by_address.end()) return;
    segment = std::move(found->second);
    all.by_address.erase(found);
  }
  if (const std::shared_ptr<SymmetricPool> pool = segment.pool.lock()) pool->retire(std::move(segment));
}
}
