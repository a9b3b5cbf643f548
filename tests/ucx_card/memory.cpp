#include "ucx_card/memory.hpp"

#include <cstring>
#include <thread>
#include <utility>

bool ucp_mem::begin_use() {
  num_uses_.fetch_add(1);
  if (!is_gone_) return true;
  num_uses_.fetch_sub(1);
  return false;
}

void ucp_mem::end_all_uses(const std::function<void()>& help) {
  is_gone_ = true;
  while (num_uses_ != 0) {
    help();
    std::this_thread::yield();
  }
}

namespace ferry::ucx_card {
namespace {

/// Null if the processor reaches the memory.
GpuCopies* copies_of(const ucp_mem& region) {
  return region.type == UCS_MEMORY_TYPE_CUDA ? region.context->copies.get() : nullptr;
}

/// False if no such word is there whole.
template <typename Word>
bool copy_word(std::byte* to, const std::byte* from, std::size_t num_bytes) {
  const auto is_aligned = [](const std::byte* address) {
    return reinterpret_cast<std::uintptr_t>(address) % sizeof(Word) == 0;
  };
  if (num_bytes < sizeof(Word) || !is_aligned(to) || !is_aligned(from)) return false;
  const Word word = __atomic_load_n(reinterpret_cast<const Word*>(from), __ATOMIC_RELAXED);
  __atomic_store_n(reinterpret_cast<Word*>(to), word, __ATOMIC_RELAXED);
  return true;
}

/// Moves aligned 16 bytes at once, as a card does: whoever sees the upper half sees the lower.
bool copy_wide_word(std::byte* to, const std::byte* from, std::size_t num_bytes) {
  constexpr std::size_t kWideBytes = 2 * sizeof(std::uint64_t);
  if (num_bytes < kWideBytes || reinterpret_cast<std::uintptr_t>(to) % kWideBytes != 0 ||
      reinterpret_cast<std::uintptr_t>(from) % sizeof(std::uint64_t) != 0) {
    return false;
  }
  const auto* const words = reinterpret_cast<const std::uint64_t*>(from);
  auto* const into = reinterpret_cast<std::uint64_t*>(to);
  const std::uint64_t lower = __atomic_load_n(words, __ATOMIC_RELAXED);
  const std::uint64_t upper = __atomic_load_n(words + 1, __ATOMIC_RELAXED);
  __atomic_store_n(into, lower, __ATOMIC_RELAXED);
  __atomic_store_n(into + 1, upper, __ATOMIC_RELEASE);
  return true;
}

/// For a card whose time is measured, as fast as the processor copies.
void copy(const ucp_mem& region, std::byte* to, const std::byte* from, std::size_t num_bytes) {
  if (region.context->settings.steady != 0) {
    std::memcpy(to, from, num_bytes);
  } else {
    copy_words(to, from, num_bytes);
  }
}

}  // namespace

void copy_words(std::byte* to, const std::byte* from, std::size_t num_bytes) {
  for (std::size_t at = 0; at < num_bytes;) {
    const std::size_t left = num_bytes - at;
    if (copy_wide_word(to + at, from + at, left)) {
      at += 2 * sizeof(std::uint64_t);
    } else if (copy_word<std::uint64_t>(to + at, from + at, left)) {
      at += sizeof(std::uint64_t);
    } else if (copy_word<std::uint32_t>(to + at, from + at, left)) {
      at += sizeof(std::uint32_t);
    } else {
      (void)copy_word<unsigned char>(to + at, from + at, left);
      ++at;
    }
  }
}

ucs_status_t begin_use(const Port* port, ucp_mem* region, const Range& range) {
  if (port == nullptr || !port->is_open()) return UCS_ERR_ENDPOINT_TIMEOUT;
  if (region == nullptr || region->context != port->context() || !region->contains(range.remote, range.num_bytes)) {
    return UCS_ERR_IO_ERROR;
  }
  return region->begin_use() ? UCS_OK : UCS_ERR_IO_ERROR;
}

ucs_status_t read_memory(const Port* port, ucp_mem* region, const Range& range, std::byte* into) {
  ucs_status_t status = begin_use(port, region, range);
  if (status != UCS_OK) return status;
  {
    // A read does not pass earlier writes on their way to the memory.
    const std::lock_guard lock(region->unseen_mutex);
    for (const Unseen& unseen : std::exchange(region->unseen, {})) {
      copy_words(unseen.at, unseen.bytes.data(), unseen.bytes.size());
    }
  }
  if (GpuCopies* copies = copies_of(*region)) {
    status = copies->copy(into, range.address(), range.end - range.begin);
  } else {
    copy(*region, into, range.address(), range.end - range.begin);
  }
  region->end_use();
  return status;
}

ucs_status_t write_memory(const Port* port, ucp_mem* region, const Range& range, const std::byte* source) {
  ucs_status_t status = begin_use(port, region, range);
  if (status != UCS_OK) return status;
  const std::size_t num_bytes = range.end - range.begin;
  if (GpuCopies* copies = copies_of(*region)) {
    status = copies->copy(range.address(), source, num_bytes);
  } else if (region->type == UCS_MEMORY_TYPE_CUDA && region->context->settings.gpu_lag != 0) {
    const std::lock_guard lock(region->unseen_mutex);
    region->unseen.push_back({range.address(), {source, source + num_bytes}});
  } else {
    copy(*region, range.address(), source, num_bytes);
  }
  region->end_use();
  return status;
}

}  // namespace ferry::ucx_card
