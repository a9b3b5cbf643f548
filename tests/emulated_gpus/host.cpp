#include "emulated_gpus/host.hpp"

#include <cuda.h>

#include <charconv>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <list>
#include <mutex>
#include <string>
#include <thread>
#include <utility>

namespace ferry::emulated {
namespace {

struct Host {
  std::mutex mutex;
  std::list<Stream> streams;  ///< guarded by `mutex`
  emulator::Machine machine{1};
  Stream legacy_stream;
};

/// Ends the process on an error inside a kernel, because CUDA would report no such error.
[[noreturn]] void run_kernels(emulator::Machine& machine) {
  const std::string error = machine.run_live();
  std::fprintf(stderr, "emulated GPU: %s\n", error.c_str());
  std::abort();
}

/// Never destroyed: its thread runs as long as the process does.
Host& host() {
  static Host* const made = [] {
    auto* const host = new Host;
    host->legacy_stream.queue = host->machine.add_stream();
    std::thread([host] { run_kernels(host->machine); }).detach();
    return host;
  }();
  return *made;
}

thread_local int device_of_thread = 0;

int number_in_environment(const char* name, int otherwise) {
  const char* const text = std::getenv(name);
  if (text != nullptr) std::from_chars(text, text + std::strlen(text), otherwise);
  return otherwise;
}

}  // namespace

int num_devices() {
  static const int num = number_in_environment("FERRY_EMULATED_GPUS", 1);
  return num;
}

int num_sms() {
  static const int num = number_in_environment("FERRY_EMULATED_SMS", kNumSms);
  return num;
}

int writes_ordering() {
  return number_in_environment("FERRY_EMULATED_WRITES_ORDER", CU_GPU_DIRECT_RDMA_WRITES_ORDERING_ALL_DEVICES);
}

int current_device() { return device_of_thread; }

cudaError_t set_device(int device) {
  if (device < 0 || device >= num_devices()) return cudaErrorInvalidDevice;
  device_of_thread = device;
  return cudaSuccess;
}

emulator::Machine& machine() { return host().machine; }

Stream& stream_of(cudaStream_t handle) {
  const bool is_default = handle == nullptr || handle == cudaStreamLegacy || handle == cudaStreamPerThread;
  return is_default ? host().legacy_stream : *reinterpret_cast<Stream*>(handle);
}

Stream* make_stream(bool blocks) {
  Host& all = host();
  const std::lock_guard lock(all.mutex);
  Stream& stream = all.streams.emplace_back();
  stream.queue = all.machine.add_stream();
  stream.device = current_device();
  stream.blocks = blocks;
  return &stream;
}

void drop_stream(Stream* stream) {
  Host& all = host();
  all.machine.close_stream(stream->queue);
  const std::lock_guard lock(all.mutex);
  all.streams.remove_if([stream](const Stream& one) { return &one == stream; });
}

void end_capture(const std::shared_ptr<Capture>& capture) {
  Host& all = host();
  const std::lock_guard lock(all.mutex);
  for (Stream& stream : all.streams) {
    if (stream.capture == capture) stream.capture = nullptr;
  }
}

void submit(Stream& stream, Work work) {
  if (stream.capture) {
    const std::lock_guard lock(stream.capture->mutex);
    stream.capture->ops.push_back({std::move(work), stream.branch, -1, nullptr});
    return;
  }
  switch (work.kind) {
    case Work::Kind::kGrid:
      machine().launch(stream.queue, work.shape, std::move(work.body));
      break;
    case Work::Kind::kCall:
      machine().enqueue(stream.queue, std::move(work.body));
      break;
    case Work::Kind::kHostFunction:
      machine().enqueue_beside(stream.queue, std::move(work.body));
      break;
  }
}

void finish(const Stream& stream) { machine().wait(machine().mark(stream.queue)); }

namespace {

void finish_streams(bool all_of_them) {
  Host& all = host();
  std::list<emulator::Mark> marks{all.machine.mark(all.legacy_stream.queue)};
  {
    const std::lock_guard lock(all.mutex);
    for (const Stream& stream : all.streams) {
      if (all_of_them || stream.blocks) marks.push_back(all.machine.mark(stream.queue));
    }
  }
  for (const emulator::Mark& mark : marks) all.machine.wait(mark);
}

}  // namespace

void finish_blocking_streams() { finish_streams(false); }
void finish_all_streams() { finish_streams(true); }

cudaError_t& last_error() {
  thread_local cudaError_t error = cudaSuccess;
  return error;
}

}  // namespace ferry::emulated

/// Launch function that the emulated kernels' sources call.
void ferry::emulator::launch_grid(cudaStream_t stream, const GridShape& shape, std::function<void()> body) {
  emulated::submit(emulated::stream_of(stream), {emulated::Work::Kind::kGrid, std::move(body), shape});
}
