#include "device/device_graph.hpp"

#include "device/cuda_status.hpp"

namespace ferry::tools {

namespace {

cudaStream_t stream_of(Stream stream) { return static_cast<cudaStream_t>(stream.handle); }

}  // namespace

void DestroyDeviceGraph::operator()(void* handle) const {
  static_cast<void>(cudaGraphExecDestroy(static_cast<cudaGraphExec_t>(handle)));
}

Result<DeviceGraph> DeviceGraph::capture(Stream stream, const std::function<Status()>& enqueue) {
  Status status = cuda_status("cudaStreamBeginCapture",
                              cudaStreamBeginCapture(stream_of(stream), cudaStreamCaptureModeThreadLocal));
  if (!status) return status;
  status = enqueue();
  cudaGraph_t graph = nullptr;
  const Status ended = cuda_status("cudaStreamEndCapture", cudaStreamEndCapture(stream_of(stream), &graph));
  if (status) status = ended;
  cudaGraphExec_t executable = nullptr;
  if (status) status = cuda_status("cudaGraphInstantiate", cudaGraphInstantiate(&executable, graph, 0));
  if (graph != nullptr) static_cast<void>(cudaGraphDestroy(graph));
  if (!status) return status;
  DeviceGraph result;
  result.handle_.reset(executable);
  return result;
}

Status DeviceGraph::launch(Stream stream) const {
  return cuda_status("cudaGraphLaunch",
                     cudaGraphLaunch(static_cast<cudaGraphExec_t>(handle_.get()), stream_of(stream)));
}

}  // namespace ferry::tools
