#ifndef FERRY_DEVICE_MEMORY_ORDER_CUH
#define FERRY_DEVICE_MEMORY_ORDER_CUH

/// Replaces include/ferry/device/memory_order.cuh where kernels are emulated. Every load of a word gives other threads
/// a turn, and every change of a word may. One thread of the kernels runs at a time; host threads may run beside them.

#include <cstddef>
#include <cstdint>
#include <cstring>

#include "emulator/emulator.hpp"

namespace ferry::device {

template <typename Word>
Word polled_load(const Word* address) {
  emulator::poll();
  return __atomic_load_n(address, __ATOMIC_ACQUIRE);
}

struct GpuMemory {
  static std::uint64_t load_acquire_system(const std::uint64_t* address) { return polled_load(address); }
  static std::uint64_t load_relaxed_system(const std::uint64_t* address) { return polled_load(address); }
  static std::uint32_t load_acquire_device(const std::uint32_t* address) { return polled_load(address); }
  static std::uint64_t load_acquire_device(const std::uint64_t* address) { return polled_load(address); }
  static std::uint32_t load_relaxed_device(const std::uint32_t* address) { return polled_load(address); }
  static std::uint64_t load_relaxed_device(const std::uint64_t* address) { return polled_load(address); }
  static std::uint32_t load_acquire_block(const std::uint32_t* address) { return polled_load(address); }
  static std::uint32_t load_relaxed_block(const std::uint32_t* address) { return polled_load(address); }
  static void load_pair_acquire_system(const std::uint64_t* address, std::uint64_t& first, std::uint64_t& second) {
    // Other threads may run between the two, as between words of a vector.
    first = load_acquire_system(address);
    second = load_acquire_system(address + 1);
  }
  static void store_pair_relaxed_system(std::uint64_t* address, std::uint64_t first, std::uint64_t second) {
    change(address, first);
    change(address + 1, second);
  }
  static void store_relaxed_device(std::uint64_t* address, std::uint64_t value) { change(address, value); }
  static void store_relaxed_system(std::uint64_t* address, std::uint64_t value) { change(address, value); }
  static void store_release_system(std::uint64_t* address, std::uint64_t value) { change(address, value); }
  static void store_release_system(std::uint32_t* address, std::uint32_t value) { change(address, value); }
  static void store_release_device(std::uint32_t* address, std::uint32_t value) { change(address, value); }
  static void store_release_device(std::uint64_t* address, std::uint64_t value) { change(address, value); }
  static void store_release_block(std::uint32_t* address, std::uint32_t value) { change(address, value); }
  static std::uint64_t add_device(std::uint64_t* address, std::uint64_t value) {
    emulator::about_to_store();
    return __atomic_fetch_add(address, value, __ATOMIC_ACQ_REL);
  }
  static std::uint32_t add_acq_rel_device(std::uint32_t* address, std::uint32_t value) {
    emulator::about_to_store();
    return __atomic_fetch_add(address, value, __ATOMIC_ACQ_REL);
  }
  static void add_release_device(std::uint32_t* address, std::uint32_t value) { add_acq_rel_device(address, value); }
  static std::uint64_t max_device(std::uint64_t* address, std::uint64_t value) {
    emulator::about_to_store();
    const std::uint64_t before = *address;
    *address = before < value ? value : before;
    return before;
  }
  static std::uint64_t or_acquire_device(std::uint64_t* address, std::uint64_t bits) {
    emulator::about_to_store();
    return __atomic_fetch_or(address, bits, __ATOMIC_ACQ_REL);
  }
  static std::uint64_t swap_acquire_device(std::uint64_t* address, std::uint64_t value) {
    return change(address, value);
  }
  static std::uint64_t add_system(std::uint64_t* address, std::uint64_t value) { return add_device(address, value); }
  static void add_release_system(std::uint64_t* address, std::uint64_t value) { add_device(address, value); }
  static std::uint64_t compare_swap_device(std::uint64_t* address, std::uint64_t expected, std::uint64_t desired) {
    return compare_swap_system(address, expected, desired);
  }
  static std::uint64_t compare_swap_system(std::uint64_t* address, std::uint64_t expected, std::uint64_t desired) {
    emulator::about_to_store();
    __atomic_compare_exchange_n(address, &expected, desired, false, __ATOMIC_ACQ_REL, __ATOMIC_ACQUIRE);
    return expected;
  }
  static std::uint32_t compare_swap_system(std::uint32_t* address, std::uint32_t expected, std::uint32_t desired) {
    emulator::about_to_store();
    __atomic_compare_exchange_n(address, &expected, desired, false, __ATOMIC_ACQ_REL, __ATOMIC_ACQUIRE);
    return expected;
  }
  static std::uint32_t add_system(std::uint32_t* address, std::uint32_t value) {
    return add_acq_rel_device(address, value);
  }
  static void add_release_system(std::uint32_t* address, std::uint32_t value) { add_acq_rel_device(address, value); }
  template <typename Word>
  static Word swap_system(Word* address, Word value) {
    return change(address, value);
  }
  template <typename Word>
  static Word and_system(Word* address, Word value) {
    emulator::about_to_store();
    return __atomic_fetch_and(address, value, __ATOMIC_ACQ_REL);
  }
  template <typename Word>
  static Word or_system(Word* address, Word value) {
    emulator::about_to_store();
    return __atomic_fetch_or(address, value, __ATOMIC_ACQ_REL);
  }
  template <typename Word>
  static Word xor_system(Word* address, Word value) {
    emulator::about_to_store();
    return __atomic_fetch_xor(address, value, __ATOMIC_ACQ_REL);
  }
  static void max_release_device(std::uint64_t* address, std::uint64_t value) {
    emulator::about_to_store();
    if (value > *address) *address = value;
  }
  static void fence_system() {}
  static void fence_device() {}
  static void fence_total_system() {}
  static void fence_async_proxy() {}
  template <typename Unit>
  static Unit load_fresh(const Unit* address) {
    return *address;
  }
  template <bool kFresh>
  static void copy_unit(std::byte* to, const std::byte* from, unsigned num_bytes) {
    std::memcpy(to, from, num_bytes);
  }
  static std::uint64_t now_ns() { return emulator::now_ns(); }

 private:
  template <typename Word>
  static Word change(Word* address, Word value) {
    emulator::about_to_store();
    return __atomic_exchange_n(address, value, __ATOMIC_ACQ_REL);
  }
};

}  // namespace ferry::device

#endif  // FERRY_DEVICE_MEMORY_ORDER_CUH
