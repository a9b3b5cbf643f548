/// Streams, events and graphs of the CUDA runtime.

#include <cuda_runtime_api.h>

#include <memory>
#include <utility>

#include "emulated_gpus/host.hpp"

namespace ferry::emulated {
namespace {

/// Capture that this thread has begun in a mode that forbids calls outside captures.
thread_local std::shared_ptr<Capture> strict_capture;
thread_local cudaStreamCaptureMode mode_of_thread = cudaStreamCaptureModeGlobal;

Event& event_of(cudaEvent_t handle) { return *reinterpret_cast<Event*>(handle); }

/// The graph behind cudaGraph_t and cudaGraphExec_t.
using GraphHandle = std::shared_ptr<Capture>;

/// Records a place in the capture for which other branches can wait.
int record(Stream& stream) {
  const std::lock_guard lock(stream.capture->mutex);
  stream.capture->ops.push_back({{}, stream.branch, -1, nullptr});
  return static_cast<int>(stream.capture->ops.size()) - 1;
}

cudaError_t join(Stream& stream, const Event& event) {
  if (stream.capture && stream.capture != event.capture) return cudaErrorStreamCaptureMerge;
  const std::lock_guard lock(event.capture->mutex);
  if (!stream.capture) {
    stream.capture = event.capture;
    stream.branch = event.capture->num_branches++;
  }
  event.capture->ops.push_back({{}, stream.branch, event.op_idx, nullptr});
  return cudaSuccess;
}

}  // namespace

bool may_call_uncaptured() {
  if (mode_of_thread == cudaStreamCaptureModeRelaxed || !strict_capture) return true;
  strict_capture->is_spoilt = true;
  return false;
}

void replay(const Capture& graph, Stream& stream) {
  emulator::Machine& gpus = machine();
  std::vector<cudaStream_t> queues(static_cast<std::size_t>(graph.num_branches), nullptr);
  std::vector<emulator::Mark> marks(graph.ops.size());
  queues[0] = stream.queue;
  Stream branch;
  for (std::size_t i = 0; i < graph.ops.size(); ++i) {
    const Capture::Op& op = graph.ops[i];
    cudaStream_t& queue = queues[static_cast<std::size_t>(op.branch)];
    if (queue == nullptr) queue = gpus.add_stream();
    branch.queue = queue;
    if (op.outside != nullptr) {
      gpus.enqueue_wait(queue, op.outside->mark);
    } else if (op.awaited >= 0) {
      gpus.enqueue_wait(queue, marks[static_cast<std::size_t>(op.awaited)]);
    } else {
      submit(branch, op.work);
      marks[i] = gpus.mark(queue);
    }
  }
  for (std::size_t i = 1; i < queues.size(); ++i) {
    if (queues[i] != nullptr) gpus.close_stream(queues[i]);
  }
}

}  // namespace ferry::emulated

using namespace ferry::emulated;  // NOLINT(google-build-using-namespace)

// The names are CUDA's.
// NOLINTBEGIN(readability-identifier-naming)
extern "C" {

cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned flags) {
  *stream = reinterpret_cast<cudaStream_t>(make_stream((flags & cudaStreamNonBlocking) == 0));
  return cudaSuccess;
}
cudaError_t cudaStreamDestroy(cudaStream_t stream) {
  drop_stream(reinterpret_cast<Stream*>(stream));
  return cudaSuccess;
}
cudaError_t cudaStreamGetId(cudaStream_t stream, unsigned long long* id) {
  *id = reinterpret_cast<std::uintptr_t>(stream);
  return cudaSuccess;
}
cudaError_t cudaStreamGetDevice(cudaStream_t stream, int* device) {
  *device = stream_of(stream).device;
  return cudaSuccess;
}
cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
  Stream& of = stream_of(stream);
  if (of.capture) {
    of.capture->is_spoilt = true;
    return result(cudaErrorStreamCaptureUnsupported);
  }
  finish(of);
  return cudaSuccess;
}
cudaError_t cudaStreamQuery(cudaStream_t stream) {
  const Stream& of = stream_of(stream);
  return result(machine().is_over(machine().mark(of.queue)) ? cudaSuccess : cudaErrorNotReady);
}
cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned flags) {
  Stream& of = stream_of(stream);
  const Event& awaited = event_of(event);
  if (of.capture && (flags & cudaEventWaitExternal) != 0) {
    const std::lock_guard lock(of.capture->mutex);
    of.capture->ops.push_back({{}, of.branch, -1, &awaited});
    return cudaSuccess;
  }
  if (awaited.capture) return result(join(of, awaited));
  if (of.capture) return result(cudaErrorStreamCaptureIsolation);
  machine().enqueue_wait(of.queue, awaited.mark);
  return cudaSuccess;
}
cudaError_t cudaLaunchHostFunc(cudaStream_t stream, cudaHostFn_t function, void* data) {
  submit(stream_of(stream), {Work::Kind::kHostFunction, [function, data] { function(data); }, {}});
  return cudaSuccess;
}

cudaError_t cudaEventCreate(cudaEvent_t* event) { return cudaEventCreateWithFlags(event, cudaEventDefault); }
cudaError_t cudaEventElapsedTime(float* milliseconds, cudaEvent_t begin, cudaEvent_t end) {
  constexpr double kNsPerMs = 1e6;
  const Event& first = event_of(begin);
  const Event& last = event_of(end);
  if (!machine().is_over(first.mark) || !machine().is_over(last.mark)) return result(cudaErrorNotReady);
  *milliseconds = static_cast<float>(static_cast<double>(*last.reached_ns - *first.reached_ns) / kNsPerMs);
  return cudaSuccess;
}
cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned /*flags*/) {
  *event = reinterpret_cast<cudaEvent_t>(new Event);
  return cudaSuccess;
}
cudaError_t cudaEventDestroy(cudaEvent_t event) {
  delete &event_of(event);
  return cudaSuccess;
}
cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
  Stream& of = stream_of(stream);
  Event& at = event_of(event);
  at.capture = of.capture;
  if (of.capture) {
    at.op_idx = record(of);
    return cudaSuccess;
  }
  // Queued as a piece of work of its own, so that later work cannot begin beside earlier work.
  at.reached_ns = std::make_shared<std::atomic<std::uint64_t>>();
  machine().enqueue(of.queue, [reached_ns = at.reached_ns] { *reached_ns = ferry::emulator::now_ns(); });
  at.mark = machine().mark(of.queue);
  return cudaSuccess;
}
cudaError_t cudaEventQuery(cudaEvent_t event) {
  const Event& at = event_of(event);
  if (at.capture) return result(cudaErrorCapturedEvent);
  return result(machine().is_over(at.mark) ? cudaSuccess : cudaErrorNotReady);
}
cudaError_t cudaEventSynchronize(cudaEvent_t event) {
  const Event& at = event_of(event);
  if (at.capture) return result(cudaErrorCapturedEvent);
  machine().wait(at.mark);
  return cudaSuccess;
}

cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode* mode) {
  std::swap(*mode, mode_of_thread);
  return cudaSuccess;
}
cudaError_t cudaStreamBeginCapture(cudaStream_t stream, cudaStreamCaptureMode mode) {
  Stream& of = stream_of(stream);
  if (of.capture) return result(cudaErrorIllegalState);
  of.capture = std::make_shared<Capture>();
  of.branch = 0;
  if (mode != cudaStreamCaptureModeRelaxed) strict_capture = of.capture;
  return cudaSuccess;
}
cudaError_t cudaStreamIsCapturing(cudaStream_t stream, cudaStreamCaptureStatus* status) {
  const Stream& of = stream_of(stream);
  *status = !of.capture             ? cudaStreamCaptureStatusNone
            : of.capture->is_spoilt ? cudaStreamCaptureStatusInvalidated
                                    : cudaStreamCaptureStatusActive;
  return cudaSuccess;
}
cudaError_t cudaStreamEndCapture(cudaStream_t stream, cudaGraph_t* graph) {
  Stream& of = stream_of(stream);
  if (!of.capture) return result(cudaErrorIllegalState);
  const std::shared_ptr<Capture> made = of.capture;
  if (strict_capture == made) strict_capture = nullptr;
  end_capture(made);
  *graph = nullptr;
  if (made->is_spoilt) return result(cudaErrorStreamCaptureInvalidated);
  *graph = reinterpret_cast<cudaGraph_t>(new GraphHandle(made));
  return cudaSuccess;
}
cudaError_t cudaGraphInstantiate(cudaGraphExec_t* executable, cudaGraph_t graph, unsigned long long /*flags*/) {
  *executable = reinterpret_cast<cudaGraphExec_t>(new GraphHandle(*reinterpret_cast<GraphHandle*>(graph)));
  return cudaSuccess;
}
cudaError_t cudaGraphUpload(cudaGraphExec_t /*executable*/, cudaStream_t /*stream*/) { return cudaSuccess; }
cudaError_t cudaGraphLaunch(cudaGraphExec_t executable, cudaStream_t stream) {
  replay(**reinterpret_cast<GraphHandle*>(executable), stream_of(stream));
  return cudaSuccess;
}
cudaError_t cudaGraphDestroy(cudaGraph_t graph) {
  delete reinterpret_cast<GraphHandle*>(graph);
  return cudaSuccess;
}
cudaError_t cudaGraphExecDestroy(cudaGraphExec_t executable) {
  delete reinterpret_cast<GraphHandle*>(executable);
  return cudaSuccess;
}

}  // extern "C"
// NOLINTEND(readability-identifier-naming)
