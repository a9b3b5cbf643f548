#ifndef FERRY_CUDA_MEMORY_CARD_MEMORY_HPP
#define FERRY_CUDA_MEMORY_CARD_MEMORY_HPP

/// GPU memory that network cards read and write directly (GPUDirect).

#include <cstddef>
#include <memory>
#include <string_view>

#include "ferry/status.hpp"

namespace ferry::cuda {

/// Allocates `bytes` with undefined content, mapped for `device` alone. Freed with the last copy of the pointer, when
/// no card uses the memory any more. `operation`: the call whose error it is.
/// @errors kSystem: too little memory; kUnsupported, kCuda: the driver refuses
Result<std::shared_ptr<std::byte>> take_card_memory(int device, std::size_t bytes,
                                                    std::string_view operation = "Group::create");

/// Whether kernels of `device` see what a card wrote into its memory before what the card wrote into the host's memory
/// later.
/// @errors kCuda: there is no such device
Result<bool> cards_write_in_order(int device);

}  // namespace ferry::cuda

#endif  // FERRY_CUDA_MEMORY_CARD_MEMORY_HPP
