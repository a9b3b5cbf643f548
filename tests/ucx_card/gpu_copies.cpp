#include "ucx_card/gpu_copies.hpp"

#include <algorithm>
#include <cstdint>
#include <map>
#include <mutex>
#include <shared_mutex>
#include <utility>
#include <vector>

#include "ucx_card/gpu_mover.hpp"
#include "ucx_card/gpu_streams.hpp"

namespace ferry::ucx_card {
namespace {

/// GPUs of the allocations that the cards of this process share.
class SharedMemory {
 public:
  static SharedMemory& instance() {
    static SharedMemory& memory = *new SharedMemory;
    return memory;
  }

  void add(CUdeviceptr begin, std::size_t num_bytes, int device) {
    const std::lock_guard lock(mutex_);
    Allocation& one = allocations_[begin];
    one = {begin + num_bytes, device, one.num_shares + 1};
  }
  void remove(CUdeviceptr address) {
    const std::lock_guard lock(mutex_);
    const auto found = find(address);
    if (found != allocations_.end() && --found->second.num_shares == 0) allocations_.erase(found);
  }
  /// -1: none of them contains the address.
  int device_of(CUdeviceptr address) {
    const std::shared_lock lock(mutex_);
    const auto found = find(address);
    return found != allocations_.end() ? found->second.device : -1;
  }

 private:
  struct Allocation {
    CUdeviceptr end = 0;
    int device = -1;
    int num_shares = 0;
  };

  std::map<CUdeviceptr, Allocation>::iterator find(CUdeviceptr address) {
    const auto after = allocations_.upper_bound(address);
    if (after == allocations_.begin()) return allocations_.end();
    const auto found = std::prev(after);
    return address < found->second.end ? found : allocations_.end();
  }

  std::shared_mutex mutex_;
  std::map<CUdeviceptr, Allocation> allocations_;  // by their begin
};

class DriverCopies : public GpuCopies {
 public:
  explicit DriverCopies(const Driver& driver) : driver_(driver) {}

  ucs_status_t share(std::byte* address) override {
    CUdeviceptr begin = 0;
    std::size_t num_bytes = 0;
    int num_devices = 0;
    // Ranges are those of a context, and the caller's thread may have none, or that of another GPU.
    const int owner = std::max(device_of(address), 0);
    CUcontext context = nullptr;
    if (driver_.retain_context(&context, owner) != CUDA_SUCCESS) return UCS_ERR_IO_ERROR;
    const DriverCall call(driver_, context);
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
    // Now, while no kernel of the application keeps the driver waiting.
    if (!movers_.contains(owner)) movers_[owner] = GpuMover::create(driver_, owner);
    SharedMemory::instance().add(begin, num_bytes, owner);
    return UCS_OK;
  }

  void forget(std::byte* address) override { SharedMemory::instance().remove(address_of(address)); }

  void start(std::byte* to, const std::byte* from, std::size_t num_bytes, Done done, std::uint64_t at_ns) override {
    GpuCopy copy{.to = to, .from = from, .num_bytes = num_bytes, .done = std::move(done), .at_ns = at_ns};
    if (GpuMover* const mover = mover_for(copy)) {
      mover->start(std::move(copy));
    } else {
      streams_of(copy, &streams_).start(copy);
    }
  }

  bool start_word(std::byte* to, std::uint64_t word, std::uint64_t at_ns, Done done) override {
    // One mover has copied all that is under way.
    if (movers_.size() != 1 || look(&streams_) || SharedMemory::instance().device_of(address_of(to)) < 0) return false;
    GpuMover* const mover = movers_.begin()->second.get();
    if (mover == nullptr) return false;
    mover->start({.to = to, .done = std::move(done), .is_word = true, .word = word, .at_ns = at_ns});
    return true;
  }

  bool poll() override {
    bool busy = look(&streams_);
    for (const auto& [device, mover] : movers_) busy |= mover != nullptr && mover->poll();
    return busy;
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
  /// Null unless the target is memory that GPUs share, and the source too or a GPU's of this card. The GPU that reads
  /// is better, since writes between GPUs need no answer.
  GpuMover* mover_for(const GpuCopy& copy) {
    const int target = SharedMemory::instance().device_of(address_of(copy.to));
    if (target < 0) return nullptr;
    int source = SharedMemory::instance().device_of(address_of(copy.from));
    if (source < 0) {
      // Other memory of its own GPU, as cards read memory that they register when they first need it.
      source = own_device_of(copy.from, copy.num_bytes);
      if (source < 0) return nullptr;
    }
    for (const int device : {source, target}) {
      if (const auto found = movers_.find(device); found != movers_.end() && found->second != nullptr) {
        return found->second.get();
      }
    }
    return nullptr;
  }

  /// GPU of memory that this card has read before, or that it has a mover for; -1: another one's, or the host's.
  int own_device_of(const std::byte* memory, std::size_t num_bytes) {
    const CUdeviceptr address = address_of(memory);
    for (const KnownMemory& known : known_) {
      if (address >= known.begin && address + num_bytes <= known.end) return known.device;
    }
    const int device = device_of(memory);
    CUdeviceptr begin = 0;
    std::size_t size = 0;
    CUcontext context = nullptr;
    if (!movers_.contains(device) || driver_.retain_context(&context, device) != CUDA_SUCCESS) return -1;
    const DriverCall call(driver_, context);
    if (driver_.address_range(&begin, &size, address) != CUDA_SUCCESS) return -1;
    known_.push_back({begin, begin + size, device});
    return device;
  }

  Streams& streams_of(const GpuCopy& copy, std::map<int, Streams>* all) {
    // The GPU that reads has the copy engine that is fastest between two; memory of the host has none.
    int device = device_of(copy.from);
    if (device < 0) device = device_of(copy.to);
    return all->try_emplace(device, driver_, device < 0 ? 0 : device).first->second;
  }

  /// GPU of memory; -1 for memory of the host.
  int device_of(const std::byte* memory) const {
    if (const int device = SharedMemory::instance().device_of(address_of(memory)); device >= 0) return device;
    unsigned type = 0;
    int device = -1;
    if (driver_.pointer_attribute(&type, CU_POINTER_ATTRIBUTE_MEMORY_TYPE, address_of(memory)) != CUDA_SUCCESS ||
        type != CU_MEMORYTYPE_DEVICE) {
      return -1;
    }
    driver_.pointer_attribute(&device, CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL, address_of(memory));
    return device;
  }

  static bool look(std::map<int, Streams>* all) {
    bool busy = false;
    for (auto& [device, streams] : *all) busy |= streams.look();
    return busy;
  }

  struct KnownMemory {
    CUdeviceptr begin = 0;
    CUdeviceptr end = 0;
    int device = -1;
  };

  const Driver& driver_;
  std::vector<KnownMemory> known_;                   // not registered; the same until the card ends
  std::map<int, std::unique_ptr<GpuMover>> movers_;  // by GPU; null: it cannot have one
  std::map<int, Streams> streams_;
  // For copies that their caller waits for.
  std::mutex own_mutex_;
  std::map<int, Streams> own_streams_;
};

}  // namespace

std::unique_ptr<GpuCopies> GpuCopies::create() {
  const Driver* const driver = Driver::load();
  return driver != nullptr ? std::make_unique<DriverCopies>(*driver) : nullptr;
}

}  // namespace ferry::ucx_card
