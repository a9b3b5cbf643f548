#ifndef FERRY_TESTS_EMULATED_GPUS_HOST_HPP
#define FERRY_TESTS_EMULATED_GPUS_HOST_HPP

/// A host whose GPUs are emulated: what the CUDA runtime and driver in this folder are made of. Kernels run on a thread
/// of their own (emulator/emulator.hpp), beside the host threads that queue them.

#include <cuda_runtime_api.h>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>

#include "emulated_gpus/graph.hpp"
#include "emulator/emulator.hpp"

namespace ferry::emulated {

/// Few multiprocessors, which ranks that share a GPU divide: as many as five nodes of one rank need.
inline constexpr int kNumSms = 48;
inline constexpr int kSharedBytesPerBlock = 232448;  ///< as on Hopper
inline constexpr std::size_t kMemoryBytes = std::size_t{1} << 37;
inline constexpr int kComputeMajor = 9;

/// FERRY_EMULATED_GPUS in the environment; one if it is not set.
int num_devices();

/// Of the calling thread.
int current_device();
cudaError_t set_device(int device);

/// What cudaStream_t points to.
struct Stream {
  cudaStream_t queue = nullptr;  ///< of the machine
  int device = 0;
  bool blocks = false;  ///< calls on the default stream wait for it
  std::shared_ptr<Capture> capture;
  int branch = 0;  ///< of the capture
};

/// What cudaEvent_t points to.
struct Event {
  emulator::Mark mark;
  std::shared_ptr<std::atomic<std::uint64_t>> reached_ns;  ///< of the kernels' clock
  std::shared_ptr<Capture> capture;                        ///< recorded in it, at `op_idx`
  int op_idx = -1;
};

/// The host's machine, running.
emulator::Machine& machine();

/// Of a handle, which may be one of the default streams.
Stream& stream_of(cudaStream_t handle);
Stream* make_stream(bool blocks);
void drop_stream(Stream* stream);

/// The streams of the capture are no longer captured.
void end_capture(const std::shared_ptr<Capture>& capture);

/// Queues on the stream, or records in its capture.
void submit(Stream& stream, Work work);

/// Until what is queued on the stream is done.
void finish(const Stream& stream);
/// All streams of the host that block, or all.
void finish_blocking_streams();
void finish_all_streams();

/// Kernels of this process that nobody had asked about before they were launched for the first time.
int num_kernels_loaded_by_launches();

/// What the calling thread's last failed call left behind.
cudaError_t& last_error();
inline cudaError_t result(cudaError_t error) {
  if (error != cudaSuccess) last_error() = error;
  return error;
}

}  // namespace ferry::emulated

#endif  // FERRY_TESTS_EMULATED_GPUS_HOST_HPP
