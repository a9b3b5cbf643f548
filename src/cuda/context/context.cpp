#include "cuda/context/context.hpp"

#include <fmt/format.h>

#include <string>
#include <utility>

#include "cuda/driver/cuda_call.hpp"
#include "cuda/driver/device_guard.hpp"
#include "cuda/driver/driver.hpp"
#include "cuda/memory/memory_checks.hpp"
#include "cuda/sync/corrupt_text.hpp"
#include "cuda/sync/fault_text.hpp"
#include "node/futex.hpp"
#include "plan/to_size.hpp"

namespace ferry::cuda {
namespace {

/// Uses the driver, which a group has loaded: the runtime's function calls the same one and takes twice as long.
Result<StreamId> id_of(std::string_view operation, cudaStream_t stream) {
  StreamId id = 0;
  if (const CUresult result = loaded_driver()->stream_get_id(stream, &id); result != CUDA_SUCCESS) {
    return driver_status(
        result, fmt::format("{}: asking for the id of stream {}", operation, static_cast<const void*>(stream)));
  }
  return id;
}

}  // namespace

Context::~Context() {
  const DeviceGuard guard(parts_.device);
  const RelaxedCapture relaxed;
  if (launched_) cudaEventSynchronize(parts_.memory->last_call());
  // Before the others learn that this rank leaves: they take what it sent to be there by then.
  if (parts_.send_rest) parts_.send_rest();
  parts_.sync->leave();
  parts_.memory->close();
}

Result<bool> Context::check_stream(std::string_view operation, Stream stream) {
  checked_.reset();
  if (!parts_.sync->broken().ok()) return parts_.sync->broken();
  if (Status status = check_lost(); !status.ok()) return status;
  const auto handle = static_cast<cudaStream_t>(stream.handle);
  CUstreamCaptureStatus capture = CU_STREAM_CAPTURE_STATUS_NONE;
  if (const CUresult result = loaded_driver()->stream_is_capturing(handle, &capture); result != CUDA_SUCCESS) {
    return driver_status(result, fmt::format("{}: asking whether the stream is captured", operation));
  }
  if (capture != CU_STREAM_CAPTURE_STATUS_NONE) return true;
  // Only if the stream is not captured: a query of the stream's device ends a capture.
  const Result<StreamId> id = id_of(operation, handle);
  if (!id.ok()) return id.status();
  checked_ = {handle, *id};
  if (is_last_stream(*id)) return false;
  Status status = check_stream_device(operation, handle, parts_.device);
  if (!status.ok()) return status;
  return false;
}

Result<StreamId> Context::follow_last_call(std::string_view operation, cudaStream_t stream) {
  const bool checked = checked_ && checked_->stream == stream;
  const Result<StreamId> id = checked ? Result<StreamId>(checked_->id) : id_of(operation, stream);
  checked_.reset();  // a later stream may have the same handle
  if (!id.ok() || !launched_ || is_last_stream(*id)) return id;
  const cudaError_t error = cudaStreamWaitEvent(stream, parts_.memory->last_call(), 0);
  if (error != cudaSuccess) return runtime_status(error, fmt::format("{}: ordering calls", operation));
  return id;
}

cudaError_t Context::record_last_call(cudaStream_t stream, StreamId id) {
  const cudaError_t error = parts_.memory->record_last_call(stream);
  launched_ = true;
  last_stream_id_ = id;
  return error;
}

Result<Launch> Context::begin(const CallRecord& record, cudaStream_t stream, bool captured) {
  if (!parts_.sync->broken().ok()) return parts_.sync->broken();
  // Calls of a group follow each other, whatever their streams. A captured stream cannot wait for anything outside its
  // graph: ordering the graph is up to the program that replays it.
  Result<StreamId> id = captured ? StreamId{0} : follow_last_call(to_string(record.operation), stream);
  if (!id.ok()) return id.status();
  return Launch{stream, captured, agreement_word(record), parts_.call_log->append(record), *id};
}

Status Context::end(const Launch& launch, cudaError_t launched, std::string_view operation) {
  if (!launch.captured) {
    const cudaError_t recorded = record_last_call(launch.stream, launch.stream_id);
    if (launched == cudaSuccess) launched = recorded;
  }
  if (launched == cudaSuccess) return {};
  // No node of the graph has run, and peers do not wait for its replays.
  if (launch.captured) {
    return runtime_status(launched, fmt::format("{}: adding to the graph that captures the stream", operation),
                          "the capture may have been invalidated; end it and discard the graph on all ranks");
  }
  return fail(runtime_status(launched, fmt::format("{}: launching", operation),
                             "the GPU or its context failed earlier; see the first error"));
}

Status Context::refuse(const CallRecord& record, Stream stream, const Status& status,
                       const std::function<cudaError_t(const Launch&, const CallRecord&)>& launch_refusal) {
  if (!parts_.sync->broken().ok()) return parts_.sync->broken();
  // Growing memory can find that a peer is gone: that breaks the group, not just this call.
  if (status.code() == ErrorCode::kTimeout || status.code() == ErrorCode::kPeerLost) {
    return parts_.sync->fail(status.code(), status.peer(), status.message());
  }
  // Peers capture the call as well and do not make it now.
  cudaStreamCaptureStatus capture = cudaStreamCaptureStatusNone;
  const auto caller = static_cast<cudaStream_t>(stream.handle);
  if (cudaStreamIsCapturing(caller, &capture) != cudaSuccess) {
    cudaGetLastError();
    capture = cudaStreamCaptureStatusNone;  // unspecified after an error
  }
  if (capture != cudaStreamCaptureStatusNone) return status;
  CallRecord refused = record;
  if (refused.code == ErrorCode::kOk) refused.set_status(status);
  // On a stream of the group: the caller's may be the invalid argument.
  const RelaxedCapture relaxed;
  Result<Launch> launch = begin(refused, parts_.refusals_stream->get(), false);
  if (!launch.ok()) return parts_.sync->broken().ok() ? fail(launch.status()) : launch.status();
  Status ended = end(*launch, launch_refusal(*launch, refused), to_string(record.operation));
  if (!ended.ok()) return ended;
  // Wait until the peers have it: their hosts look up this call's record, which later calls would overwrite.
  if (const cudaError_t error = cudaStreamSynchronize(launch->stream); error != cudaSuccess) {
    return fail(
        runtime_status(error, fmt::format("{}: reporting the refusal to the peers", to_string(record.operation))));
  }
  if (Status lost = check_lost(); !lost.ok()) return lost;
  return Status(status.code(), fmt::format("rank {}: {}", parts_.sync->rank(), status.message()), parts_.sync->rank());
}

Status Context::launch_local(std::string_view operation, Stream stream,
                             const std::function<cudaError_t(cudaStream_t)>& launch, std::optional<bool> captured) {
  if (!captured) {
    const Result<bool> checked = check_stream(operation, stream);
    if (!checked.ok()) return checked.status();
    captured = *checked;
  }
  const auto handle = static_cast<cudaStream_t>(stream.handle);
  const Result<StreamId> id = *captured ? StreamId{0} : follow_last_call(operation, handle);
  if (!id.ok()) return id.status();
  cudaError_t error = launch(handle);
  if (error == cudaSuccess && !*captured) error = record_last_call(handle, *id);
  return error == cudaSuccess ? Status() : runtime_status(error, fmt::format("{}: launching", operation));
}

Status Context::fail(const Status& status) {
  return parts_.sync->fail(status.code(), parts_.sync->rank(), status.message());
}

Status Context::give_up_on(int rank, std::string_view what) { return parts_.sync->give_up_on(rank, what); }

void Context::expect_wait() {
  parts_.sync->peers().recorder().reach(CallPhase::kLaunched);
  parts_.sync->state().expect_wait(node::monotonic_ns());
}

Status Context::check_interrupt(std::string_view operation) {
  Status status = parts_.sync->state().check_interrupt(node::monotonic_ns(), operation);
  // For errors of other ranks the watch stops the kernels.
  if (!status.ok()) __atomic_store_n(&parts_.report->stop.requested, 1, __ATOMIC_RELEASE);
  return status;
}

Status Context::out_of_memory(Operation operation) { return parts_.sync->out_of_memory(operation); }

Status Context::check_lost() {
  if (__atomic_load_n(&parts_.corrupt->state, __ATOMIC_ACQUIRE) != 0) {
    const Status corrupt = describe_corrupt(*parts_.corrupt, parts_.sync->rank());
    return parts_.sync->fail(corrupt.code(), corrupt.peer(), corrupt.message());
  }
  const LostReport& lost = parts_.report->lost;
  if (__atomic_load_n(&lost.state, __ATOMIC_ACQUIRE) == 0) return {};
  const Topology& topology = parts_.sync->topology();
  return give_up_on(rank_missed(lost, topology), describe_lost(lost, topology, timeout_ns_, &*parts_.call_log));
}

Status Context::describe(const FaultReport& fault, std::string_view operation, RailLink::FaultOf records) const {
  if (fault.of_group != 0) records = RailLink::FaultOf::kLatency;
  const FoundRecord* const found = parts_.rail_link != nullptr ? parts_.rail_link->found(records) : nullptr;
  return describe_fault(fault, {*parts_.call_log, found, parts_.sync->topology()}, operation);
}

Status Context::take_fault() {
  FaultReport& fault = parts_.report->fault;
  if (__atomic_load_n(&fault.state, __ATOMIC_ACQUIRE) == 0) return {};
  Status status = describe(fault, "wait");
  fault.latency = 0;
  fault.of_group = 0;
  __atomic_store_n(&fault.state, 0, __ATOMIC_RELEASE);
  return status;
}

Status Context::trim() {
  if (!parts_.sync->broken().ok()) return parts_.sync->broken();
  if (Status status = check_lost(); !status.ok()) return status;
  staging_.trim();
  return {};
}

Status Context::wait(Stream stream) {
  const DeviceGuard guard(parts_.device);
  if (!guard.status().ok()) return guard.status();
  const auto handle = static_cast<cudaStream_t>(stream.handle);
  if (Status status = check_stream_device("wait", handle, parts_.device); !status.ok()) return status;
  const RelaxedCapture relaxed;
  Status status = runtime_status(cudaStreamSynchronize(handle), "wait: synchronising the stream",
                                 "a kernel on this GPU failed, perhaps not one of Ferry's");
  if (!status.ok()) return status;
  return poll();
}

Status Context::poll() {
  if (!parts_.sync->broken().ok()) return parts_.sync->broken();
  if (Status status = check_lost(); !status.ok()) return status;
  return take_fault();
}

Status Context::destroy() {
  if (!parts_.sync->broken().ok()) return parts_.sync->broken();
  if (Status status = wait_for_calls("destroy"); !status.ok()) return fail(status);
  if (Status status = check_lost(); !status.ok()) return status;
  node::CallDescriptor descriptor;
  descriptor.record.operation = Operation::kDestroy;
  return parts_.sync->begin(descriptor);
}

Status Context::wait_for_calls(std::string_view operation) {
  const DeviceGuard guard(parts_.device);
  if (!guard.status().ok() || !launched_) return guard.status();
  const RelaxedCapture relaxed;
  return runtime_status(cudaEventSynchronize(parts_.memory->last_call()),
                        fmt::format("{}: waiting for the last call", operation));
}

Status Context::renew(const BackendContext& context, StartLatency start_latency) {
  const DeviceGuard guard(parts_.device);
  if (!guard.status().ok()) return guard.status();
  return renew_parts(context, start_latency, parts_);
}

Status status_of(const CallRecord& record) {
  if (record.code == ErrorCode::kOk) return {};
  return Status(record.code, std::string(record.message.data(), to_size(record.message_bytes)));
}

}  // namespace ferry::cuda
