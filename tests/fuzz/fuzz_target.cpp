#include "fuzz_target.hpp"

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <new>

namespace {

// Atomic, as libFuzzer has a thread of its own.
std::atomic<std::size_t> largest_allocation_bytes = 0;

}  // namespace

// Replaces all but the aligned and the array forms. The sanitizers have their own versions of each, and memory must be
// freed by the allocator that it came from.
void* operator new(std::size_t num_bytes, const std::nothrow_t&) noexcept {
  if (num_bytes > largest_allocation_bytes.load(std::memory_order_relaxed)) {
    largest_allocation_bytes.store(num_bytes, std::memory_order_relaxed);
  }
  return std::malloc(std::max<std::size_t>(num_bytes, 1));
}

void* operator new(std::size_t num_bytes) {
  void* memory = operator new(num_bytes, std::nothrow);
  if (memory == nullptr) throw std::bad_alloc();
  return memory;
}

void operator delete(void* memory) noexcept { std::free(memory); }
void operator delete(void* memory, std::size_t) noexcept { std::free(memory); }
void operator delete(void* memory, const std::nothrow_t&) noexcept { std::free(memory); }

namespace ferry::test {

void require(bool holds, std::string_view what) {
  if (holds) return;
  std::fprintf(stderr, "fuzz target: check failed: %.*s\n", static_cast<int>(what.size()), what.data());
  std::abort();
}

void require_refusal(const Status& status, ErrorCode code) {
  require(status.code() == code, "a refusal has the documented code");
  require(!status.message().empty(), "a refusal has a message");
}

bool same_bytes(std::span<const std::byte> a, std::span<const std::byte> b) {
  return a.size() == b.size() && (a.empty() || std::memcmp(a.data(), b.data(), a.size()) == 0);
}

AllocationWatch::AllocationWatch() { largest_allocation_bytes.store(0, std::memory_order_relaxed); }

std::size_t AllocationWatch::largest_bytes() const { return largest_allocation_bytes.load(std::memory_order_relaxed); }

}  // namespace ferry::test
