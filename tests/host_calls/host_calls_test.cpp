/// CUDA calls that Ferry's calls on GPUs make, and state that they leave on the host.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdlib>
#include <memory>
#include <thread>
#include <vector>

#include "bench/launch_recorder.hpp"
#include "ferry/ferry.hpp"
#include "host_calls/counted_cuda.hpp"

namespace ferry::test {
namespace {

using ::testing::ContainerEq;

constexpr int kNumTokens = 4;
constexpr int kHidden = 128;
constexpr int kNumTopk = 2;
constexpr int kNumExperts = 8;

/// A group of one rank with tensors for its calls. No kernel ever runs, so no call waits for one.
class HostCalls : public testing::Test {
 protected:
  void SetUp() override {
    // The "ipc" path shares memory without the driver.
    ASSERT_EQ(setenv("FERRY_CUDA_MEMORY", "ipc", 1), 0);
    GroupOptions options;
    options.backend = "cuda";
    options.device = 0;
    options.arena_bytes = std::size_t{64} << 20;
    LatencyShape shape;
    shape.backend = "cuda";
    shape.num_ranks = 1;
    shape.max_tokens = kNumTokens;
    shape.num_topk = kNumTopk;
    shape.dispatch_row_bytes = shape.combine_row_bytes = kHidden * 2;
    options.latency_bytes = latency_bytes_required(shape).value();
    group_ = Group::create(create_in_process_bootstraps(1).value()[0], options).value();
    for (std::size_t i = 0; i < ids_.size(); ++i) ids_[i] = static_cast<std::int64_t>(i) % kNumExperts;
    out_ = group_->allocate(rows_.size() * sizeof(rows_[0])).value();
  }

  void TearDown() override {
    stay_behind(0);
    unsetenv("FERRY_CUDA_MEMORY");
  }

  TensorView rows(void* data) const { return {data, DType::kBfloat16, {kNumTokens, kHidden}}; }
  ConstTensorView topk_idx() const { return {ids_.data(), DType::kInt64, {kNumTokens, kNumTopk}}; }

  Result<Routing> latency_dispatch(bool split = false) {
    LatencyDispatchOptions options;
    options.num_experts = kNumExperts;
    options.max_tokens = options.slab_capacity = kNumTokens;
    options.split = split;
    if (asks_for_waits_) options.wait_times_ns = TensorView(wait_times_.data(), DType::kInt64, {1});
    LatencyDispatchInput in;
    in.x = rows(rows_.data());
    in.topk_idx = topk_idx();
    return group_->latency_dispatch(in, {slab()}, options, stream_);
  }
  TensorView slab() { return {slab_.data(), DType::kBfloat16, {kNumExperts, kNumTokens, kHidden}}; }
  Status latency_combine(const Routing& routing) {
    LatencyCombineInput in;
    in.x = slab();
    in.topk_weights = ConstTensorView(weights_.data(), DType::kFloat32, {kNumTokens, kNumTopk});
    LatencyCombineOptions options;
    if (asks_for_waits_) options.wait_times_ns = TensorView(wait_times_.data(), DType::kInt64, {1});
    return group_->latency_combine(routing, in, {rows(sums_.data())}, stream_, options);
  }

  /// CUDA calls of a call that follows similar ones. Pointer queries are left out: they are made for tensors outside
  /// the group's memory, and their number depends on the tensors' positions.
  template <typename Call>
  CudaCalls calls_of(const Call& call) {
    for (int i = 0; i < 3; ++i) {
      take_cuda_calls();
      call();
    }
    CudaCalls calls = take_cuda_calls();
    calls.erase("cuPointerGetAttributes");
    return calls;
  }

  std::vector<std::uint16_t> rows_ = std::vector<std::uint16_t>(kNumTokens * kHidden);
  std::vector<std::uint16_t> sums_ = rows_;
  std::vector<std::uint16_t> slab_ = std::vector<std::uint16_t>(kNumExperts * kNumTokens * kHidden);
  std::vector<std::int64_t> ids_ = std::vector<std::int64_t>(kNumTokens * kNumTopk);
  std::vector<float> weights_ = std::vector<float>(kNumTokens * kNumTopk);
  std::vector<std::int64_t> wait_times_ = std::vector<std::int64_t>(1);
  bool asks_for_waits_ = false;
  int stream_of_test_ = 0;
  Stream stream_{&stream_of_test_};
  std::shared_ptr<Group> group_;
  Buffer out_;
};

/// The launch, the event for which later calls and freed memory wait, and two queries of the stream.
CudaCalls least_calls() {
  return {{"launch", 1}, {"cuEventRecord", 1}, {"cuStreamGetId", 1}, {"cuStreamIsCapturing", 1}};
}

TEST_F(HostCalls, ACachedCallAsksLittleOfCuda) {
  RouteOptions options;
  options.num_experts = kNumExperts;
  options.max_recv_rows = kNumTokens;
  const Routing routing = group_->route({topk_idx()}, options, stream_).value();
  DispatchInput dispatch;
  dispatch.x = rows(rows_.data());
  EXPECT_THAT(calls_of([&] { EXPECT_TRUE(group_->dispatch(routing, dispatch, {rows(out_.data())}, stream_).ok()); }),
              ContainerEq(least_calls()));
  CombineInput combine;
  combine.x = rows(out_.data());
  EXPECT_THAT(calls_of([&] { EXPECT_TRUE(group_->combine(routing, combine, {rows(sums_.data())}, stream_).ok()); }),
              ContainerEq(least_calls()));
}

/// Tensors that name their device need no query.
TEST_F(HostCalls, NoDriverCallIsMadeForKnownMemory) {
  const Routing routing = latency_dispatch().value();
  const auto questions = [&] {
    take_cuda_calls();
    EXPECT_TRUE(latency_dispatch().ok());
    EXPECT_TRUE(latency_combine(routing).ok());
    return take_cuda_calls()["cuPointerGetAttributes"];
  };
  EXPECT_GT(questions(), 0);
  {
    const KnownMemory outer;
    { const KnownMemory inner; }
    EXPECT_EQ(questions(), 0);
  }
  EXPECT_GT(questions(), 0);
}

TEST_F(HostCalls, ACallOfLatencyModeAsksLittleOfCuda) {
  Routing routing;
  EXPECT_THAT(calls_of([&] { routing = latency_dispatch().value(); }), ContainerEq(least_calls()));
  EXPECT_THAT(calls_of([&] { EXPECT_TRUE(latency_combine(routing).ok()); }), ContainerEq(least_calls()));
  EXPECT_THAT(calls_of([&] {
                routing = latency_dispatch(true).value();
                take_cuda_calls();
                EXPECT_TRUE(group_->latency_receive(routing, stream_).ok());
              }),
              ContainerEq(least_calls()));
}

/// Functions of a destroyed context must not be launched.
TEST_F(HostCalls, EachContextHasFunctionsOfItsOwn) {
  const CudaCalls first = [this] {
    reset_context();
    take_cuda_calls();
    EXPECT_TRUE(latency_dispatch().ok());
    return take_cuda_calls();
  }();
  EXPECT_EQ(first.at("cudaGetFuncBySymbol"), 1);
  EXPECT_EQ(first.at("launch"), 1);
  EXPECT_THAT(calls_of([&] { EXPECT_TRUE(latency_dispatch().ok()); }), ContainerEq(least_calls()));
}

TEST_F(HostCalls, AKernelThatIsNoFunctionOfTheDriverIsLaunchedByTheRuntime) {
  reset_context();
  hide_functions(true);
  take_cuda_calls();
  EXPECT_TRUE(latency_dispatch().ok());
  EXPECT_EQ(take_cuda_calls()["launch"], 1);
  hide_functions(false);
  EXPECT_THAT(calls_of([&] { EXPECT_TRUE(latency_dispatch().ok()); }), ContainerEq(least_calls()));
}

/// Calls without wait times are unchanged.
TEST_F(HostCalls, AskingWhatACallWaitsForIsTwoLaunchesMore) {
  asks_for_waits_ = true;
  CudaCalls expected = least_calls();
  expected["launch"] += 2;
  Routing routing;
  EXPECT_THAT(calls_of([&] { routing = latency_dispatch().value(); }), ContainerEq(expected));
  EXPECT_THAT(calls_of([&] { EXPECT_TRUE(latency_combine(routing).ok()); }), ContainerEq(expected));
  EXPECT_THAT(calls_of([&] {
                routing = latency_dispatch(true).value();
                take_cuda_calls();
                EXPECT_TRUE(group_->latency_receive(routing, stream_).ok());
              }),
              ContainerEq(expected));
}

/// Calls as in decoding: the program requests no counts, nor anything else that would look for memory of old Routings.
TEST_F(HostCalls, LatencyModeGoesOnForeverWithoutBeingAsked) {
  constexpr int kNumCalls = 5000;
  constexpr int kMostQuestions = kNumCalls / 25;
  for (const int behind : {0, 20, 300}) {
    stay_behind(behind);
    take_cuda_calls();
    for (int call = 0; call < kNumCalls; ++call) {
      const Result<Routing> routing = latency_dispatch();
      ASSERT_TRUE(routing.ok()) << "call " << call << ", " << behind << " behind: " << routing.status().message();
    }
    EXPECT_LE(take_cuda_calls()["cuEventQuery"], kMostQuestions) << behind << " behind";
  }
}

/// Calls on alternating streams, which the event orders.
TEST_F(HostCalls, CallsOfOtherStreamsWaitForEarlierOnes) {
  int other = 0;
  const Stream first = stream_;
  ASSERT_TRUE(latency_dispatch().ok());
  for (int i = 0; i < 4; ++i) {
    stream_ = i % 2 == 0 ? Stream{&other} : first;
    take_cuda_calls();
    ASSERT_TRUE(latency_dispatch().ok());
    EXPECT_EQ(take_cuda_calls()["cudaStreamWaitEvent"], 1);
    ASSERT_TRUE(latency_dispatch().ok());
    EXPECT_EQ(take_cuda_calls()["cudaStreamWaitEvent"], 0);
  }
}

/// Rows that dispatch quantises are staged. Batches of a program differ by some tokens, and growing the memory is slow.
TEST_F(HostCalls, StagingThatHasGrownHasRoomToSpareWhileThereIsMemory) {
  constexpr int kMostTokens = 68;
  constexpr int kManyChannels = 4096;
  constexpr std::size_t kPageBytes = 4096;
  const std::vector<std::uint16_t> tokens(static_cast<std::size_t>(kMostTokens) * kManyChannels);
  const std::vector<std::int64_t> ids(kMostTokens);
  std::vector<std::uint8_t> rows(tokens.size());
  std::vector<float> scales(static_cast<std::size_t>(kMostTokens) * kManyChannels / 128);
  const auto route = [&](int num_tokens) {
    RouteOptions options;
    options.num_experts = kNumExperts;
    options.max_recv_rows = num_tokens;
    return group_->route({ConstTensorView(ids.data(), DType::kInt64, {num_tokens, 1})}, options, stream_).value();
  };
  const Routing few = route(32);
  const Routing many = route(64);
  const Routing some_more = route(66);
  const Routing most = route(kMostTokens);
  const auto staged = [&](const Routing& routing) {
    const std::int64_t num_tokens = routing.num_tokens();
    DispatchInput in;
    in.x = ConstTensorView(tokens.data(), DType::kBfloat16, {num_tokens, kManyChannels});
    DispatchOutput out;
    out.x = TensorView(rows.data(), DType::kFloat8E4M3, {num_tokens, kManyChannels});
    out.scales = TensorView(scales.data(), DType::kFloat32, {num_tokens, kManyChannels / 128});
    DispatchOptions options;
    options.quantize = Quantization::kFp8;
    EXPECT_TRUE(group_->dispatch(routing, in, out, stream_, options).ok());
    return group_->memory_usage().staging_bytes;
  };
  const std::size_t first = staged(few);
  const std::size_t grown = staged(many);
  EXPECT_GT(grown, first);
  EXPECT_EQ(staged(some_more), grown);

  std::vector<Buffer> rest;
  for (Result<Buffer> page = group_->allocate(kPageBytes); page.ok(); page = group_->allocate(kPageBytes)) {
    rest.push_back(std::move(page).value());
  }
  const std::size_t without_spare = group_->memory_usage().staging_bytes;
  EXPECT_LT(without_spare, grown);
  EXPECT_EQ(staged(some_more), without_spare);  // calls keep the bytes that they have used
  rest.clear();
  EXPECT_GT(staged(most), without_spare);  // more than is left of the staging memory
}

std::vector<KernelLaunch>& seen_launches() {
  static std::vector<KernelLaunch> seen;
  return seen;
}

/// Kernels that one call launches.
template <typename Call>
std::vector<KernelLaunch> launches_of(const Call& call) {
  seen_launches().clear();
  observe_launches([](const KernelLaunch& launch) { seen_launches().push_back(launch); });
  call();
  observe_launches(nullptr);
  return seen_launches();
}

/// A program can thus find how much of the GPU a call takes when the library chooses.
TEST_F(HostCalls, AnObserverSeesTheBlocksOfEveryLaunch) {
  RouteOptions route;
  route.num_experts = kNumExperts;
  route.max_recv_rows = kNumTokens;
  const Routing routing = group_->route({topk_idx()}, route, stream_).value();
  std::vector<std::uint16_t> received(rows_.size());
  DispatchInput in;
  in.x = rows(rows_.data());
  const auto dispatch = [&](void* out, const KernelOptions& kernel) {
    DispatchOptions options;
    options.kernel = kernel;
    EXPECT_TRUE(group_->dispatch(routing, in, {rows(out)}, stream_, options).ok());
  };
  const auto combine = [&](void* x, const KernelOptions& kernel) {
    CombineInput input;
    input.x = rows(x);
    CombineOptions options;
    options.kernel = kernel;
    EXPECT_TRUE(group_->combine(routing, input, {rows(sums_.data())}, stream_, options).ok());
  };
  KernelOptions five;
  five.num_sms = 5;
  five.num_copy_sms = 2;
  for (const bool dispatches : {true, false}) {
    SCOPED_TRACE(dispatches ? "dispatch" : "combine");
    const auto seen = [&](void* memory, const KernelOptions& kernel) {
      return launches_of([&] { dispatches ? dispatch(memory, kernel) : combine(memory, kernel); });
    };
    const std::vector<KernelLaunch> staged = seen(received.data(), five);
    ASSERT_EQ(staged.size(), 1U);
    EXPECT_EQ(staged[0].num_blocks, 5);
    EXPECT_EQ(staged[0].num_copy_blocks, 2);
    EXPECT_GT(staged[0].num_threads, 0);
    const std::vector<KernelLaunch> by_default = seen(received.data(), {});
    ASSERT_EQ(by_default.size(), 1U);
    EXPECT_GT(by_default[0].num_copy_blocks, 0);
    EXPECT_GT(by_default[0].num_blocks, by_default[0].num_copy_blocks);
    const std::vector<KernelLaunch> symmetric = seen(out_.data(), five);
    ASSERT_EQ(symmetric.size(), 1U);
    EXPECT_EQ(symmetric[0].num_blocks, 5);
    if (!dispatches) {
      EXPECT_EQ(symmetric[0].num_copy_blocks, 0);
    }
  }
  EXPECT_EQ(launches_of([&] { EXPECT_TRUE(latency_dispatch().ok()); }).size(), 1U);
  dispatch(out_.data(), {});
  EXPECT_EQ(seen_launches().size(), 1U) << "a call after the last observed one";
}

/// As in `ferry bench`, whose ranks may be threads of one process.
TEST_F(HostCalls, ARecorderKeepsTheLaunchesOfItsThread) {
  tools::CallLaunches own;
  tools::CallLaunches none;
  {
    const tools::LaunchRecorder recorder(&own);
    std::thread([&] { const tools::LaunchRecorder of_other_thread(&none); }).join();
    ASSERT_TRUE(latency_dispatch().ok());
    std::thread([&] { ASSERT_TRUE(latency_dispatch().ok()); }).join();
  }
  ASSERT_TRUE(latency_dispatch().ok());
  EXPECT_EQ(own.num_launches, 1U);
  EXPECT_GT(own.launches[0].num_blocks, 0);
  EXPECT_EQ(none.num_launches, 0U);
  {
    const tools::LaunchRecorder recorder(&own);
    for (std::size_t i = 0; i < tools::kMaxLaunches; ++i) ASSERT_TRUE(latency_dispatch().ok());
  }
  EXPECT_EQ(own.num_launches, tools::kMaxLaunches + 1);
  observe_launches(nullptr);
}

}  // namespace
}  // namespace ferry::test
