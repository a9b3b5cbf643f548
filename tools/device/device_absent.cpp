/// Replaces device_memory.cpp, device_graph.cpp, device_delay.cu and device_facts.cpp in a build without the CUDA
/// backend.

#include "device/device_facts.hpp"
#include "device/device_graph.hpp"
#include "device/device_memory.hpp"

namespace ferry::tools {

namespace {

Status absent() {
  return {ErrorCode::kUnsupported,
          "this build has no CUDA backend; configure with -DFERRY_CUDA=ON where nvcc is found"};
}

}  // namespace

bool built_with_cuda() { return false; }
Result<int> count_devices() { return absent(); }
Status select_device(int) { return absent(); }

// Nothing is ever allocated here, so there is nothing to free.
void FreeDeviceMemory::operator()(std::byte*) const {}
void DestroyDeviceStream::operator()(void*) const {}
void DestroyDeviceEvent::operator()(void*) const {}
void CloseIpcMemory::operator()(std::byte*) const {}
void DestroyDeviceGraph::operator()(void*) const {}

Result<DeviceMemory> allocate_device_memory(std::size_t) { return absent(); }
Status copy_device_bytes(void*, const void*, std::size_t, Stream) { return absent(); }
Status fill_device_bytes(void*, int, std::size_t, Stream) { return absent(); }
Result<DeviceStream> DeviceStream::create() { return absent(); }
Status DeviceStream::wait() const { return absent(); }
Result<DeviceEvent> DeviceEvent::create() { return absent(); }
Status DeviceEvent::record(Stream) const { return absent(); }
Result<std::int64_t> DeviceEvent::elapsed_ns_since(const DeviceEvent&) const { return absent(); }
Status delay_stream(Stream, std::int64_t) { return absent(); }
Result<DeviceGraph> DeviceGraph::capture(Stream, const std::function<Status()>&) { return absent(); }
Status DeviceGraph::launch(Stream) const { return absent(); }
Result<IpcHandle> export_device_memory(const DeviceMemory&) { return absent(); }
Result<IpcMemory> open_device_memory(const IpcHandle&) { return absent(); }
Status reach_device(int) { return absent(); }

Result<DeviceFacts> read_device_facts(int) { return absent(); }
Result<PeerFacts> read_peer_facts(int, int) { return absent(); }

}  // namespace ferry::tools
