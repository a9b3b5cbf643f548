#include "ucx_card/gpu_copies.hpp"

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <map>
#include <mutex>
#include <thread>
#include <utility>
#include <vector>

#include "node/pause_core.hpp"
#include "ucx_card/card_mutex.hpp"
#include "ucx_card/gpu_streams.hpp"

namespace ferry::ucx_card {
namespace {

class DriverCopies : public GpuCopies {
 public:
  DriverCopies(const Driver& driver, const GpuCopyOptions& options) : driver_(driver), options_(options) {
    mutex_.set_spins(options.spins);
    thread_ = std::thread([this] { run(); });
  }
  ~DriverCopies() override {
    {
      const std::lock_guard lock(mutex_);
      stopping_ = true;
    }
    changed_.notify_one();
    thread_.join();
  }

  ucs_status_t share(std::byte* address) override {
    CUdeviceptr begin = 0;
    std::size_t num_bytes = 0;
    int num_devices = 0;
    if (driver_.address_range(&begin, &num_bytes, address_of(address)) != CUDA_SUCCESS ||
        driver_.device_count(&num_devices) != CUDA_SUCCESS) {
      return UCS_ERR_IO_ERROR;
    }
    std::vector<CUmemAccessDesc> access;
    for (int device = 0; device < num_devices; ++device) {
      CUmemAccessDesc one{};
      one.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
      one.location.id = device;
      one.flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
      access.push_back(one);
    }
    if (driver_.set_access(begin, num_bytes, access.data(), access.size()) != CUDA_SUCCESS) return UCS_ERR_IO_ERROR;
    const std::lock_guard lock(known_mutex_);
    known_[begin] = {begin + num_bytes, ask_for_device(address)};
    return UCS_OK;
  }

  void forget(std::byte* address) override {
    const std::lock_guard lock(known_mutex_);
    if (const auto found = find_known(address); found != known_.end()) known_.erase(found);
  }

  void start(std::byte* to, const std::byte* from, std::size_t num_bytes, Done done) override {
    {
      const std::lock_guard lock(mutex_);
      new_.push_back({to, from, num_bytes, std::move(done)});
      num_new_.store(new_.size(), std::memory_order_release);
    }
    if (!options_.spins) changed_.notify_one();
  }

  ucs_status_t copy(std::byte* to, const std::byte* from, std::size_t num_bytes) override {
    const std::lock_guard lock(own_mutex_);
    ucs_status_t result = UCS_INPROGRESS;
    GpuCopy copy{to, from, num_bytes, [&result](ucs_status_t status) { result = status; }};
    streams_of(copy, &own_streams_).start(copy);
    while (result == UCS_INPROGRESS) look(&own_streams_);
    return result;
  }

 private:
  struct Known {
    CUdeviceptr end = 0;
    int device = -1;
  };

  void run() {
    // Copies are no part of graphs that other threads capture.
    CUstreamCaptureMode mode = CU_STREAM_CAPTURE_MODE_RELAXED;
    driver_.capture_mode(&mode);
    bool busy = false;
    while (take(busy)) {
      begin_all();
      busy = look(&streams_);
    }
    streams_.clear();
  }

  /// Takes what is new, and sleeps where there is nothing to do. False: end.
  bool take(bool busy) {
    if ((busy || options_.spins) && num_new_.load(std::memory_order_acquire) == 0 &&
        !stopping_.load(std::memory_order_relaxed)) {
      if (!busy) node::pause_core();
      return true;
    }
    std::unique_lock lock(mutex_);
    if (!busy && !options_.spins) changed_.wait(lock, [this] { return stopping_ || !new_.empty(); });
    taken_.swap(new_);
    num_new_.store(0, std::memory_order_relaxed);
    return busy || !stopping_ || !taken_.empty();
  }

  void begin_all() {
    if (taken_.empty()) return;
    std::map<Streams*, std::vector<GpuCopy>> small;
    for (GpuCopy& copy : taken_) {
      if (copy.num_bytes <= options_.small_bytes) small[&streams_of(copy, &streams_)].push_back(std::move(copy));
    }
    for (auto& [streams, copies] : small) streams->start_small(copies);
    for (GpuCopy& copy : taken_) {
      if (copy.num_bytes > options_.small_bytes) streams_of(copy, &streams_).start(copy);
    }
    taken_.clear();
  }

  Streams& streams_of(const GpuCopy& copy, std::map<int, Streams>* all) {
    // The GPU that reads has the copy engine that is fastest between two; memory of the host has none.
    int device = device_of(copy.from);
    if (device < 0) device = device_of(copy.to);
    return all->try_emplace(device, driver_, options_, device < 0 ? 0 : device).first->second;
  }

  /// GPU of memory; -1 for memory of the host.
  int device_of(const std::byte* memory) {
    {
      const std::lock_guard lock(known_mutex_);
      if (const auto found = find_known(memory); found != known_.end()) return found->second.device;
    }
    return ask_for_device(memory);
  }

  int ask_for_device(const std::byte* memory) const {
    unsigned type = 0;
    int device = -1;
    if (driver_.pointer_attribute(&type, CU_POINTER_ATTRIBUTE_MEMORY_TYPE, address_of(memory)) != CUDA_SUCCESS ||
        type != CU_MEMORYTYPE_DEVICE) {
      return -1;
    }
    driver_.pointer_attribute(&device, CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL, address_of(memory));
    return device;
  }

  /// With known_mutex_.
  std::map<CUdeviceptr, Known>::iterator find_known(const std::byte* memory) {
    auto after = known_.upper_bound(address_of(memory));
    if (after == known_.begin()) return known_.end();
    const auto found = std::prev(after);
    return address_of(memory) < found->second.end ? found : known_.end();
  }

  static bool look(std::map<int, Streams>* all) {
    bool busy = false;
    for (auto& [device, streams] : *all) busy |= streams.look();
    return busy;
  }

  const Driver& driver_;
  const GpuCopyOptions options_;
  CardMutex mutex_;
  std::condition_variable_any changed_;
  std::vector<GpuCopy> new_;  // guarded by mutex_
  std::atomic<std::size_t> num_new_{0};
  std::atomic<bool> stopping_{false};
  std::mutex known_mutex_;
  std::map<CUdeviceptr, Known> known_;  // guarded by known_mutex_: shared allocations, by their begin
  // Used by the thread only.
  std::vector<GpuCopy> taken_;
  std::map<int, Streams> streams_;
  // For copies that their caller waits for.
  std::mutex own_mutex_;
  std::map<int, Streams> own_streams_;
  std::thread thread_;
};

}  // namespace

std::unique_ptr<GpuCopies> GpuCopies::create(const GpuCopyOptions& options) {
  const Driver* const driver = Driver::load();
  return driver != nullptr ? std::make_unique<DriverCopies>(*driver, options) : nullptr;
}

}  // namespace ferry::ucx_card
