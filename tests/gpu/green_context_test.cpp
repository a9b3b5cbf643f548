/// Calls on streams of green contexts: a kernel has more blocks than there is room for at the same time, and the others
/// begin when these end.

#include <cuda.h>
#include <cuda_runtime_api.h>
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <array>
#include <utility>

#include "gpu/gpu_group.hpp"

namespace ferry::test {
namespace {

constexpr int kNumRanks = 2;

/// The driver's functions for green contexts, which it has since CUDA 12.4.
struct GreenFunctions {
  decltype(&cuDeviceGetDevResource) get_resource = nullptr;
  decltype(&cuDevSmResourceSplitByCount) split = nullptr;
  decltype(&cuDevResourceGenerateDesc) describe = nullptr;
  decltype(&cuGreenCtxCreate) create = nullptr;
  decltype(&cuGreenCtxDestroy) destroy = nullptr;
  decltype(&cuGreenCtxStreamCreate) create_stream = nullptr;

  static GreenFunctions load() {
    GreenFunctions found;
    look_up("cuDeviceGetDevResource", found.get_resource);
    look_up("cuDevSmResourceSplitByCount", found.split);
    look_up("cuDevResourceGenerateDesc", found.describe);
    look_up("cuGreenCtxCreate", found.create);
    look_up("cuGreenCtxDestroy", found.destroy);
    look_up("cuGreenCtxStreamCreate", found.create_stream);
    return found;
  }
  bool complete() const {
    return get_resource != nullptr && split != nullptr && describe != nullptr && create != nullptr &&
           destroy != nullptr && create_stream != nullptr;
  }

 private:
  template <typename Function>
  static void look_up(const char* name, Function& function) {
    constexpr unsigned kVersion = 12040;
    void* address = nullptr;
    cudaDriverEntryPointQueryResult result = cudaDriverEntryPointSymbolNotFound;
    if (cudaGetDriverEntryPointByVersion(name, &address, kVersion, cudaEnableDefault, &result) != cudaSuccess) return;
    if (result == cudaDriverEntryPointSuccess) function = reinterpret_cast<Function>(address);
  }
};

/// A stream whose kernels have as few multiprocessors as the driver gives: 8 on compute capability 9.0. Ranks that
/// share a GPU have different ones.
class GreenStream {
 public:
  GreenStream(const RankContext& context, const GreenFunctions& functions) : functions_(functions) {
    CUdevResource all{};
    std::array<CUdevResource, kNumRanks> parts{};
    unsigned num_parts = kNumRanks;
    CUdevResourceDesc description{};
    const auto part = static_cast<std::size_t>(context.rank());
    const auto succeed = [this](CUresult result) { ok_ = ok_ && result == CUDA_SUCCESS; };
    succeed(functions.get_resource(current_device(), &all, CU_DEV_RESOURCE_TYPE_SM));
    if (ok_) succeed(functions.split(parts.data(), &num_parts, &all, nullptr, 0, kFewSms));
    ok_ = ok_ && num_parts == kNumRanks;
    if (ok_) succeed(functions.describe(&description, &parts[part], 1));
    if (ok_) succeed(functions.create(&green_, description, current_device(), CU_GREEN_CTX_DEFAULT_STREAM));
    if (ok_) succeed(functions.create_stream(&stream_, green_, CU_STREAM_NON_BLOCKING, 0));
  }
  ~GreenStream() {
    if (stream_ != nullptr) cudaStreamDestroy(stream_);
    if (green_ != nullptr) functions_.destroy(green_);
  }
  GreenStream(const GreenStream&) = delete;
  GreenStream& operator=(const GreenStream&) = delete;

  bool ok() const { return ok_; }
  Stream get() const { return {stream_}; }

 private:
  static constexpr unsigned kFewSms = 2;

  const GreenFunctions& functions_;
  bool ok_ = true;
  CUgreenCtx green_ = nullptr;
  CUstream stream_ = nullptr;
};

PreparedCase case_of(Layout layout, MemoryKind memory) {
  ExchangeCase one;
  one.name = fmt::format("layout {}, memory {}", static_cast<int>(layout), static_cast<int>(memory));
  // More tokens than the warps of all summing blocks, so that each waits for rows.
  one.world = {.num_ranks = kNumRanks, .num_topk = 4, .num_experts = 16, .max_tokens = 400};
  one.world.layout = layout;
  one.world.spare_slab_rows = 2;
  one.memory = memory;
  one.dispatches = {{.hidden = 64, .num_scales = 3}};
  one.combines = {{.hidden = 64, .weighted = true}};
  return prepare(one);
}

class GreenContext : public testing::TestWithParam<std::pair<Layout, MemoryKind>> {};

TEST_P(GreenContext, CallsGoOnWithFewMultiprocessors) {
  const GreenFunctions functions = GreenFunctions::load();
  if (!functions.complete()) GTEST_SKIP() << "the driver has no green contexts: it is older than CUDA 12.4";
  const PreparedCase prepared = case_of(GetParam().first, GetParam().second);
  run_gpu_group(RankKind::kThreads, kNumRanks, [&](RankContext& context, Group& group) {
    const GreenStream stream(context, functions);
    context.expect(stream.ok(), "a green context");
    meet(context);
    if (!stream.ok()) return;
    Round round(context, group, prepared);
    meet(context);
    if (!round.start(context, group, stream.get())) return;
    if (context.expect_ok(group.wait(stream.get()), "wait")) round.expect_received(context);
    meet(context);
  });
}

std::string name_of(const testing::TestParamInfo<std::pair<Layout, MemoryKind>>& test) {
  constexpr std::array<const char*, 3> kLayouts = {"tokens", "experts", "slab"};
  return fmt::format("{}_{}", kLayouts[static_cast<std::size_t>(test.param.first)],
                     test.param.second == MemoryKind::kPlain ? "plain" : "symmetric");
}

INSTANTIATE_TEST_SUITE_P(Calls, GreenContext,
                         testing::Values(std::pair{Layout::kTokens, MemoryKind::kPlain},
                                         std::pair{Layout::kExperts, MemoryKind::kPlain},
                                         std::pair{Layout::kSlab, MemoryKind::kPlain},
                                         std::pair{Layout::kTokens, MemoryKind::kSymmetric}),
                         name_of);

}  // namespace
}  // namespace ferry::test
