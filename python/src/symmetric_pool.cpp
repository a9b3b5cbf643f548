#include "symmetric_pool.hpp"

#include <sys/types.h>

#include <new>
#include <unordered_map>
#include <utility>

namespace ferry::python {
namespace {

thread_local SymmetricPool* entered = nullptr;

struct Segment {
  std::weak_ptr<SymmetricPool> pool;
  Buffer buffer;
};

struct Segments {
  std::mutex mutex;
  std::unordered_map<void*, Segment> by_address;  // guarded by mutex
};

/// Never destroyed: torch still frees segments while the process exits.
Segments& segments() {
  static auto* const all = new Segments;
  return *all;
}

}  // namespace

void SymmetricPool::enter() { entered = this; }

void SymmetricPool::leave() { entered = nullptr; }

void* SymmetricPool::take(std::size_t bytes) try {
  Result<Buffer> buffer = group_->allocate(bytes);
  if (!buffer.ok()) {
    const std::lock_guard lock(mutex_);
    error_ = buffer.status();
    return nullptr;
  }
  void* const data = buffer->data();
  Segments& all = segments();
  const std::lock_guard lock(all.mutex);
  all.by_address[data] = {weak_from_this(), std::move(*buffer)};
  return data;
} catch (const std::bad_alloc&) {
  return nullptr;
}

Status SymmetricPool::take_error() {
  const std::lock_guard lock(mutex_);
  return std::exchange(error_, Status());
}

void SymmetricPool::retire(Buffer segment) {
  const std::lock_guard lock(mutex_);
  retired_.push_back(std::move(segment));
}

void SymmetricPool::reclaim() {
  std::vector<Buffer> unused;
  const std::lock_guard lock(mutex_);
  unused.swap(retired_);
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
  Segment segment;
  {
    Segments& all = segments();
    const std::lock_guard lock(all.mutex);
    const auto found = all.by_address.find(data);
    if (found == all.by_address.end()) return;
    segment = std::move(found->second);
    all.by_address.erase(found);
  }
  if (const std::shared_ptr<SymmetricPool> pool = segment.pool.lock()) pool->retire(std::move(segment.buffer));
}
}
