/// GPU memory for network cards, tested without a card: it can be allocated, used by the GPU, and freed.

#include "cuda/memory/card_memory.hpp"

#include <cuda_runtime_api.h>
#include <gtest/gtest.h>

#include <cstddef>
#include <vector>

#include "cuda/context/gpu_direct.hpp"

namespace ferry::test {
namespace {

constexpr int kDevice = 0;

TEST(CardMemory, IsTakenUsedAndGivenBack) {
  const GpuDirectFact fact = cuda::gpu_direct_part(kDevice).registration;
  if (!fact.present) GTEST_SKIP() << fact.observed;
  ASSERT_EQ(cudaSetDevice(kDevice), cudaSuccess);
  constexpr std::size_t kBytes = (std::size_t{5} << 20) + 128;  // not a multiple of the driver's granularity
  std::size_t free_before = 0;
  std::size_t free_while = 0;
  std::size_t free_after = 0;
  std::size_t total = 0;
  ASSERT_EQ(cudaMemGetInfo(&free_before, &total), cudaSuccess);
  {
    const auto memory = cuda::take_card_memory(kDevice, kBytes);
    ASSERT_TRUE(memory.ok()) << memory.status().to_string();
    ASSERT_EQ(cudaMemset(memory->get(), 0x5a, kBytes), cudaSuccess);
    std::vector<std::byte> copy(kBytes);
    ASSERT_EQ(cudaMemcpy(copy.data(), memory->get(), kBytes, cudaMemcpyDeviceToHost), cudaSuccess);
    EXPECT_EQ(copy, std::vector<std::byte>(kBytes, std::byte{0x5a}));
    ASSERT_EQ(cudaMemGetInfo(&free_while, &total), cudaSuccess);
    EXPECT_LE(free_while + kBytes, free_before);
  }
  ASSERT_EQ(cudaMemGetInfo(&free_after, &total), cudaSuccess);
  EXPECT_GE(free_after, free_while + kBytes);
}

TEST(CardMemory, CannotBeHadOfAGpuThatIsNotThere) {
  EXPECT_FALSE(cuda::take_card_memory(4096, 1).ok());
  EXPECT_FALSE(cuda::cards_write_in_order(4096).ok());
}

}  // namespace
}  // namespace ferry::test
