#ifndef FERRY_CUDA_MEMORY_CARD_MEMORY_HPP
#define FERRY_CUDA_MEMORY_CARD_MEMORY_HPP

/// GPU memory that network cards read and write by themselves (GPUDirect).

#include <cstddef>
#include <functional>
#include <memory>

#include "ferry/status.hpp"

namespace ferry::cuda {

/// `bytes` of it, of undefined content, mapped for `device` alone; freed with the last copy of the pointer, when no
/// card uses it any more.
/// @errors kSystem: too little memory; kUnsupported, kCuda: the driver refuses
Result<std::shared_ptr<std::byte>> take_card_memory(int device, std::size_t bytes);

/// What has to be called, on any thread of the host, between a card's writes and the moment at which kernels of
/// `device` are told of them. Null where the device sees them in order.
/// @errors kUnsupported: it does not, and the driver has no such call
Result<std::function<Status()>> card_write_flush(int device);

}  // namespace ferry::cuda

#endif  // FERRY_CUDA_MEMORY_CARD_MEMORY_HPP
