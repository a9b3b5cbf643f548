#ifndef FERRY_TESTS_EMULATED_GPUS_HOST_HPP
#define FERRY_TESTS_EMULATED_GPUS_HOST_HPP

/// A host with emulated GPUs, on which the CUDA runtime and driver in this folder are built. Kernels run on a separate
/// thread (emulator/emulator.hpp), beside the host threads that queue them.

#include <cuda_runtime_api.h>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>

#include "emulated_gpus/graph.hpp"
#include "emulator/emulator.hpp"

namespace ferry::emulated {

/// Few multiprocessors, since the time of a call grows with them. The ranks of a GPU share them: three nodes of two
/// ranks need 30.
inline constexpr int kNumSms = 32;
inline constexpr int kSharedBytesPerBlock = 232448;  ///< as on Hopper
inline constexpr std::size_t kMemoryBytes = std::size_t{1} << 37;
inline constexpr int kComputeMajor = 9;

/// Value of FERRY_EMULATED_GPUS in the environment; 1 if it is not set.
int num_devices();

/// Value of FERRY_EMULATED_SMS in the environment; kNumSms if it is not set.
int num_sms();

/// The GPUs' CUGPUDirectRDMAWritesOrdering: FERRY_EMULATED_WRITES_ORDER in the environment; for all devices if that is
/// not set.
int writes_ordering();

/// Device of the calling thread.
int current_device();
cudaError_t set_device(int device);

/// Object behind a cudaStream_t.
struct Stream {
  cudaStream_t queue = nullptr;  ///< queue of the machine
  int device = 0;
  bool blocks = false;  ///< calls on the default stream wait for it
  std::shared_ptr<Capture> capture;
  int branch = 0;  ///< branch of the capture
};

/// Object behind a cudaEvent_t.
struct Event {
  emulator::Mark mark;
  std::shared_ptr<std::atomic<std::uint64_t>> reached_ns;  ///< time on the kernels' clock
  std::shared_ptr<Capture> capture;                        ///< capture in which it was recorded, at `op_idx`
  int op_idx = -1;
};

/// The host's machine, running.
emulator::Machine& machine();

/// Stream of a handle, which may be one of the default streams.
Stream& stream_of(cudaStream_t handle);
Stream* make_stream(bool blocks);
void drop_stream(Stream* stream);

/// Ends the capture: its streams are no longer captured.
void end_capture(const std::shared_ptr<Capture>& capture);

/// Queues the work on the stream, or records it in its capture.
void submit(Stream& stream, Work work);

/// Waits until the work queued on the stream is done.
void finish(const Stream& stream);
/// Wait for all blocking streams of the host, or for all streams.
void finish_blocking_streams();
void finish_all_streams();

/// Number of this process's kernels that were first used by a launch, without an earlier query.
int num_kernels_loaded_by_launches();

/// Error of the calling thread's last failed call.
cudaError_t& last_error();
inline cudaError_t result(cudaError_t error) {
  if (error != cudaSuccess) last_error() = error;
  return error;
}

}  // namespace ferry::emulated

#endif  // FERRY_TESTS_EMULATED_GPUS_HOST_HPP
