#ifndef FERRY_DEVICE_MEMORY_ORDER_CUH
#define FERRY_DEVICE_MEMORY_ORDER_CUH

/// Replaces include/ferry/device/memory_order.cuh where kernels are emulated. Every load of a word gives other threads
/// a turn, and every change of a word may. One thread of the kernels runs at a time; host threads may run beside them.

#include <cstddef>
#include <cstdint>
#include <cstring>

#include "emulator/emulator.hpp"

namespace ferry::device {

struct GpuMemory {
  static std::uint64_t load_acquire_system(const std::uint64_t* address) {
    emulator::poll();
    return __atomic_load_n(address, __ATOMIC_ACQUIRE);
  }
  static std::uint64_t load_acquire_device(const std::uint64_t* address) { return load_acquire_system(address); }
  static std::uint64_t load_relaxed_device(const std::uint64_t* address) { return load_acquire_system(address); }
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
  static void store_release_device(std::uint64_t* address, std::uint64_t value) { change(address, value); }
  static std::uint64_t add_device(std::uint64_t* address, std::uint64_t value) {
    emulator::about_to_store();
    return __atomic_fetch_add(address, value, __ATOMIC_ACQ_REL);
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
  static void max_release_device(std::uint64_t* address, std::uint64_t value) {
    emulator::about_to_store();
    if (value > *address) *address = value;
  }
  static void fence_system() {}
  static void fence_total_system() {}
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
  static std::uint64_t change(std::uint64_t* address, std::uint64_t value) {
    emulator::about_to_store();
    return __atomic_exchange_n(address, value, __ATOMIC_ACQ_REL);
  }
};

}  // namespace ferry::device

#endif  // FERRY_DEVICE_MEMORY_ORDER_CUH
