#ifndef FERRY_CUDA_MEMORY_CARD_MEMORY_HPP
#define FERRY_CUDA_MEMORY_CARD_MEMORY_HPP

/// GPU memory that network cards read and write directly (GPUDirect).

#include <cstddef>
#include <functional>
#include <memory>

#include "ferry/status.hpp"

namespace ferry::cuda {

/// Allocates `bytes` with undefined content, mapped for `device` alone. Freed with the last copy of the pointer, when
/// no card uses the memory any more.
/// @errors kSystem: too little memory; kUnsupported, kCuda: the driver refuses
Result<std::shared_ptr<std::byte>> take_card_memory(int device, std::size_t bytes);

/// Function to call, on any host thread, between a card's writes and the moment at which kernels of `device` learn of
/// them. Null if the device sees the writes in order.
/// @errors kUnsupported: the device does not see them in order, and the driver has no such call
Result<std::function<Status()>> card_write_flush(int device);

}  // namespace ferry::cuda

#endif  // FERRY_CUDA_MEMORY_CARD_MEMORY_HPP
