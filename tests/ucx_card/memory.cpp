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

void ucp_mem::end_all_uses() {
  is_gone_ = true;
  while (num_uses_ != 0) std::this_thread::yield();
}

namespace ferry::ucx_card {
namespace {

/// Null if the processor reaches the memory.
GpuCopies* copies_of(const ucp_mem& region) {
  return region.type == UCS_MEMORY_TYPE_CUDA ? region.context->copies.get() : nullptr;
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
  constexpr std::size_t kWord = sizeof(std::uint64_t);
  const auto is_aligned = [](const std::byte* address) {
    return reinterpret_cast<std::uintptr_t>(address) % kWord == 0;
  };
  for (std::size_t at = 0; at < num_bytes;) {
    if (num_bytes - at >= kWord && is_aligned(to + at) && is_aligned(from + at)) {
      const std::uint64_t word = __atomic_load_n(reinterpret_cast<const std::uint64_t*>(from + at), __ATOMIC_RELAXED);
      __atomic_store_n(reinterpret_cast<std::uint64_t*>(to + at), word, __ATOMIC_RELAXED);
      at += kWord;
    } else {
      const unsigned char byte = __atomic_load_n(reinterpret_cast<const unsigned char*>(from + at), __ATOMIC_RELAXED);
      __atomic_store_n(reinterpret_cast<unsigned char*>(to + at), byte, __ATOMIC_RELAXED);
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
