#ifndef FERRY_TESTS_LITMUS_HOST_HPP
#define FERRY_TESTS_LITMUS_HOST_HPP

/// Host side of the litmus tests: memory and streams of one or two GPUs, without the library. No function waits for a
/// kernel without a deadline.

#include <cuda_runtime_api.h>

#include <chrono>
#include <cstddef>
#include <initializer_list>
#include <vector>

#include "cuda/sync/control.hpp"
#include "cuda/sync/rank_params.hpp"
#include "cuda/sync/report.hpp"
#include "gpu/litmus_kernels.hpp"

namespace ferry::test {

/// Throws the GPU's error, if there is one.
void check_cuda(cudaError_t error, const char* what);

/// Number of GPUs of this process. The first call makes CUDA load all kernels at startup: a kernel that is loaded while
/// another one runs may wait for that one.
int num_litmus_gpus();
/// Lets two GPUs reach each other's memory; false if they cannot.
bool connect_gpus(int one, int other);

/// Zeroed memory of a GPU.
class GpuBytes {
 public:
  GpuBytes(int gpu, std::size_t num_bytes);
  ~GpuBytes();
  GpuBytes(GpuBytes&& other) noexcept;
  GpuBytes& operator=(GpuBytes&&) = delete;

  std::byte* data() const { return data_; }
  template <typename T>
  T* as() const {
    return reinterpret_cast<T*>(data_);
  }
  /// Only while no kernel runs.
  void read(void* to, std::size_t num_bytes) const;
  void write(const void* from, std::size_t num_bytes) const;

 private:
  std::byte* data_ = nullptr;
};

/// A device array whose contents tests read on the host to compare.
template <typename T>
class GpuArray {
 public:
  GpuArray(int gpu, std::size_t size) : bytes_(gpu, size * sizeof(T)), size_(size) {}
  GpuArray(int gpu, const std::vector<T>& values) : GpuArray(gpu, values.size()) {
    bytes_.write(values.data(), values.size() * sizeof(T));
  }
  T* data() const { return bytes_.as<T>(); }
  std::vector<T> read() const {
    std::vector<T> values(size_);
    bytes_.read(values.data(), size_ * sizeof(T));
    return values;
  }

 private:
  GpuBytes bytes_;
  std::size_t size_;
};

/// A stream that waits for no other stream.
class GpuStream {
 public:
  explicit GpuStream(int gpu);
  ~GpuStream();
  GpuStream(GpuStream&& other) noexcept;
  GpuStream& operator=(GpuStream&&) = delete;

  /// Prepares a launch: makes the GPU current on the calling thread.
  cudaStream_t enter() const;

 private:
  friend void finish(std::initializer_list<const GpuStream*> streams);
  friend void finish(const std::vector<const GpuStream*>& streams);

  int gpu_;
  cudaStream_t stream_ = nullptr;
  cudaEvent_t event_ = nullptr;
};

/// Waits until all work on the streams is done. Ends the program with a message after a minute: the kernels' own
/// deadlines have then failed, and no later CUDA call would return.
void finish(std::initializer_list<const GpuStream*> streams);
void finish(const std::vector<const GpuStream*>& streams);

/// Arenas of some ranks, with control words only, and each rank's RankParams.
class LitmusRanks {
 public:
  /// Rank r is on gpus[r].
  LitmusRanks(const std::vector<int>& gpus, std::chrono::nanoseconds timeout);
  ~LitmusRanks();
  LitmusRanks(const LitmusRanks&) = delete;
  LitmusRanks& operator=(const LitmusRanks&) = delete;

  cuda::RankParams params(int rank) const;
  /// Report of the rank's kernels to the host.
  cuda::DeviceReport& report(int rank) const { return reports_[rank]; }
  cuda::LocalState local(int rank) const;
  std::uint64_t progress(int rank, int sender) const;
  void set_progress(int rank, int sender, std::uint64_t value) const;
  void set_done(int rank, int sender, std::uint64_t epoch) const;

 private:
  cuda::Control control(int rank) const;

  std::vector<GpuBytes> arenas_;
  std::vector<std::byte*> bases_;          ///< base address of each arena
  cuda::DeviceReport* reports_ = nullptr;  ///< [ranks] pinned
  std::chrono::nanoseconds timeout_;
};

}  // namespace ferry::test

#endif  // FERRY_TESTS_LITMUS_HOST_HPP
