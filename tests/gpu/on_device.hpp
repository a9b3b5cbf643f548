#ifndef FERRY_TESTS_ON_DEVICE_HPP
#define FERRY_TESTS_ON_DEVICE_HPP

#include <vector>

#include "support/device_memory.hpp"

namespace ferry::test {

/// A vector's copy on the GPU.
template <typename T>
class OnDevice {
 public:
  explicit OnDevice(const std::vector<T>& values) : memory_(values.size() * sizeof(T)) {
    if (!values.empty()) copy_to_device(memory_.data(), values.data(), values.size() * sizeof(T));
  }
  void read(std::vector<T>& values) const {
    if (!values.empty()) copy_from_device(values.data(), memory_.data(), values.size() * sizeof(T));
  }
  void* data() const { return memory_.data(); }

 private:
  DeviceMemory memory_;
};

}  // namespace ferry::test

#endif  // FERRY_TESTS_ON_DEVICE_HPP
