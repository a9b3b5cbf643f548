#include "support/device_memory.hpp"

#include <algorithm>
#include <cctype>
#include <cstdlib>
#include <filesystem>
#include <iterator>
#include <map>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <string>
#include <utility>

#ifdef FERRY_WITH_CUDA
#include <cuda_runtime_api.h>
#endif

namespace ferry::test {

int num_device_files() {
  std::error_code error;
  int count = 0;
  for (const auto& entry : std::filesystem::directory_iterator("/dev", error)) {
    const std::string name = entry.path().filename().string();
    constexpr std::string_view kPrefix = "nvidia";
    if (name.size() > kPrefix.size() && name.starts_with(kPrefix) &&
        std::all_of(name.begin() + kPrefix.size(), name.end(), [](unsigned char c) { return std::isdigit(c) != 0; }))
      ++count;
  }
  // The driver shows only the devices that this variable lists.
  const char* const visible = std::getenv("CUDA_VISIBLE_DEVICES");
  if (visible == nullptr) return count;
  const std::string_view list = visible;
  const auto num_listed = list.empty() ? 0 : 1 + std::count(list.begin(), list.end(), ',');
  return std::min(count, static_cast<int>(num_listed));
}

#ifdef FERRY_WITH_CUDA

namespace {

void check(cudaError_t error, const char* what) {
  if (error != cudaSuccess) throw std::runtime_error(std::string(what) + ": " + cudaGetErrorString(error));
}

cudaStream_t raw(Stream stream) { return static_cast<cudaStream_t>(stream.handle); }

/// One block of a device's memory, with its free ranges by offset.
class Pool {
 public:
  explicit Pool(std::size_t num_bytes) {
    check(cudaMalloc(&base_, num_bytes), "cudaMalloc of the tests' memory");
    free_[0] = num_bytes;
  }

  std::byte* take(std::size_t num_bytes) {
    const auto at = std::find_if(free_.begin(), free_.end(), [&](const auto& one) { return one.second >= num_bytes; });
    if (at == free_.end()) throw std::runtime_error("the tests' device memory is used up; enter with more");
    const auto [offset, size] = *at;
    free_.erase(at);
    if (size > num_bytes) free_[offset + num_bytes] = size - num_bytes;
    return static_cast<std::byte*>(base_) + offset;
  }

  void give_back(const std::byte* data, std::size_t num_bytes) {
    const auto offset = static_cast<std::size_t>(data - static_cast<std::byte*>(base_));
    auto at = free_.emplace(offset, num_bytes).first;
    if (const auto next = std::next(at); next != free_.end() && at->first + at->second == next->first) {
      at->second += next->second;
      free_.erase(next);
    }
    if (at == free_.begin()) return;
    const auto before = std::prev(at);
    if (before->first + before->second != at->first) return;
    before->second += at->second;
    free_.erase(at);
  }

 private:
  void* base_ = nullptr;
  std::map<std::size_t, std::size_t> free_;
};

/// Pools and streams of this process. Never destroyed: the driver may shut down before static objects are destroyed.
struct Holdings {
  std::mutex mutex;
  std::map<int, Pool> pools;
  std::map<int, std::vector<cudaStream_t>> idle_streams;
};

Holdings& holdings() {
  static auto* const all = new Holdings;
  return *all;
}

std::size_t rounded(std::size_t num_bytes) { return (num_bytes + 511) / 512 * 512; }

/// Stream of a thread, for as long as the thread lives.
struct ThreadStream {
  ~ThreadStream() {
    if (stream == nullptr) return;
    const std::lock_guard lock(holdings().mutex);
    holdings().idle_streams[device].push_back(stream);
  }
  int device = -1;
  cudaStream_t stream = nullptr;
};

void spin(void* duration) {
  const std::unique_ptr<std::chrono::microseconds> owned(static_cast<std::chrono::microseconds*>(duration));
  const auto end = std::chrono::steady_clock::now() + *owned;
  while (std::chrono::steady_clock::now() < end) {
  }
}

}  // namespace

int num_devices() {
  int count = 0;
  return cudaGetDeviceCount(&count) == cudaSuccess ? count : 0;
}

void enter_device(int device, std::size_t pool_bytes) {
  check(cudaSetDevice(device), "cudaSetDevice");
  reserve_device_memory(device, pool_bytes);
  // The first copies of a process initialise CUDA's internals: do it now, while no other rank waits for this one.
  std::vector<std::byte> some(std::size_t{1} << 20);
  const DeviceMemory memory(some.size());
  copy_to_device(memory.data(), some.data(), some.size());
  copy_from_device(some.data(), memory.data(), some.size());
  fill_device(memory.data(), std::byte{0}, some.size());
}

void reserve_device_memory(int device, std::size_t pool_bytes) {
  const int mine = current_device();
  check(cudaSetDevice(device), "cudaSetDevice");
  {
    const std::lock_guard lock(holdings().mutex);
    if (!holdings().pools.contains(device)) holdings().pools.try_emplace(device, pool_bytes);
  }
  check(cudaSetDevice(mine), "cudaSetDevice");
}

int current_device() {
  int device = 0;
  check(cudaGetDevice(&device), "cudaGetDevice");
  return device;
}

void use_device(int device) { check(cudaSetDevice(device), "cudaSetDevice"); }

DeviceMemory::DeviceMemory(std::size_t num_bytes, int device) : device_(device), num_bytes_(rounded(num_bytes)) {
  if (num_bytes == 0) return;
  const std::lock_guard lock(holdings().mutex);
  const auto pool = holdings().pools.find(device);
  if (pool == holdings().pools.end()) throw std::runtime_error("no memory of this device was reserved");
  data_ = pool->second.take(num_bytes_);
}

DeviceMemory::~DeviceMemory() {
  if (data_ == nullptr) return;
  const std::lock_guard lock(holdings().mutex);
  holdings().pools.at(device_).give_back(data_, num_bytes_);
}

Stream thread_stream() {
  thread_local ThreadStream mine;
  const int device = current_device();
  if (mine.stream != nullptr && mine.device != device)
    throw std::runtime_error("a test thread must stay on one device");
  if (mine.stream == nullptr) {
    const std::lock_guard lock(holdings().mutex);
    std::vector<cudaStream_t>& idle = holdings().idle_streams[device];
    if (idle.empty()) {
      check(cudaStreamCreateWithFlags(&mine.stream, cudaStreamNonBlocking), "cudaStreamCreate");
    } else {
      mine.stream = idle.back();
      idle.pop_back();
    }
    mine.device = device;
  }
  return {mine.stream};
}

void copy_to_device(void* to, const void* from, std::size_t num_bytes) {
  if (num_bytes == 0) return;
  const Stream stream = thread_stream();
  check(cudaMemcpyAsync(to, from, num_bytes, cudaMemcpyDefault, raw(stream)), "copy to the device");
  synchronize(stream);
}

void copy_from_device(void* to, const void* from, std::size_t num_bytes) {
  if (num_bytes == 0) return;
  const Stream stream = thread_stream();
  check(cudaMemcpyAsync(to, from, num_bytes, cudaMemcpyDefault, raw(stream)), "copy from the device");
  synchronize(stream);
}

void fill_device(void* to, std::byte value, std::size_t num_bytes) {
  const Stream stream = thread_stream();
  check(cudaMemsetAsync(to, std::to_integer<int>(value), num_bytes, raw(stream)), "fill");
  synchronize(stream);
}

void synchronize(Stream stream) { check(cudaStreamSynchronize(raw(stream)), "cudaStreamSynchronize"); }

bool is_idle(Stream stream) {
  const cudaError_t state = cudaStreamQuery(raw(stream));
  if (state != cudaErrorNotReady) check(state, "cudaStreamQuery");
  (void)cudaGetLastError();
  return state == cudaSuccess;
}

void enqueue_delay(Stream stream, std::chrono::microseconds duration) {
  check(cudaLaunchHostFunc(raw(stream), spin, std::make_unique<std::chrono::microseconds>(duration).release()),
        "cudaLaunchHostFunc");
}

std::string pending_device_error() {
  const cudaError_t error = cudaPeekAtLastError();
  return error == cudaSuccess ? "" : cudaGetErrorName(error);
}

void leave_device_error() { (void)cudaSetDevice(-1); }
void clear_device_error() { (void)cudaGetLastError(); }

OwnedStream::OwnedStream() {
  cudaStream_t stream = nullptr;
  check(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "cudaStreamCreate");
  stream_ = {stream};
}

OwnedStream::OwnedStream(int device) {
  const int mine = current_device();
  check(cudaSetDevice(device), "cudaSetDevice");
  cudaStream_t stream = nullptr;
  const cudaError_t error = cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking);
  check(cudaSetDevice(mine), "cudaSetDevice");
  check(error, "cudaStreamCreate");
  stream_ = {stream};
}

OwnedStream OwnedStream::blocking() {
  cudaStream_t stream = nullptr;
  check(cudaStreamCreateWithFlags(&stream, cudaStreamDefault), "cudaStreamCreate");
  return OwnedStream(Stream{stream});
}

OwnedStream::~OwnedStream() { (void)cudaStreamDestroy(raw(stream_)); }

CapturedGraph::~CapturedGraph() {
  if (executable_ != nullptr) (void)cudaGraphExecDestroy(static_cast<cudaGraphExec_t>(executable_));
  if (graph_ != nullptr) (void)cudaGraphDestroy(static_cast<cudaGraph_t>(graph_));
}

void CapturedGraph::begin(Stream stream) {
  stream_ = stream;
  check(cudaStreamBeginCapture(raw(stream), cudaStreamCaptureModeThreadLocal), "cudaStreamBeginCapture");
}

void CapturedGraph::begin_relaxed(Stream stream) {
  stream_ = stream;
  check(cudaStreamBeginCapture(raw(stream), cudaStreamCaptureModeRelaxed), "cudaStreamBeginCapture");
}

void CapturedGraph::end() {
  cudaGraph_t graph = nullptr;
  const cudaError_t error = cudaStreamEndCapture(raw(stream_), &graph);
  if (spoilt_) {
    clear_device_error();
    return;
  }
  check(error, "cudaStreamEndCapture");
  graph_ = graph;
}

void CapturedGraph::spoil() {
  if (cudaStreamSynchronize(raw(stream_)) == cudaSuccess) throw std::runtime_error("the stream is not captured");
  clear_device_error();
  spoilt_ = true;
}

void CapturedGraph::prepare() {
  cudaGraphExec_t executable = nullptr;
  check(cudaGraphInstantiate(&executable, static_cast<cudaGraph_t>(graph_), 0), "cudaGraphInstantiate");
  executable_ = executable;
  check(cudaGraphUpload(executable, raw(stream_)), "cudaGraphUpload");
  synchronize(stream_);
}

void CapturedGraph::launch() {
  check(cudaGraphLaunch(static_cast<cudaGraphExec_t>(executable_), raw(stream_)), "cudaGraphLaunch");
}

#else

namespace {

[[noreturn]] void refuse() { throw std::runtime_error("these tests were built without CUDA"); }

}  // namespace

int num_devices() { return 0; }
void enter_device(int /*device*/, std::size_t /*pool_bytes*/) { refuse(); }
void reserve_device_memory(int /*device*/, std::size_t /*pool_bytes*/) { refuse(); }
int current_device() { refuse(); }
void use_device(int /*device*/) { refuse(); }
DeviceMemory::DeviceMemory(std::size_t /*num_bytes*/, int /*device*/) { refuse(); }
DeviceMemory::~DeviceMemory() = default;
Stream thread_stream() { refuse(); }
void copy_to_device(void* /*to*/, const void* /*from*/, std::size_t /*num_bytes*/) { refuse(); }
void copy_from_device(void* /*to*/, const void* /*from*/, std::size_t /*num_bytes*/) { refuse(); }
void fill_device(void* /*to*/, std::byte /*value*/, std::size_t /*num_bytes*/) { refuse(); }
void synchronize(Stream /*stream*/) { refuse(); }
bool is_idle(Stream /*stream*/) { refuse(); }
void enqueue_delay(Stream /*stream*/, std::chrono::microseconds /*duration*/) { refuse(); }
std::string pending_device_error() { refuse(); }
void leave_device_error() { refuse(); }
void clear_device_error() { refuse(); }
OwnedStream::OwnedStream() { refuse(); }
OwnedStream::OwnedStream(int /*device*/) { refuse(); }
OwnedStream OwnedStream::blocking() { refuse(); }
OwnedStream::~OwnedStream() = default;
CapturedGraph::~CapturedGraph() = default;
void CapturedGraph::begin(Stream /*stream*/) { refuse(); }
void CapturedGraph::begin_relaxed(Stream /*stream*/) { refuse(); }
void CapturedGraph::end() { refuse(); }
void CapturedGraph::spoil() { refuse(); }
void CapturedGraph::prepare() { refuse(); }
void CapturedGraph::launch() { refuse(); }

#endif

DeviceMemory::DeviceMemory(DeviceMemory&& other) noexcept
    : device_(other.device_), num_bytes_(other.num_bytes_), data_(std::exchange(other.data_, nullptr)) {}

DeviceMemory& DeviceMemory::operator=(DeviceMemory&& other) noexcept {
  std::swap(device_, other.device_);
  std::swap(num_bytes_, other.num_bytes_);
  std::swap(data_, other.data_);
  return *this;
}

}  // namespace ferry::test
