#include "support/counted_new.hpp"

#include <malloc.h>

#include <atomic>
#include <cstdlib>
#include <new>

namespace {

std::atomic<std::ptrdiff_t> held_bytes{0};

}  // namespace

namespace ferry::test {

std::size_t new_bytes() {
  const std::ptrdiff_t bytes = held_bytes.load(std::memory_order_relaxed);
  return bytes > 0 ? static_cast<std::size_t>(bytes) : 0;
}

}  // namespace ferry::test

// A sanitizer has its own operator new, to tell new from malloc.
#if !defined(FERRY_SANITIZER_ADDRESS) && !defined(FERRY_SANITIZER_THREAD)

namespace {

void* count_new(void* memory) {
  if (memory == nullptr) throw std::bad_alloc();
  held_bytes.fetch_add(static_cast<std::ptrdiff_t>(malloc_usable_size(memory)), std::memory_order_relaxed);
  return memory;
}

void count_delete(void* memory) noexcept {
  held_bytes.fetch_sub(static_cast<std::ptrdiff_t>(malloc_usable_size(memory)), std::memory_order_relaxed);
  std::free(memory);
}

}  // namespace

// The standard library's other forms, for arrays and without exceptions, call these.
void* operator new(std::size_t num_bytes) { return count_new(std::malloc(num_bytes == 0 ? 1 : num_bytes)); }
void* operator new(std::size_t num_bytes, std::align_val_t align) {
  void* memory = nullptr;
  if (posix_memalign(&memory, static_cast<std::size_t>(align), num_bytes) != 0) memory = nullptr;
  return count_new(memory);
}
void operator delete(void* memory) noexcept { count_delete(memory); }
void operator delete(void* memory, std::size_t) noexcept { count_delete(memory); }
void operator delete(void* memory, std::align_val_t) noexcept { count_delete(memory); }
void operator delete(void* memory, std::size_t, std::align_val_t) noexcept { count_delete(memory); }

#endif
