#ifndef FERRY_CUDA_CALL_GROUP_CALL_HPP
#define FERRY_CUDA_CALL_GROUP_CALL_HPP

/// The host's steps of every call of all ranks, in their order:
///
///   on_gpu       this rank's GPU becomes current; a call that runs out of host memory breaks the group
///   begin_call   core's checks of the arguments, `check`, the stream, `prepare`, then the record goes to the peers
///   launch       the kernels
///   Context::end memory is reused only after these
///
/// An error in any step of begin_call refuses the call once: a kernel notifies the peers.
///
/// A call is an object with these members:
///
///   Status check();                         optional: checks that come before those of the stream
///   Status prepare(CallStream& stream);     checks of memory, room to stage, parameters of the kernels
///   cudaError_t launch(const Launch& launch);
///   cudaError_t launch_refusal(const Launch& launch, const CallRecord& refused);

#include <cuda_runtime_api.h>

#include <new>
#include <type_traits>
#include <utility>

#include "core/agreement.hpp"
#include "cuda/context/context.hpp"
#include "cuda/driver/device_guard.hpp"

namespace ferry::cuda {

struct CallFrame {
  Context& context;
  const CallRecord& record;
  Stream stream;  ///< the caller's
};

/// The stream that the kernels are launched on: the caller's, unless `prepare` names another.
struct CallStream {
  Stream stream;
  bool captured = false;
};

/// Makes one call of the group, `body`, with this rank's GPU current.
template <typename Body>
std::invoke_result_t<Body&> on_gpu(Context& context, Operation operation, Body body) try {
  const DeviceGuard guard(context.parts().device);
  if (!guard.status().ok()) return context.fail(guard.status());
  return body();
} catch (const std::bad_alloc&) {
  return context.out_of_memory(operation);
}

namespace detail {

template <typename Call>
Result<Launch> try_to_begin(const CallFrame& frame, Call& call) {
  if (Status status = status_of(frame.record); !status.ok()) return status;
  if constexpr (requires { call.check(); }) {
    if (Status status = call.check(); !status.ok()) return status;
  }
  const Result<bool> captured = frame.context.check_stream(to_string(frame.record.operation), frame.stream);
  if (!captured.ok()) return captured.status();
  CallStream stream{frame.stream, *captured};
  if (Status status = call.prepare(stream); !status.ok()) return status;
  return frame.context.begin(frame.record, static_cast<cudaStream_t>(stream.stream.handle), stream.captured);
}

}  // namespace detail

/// All steps before the first launch. An error was reported to the peers. After success the caller launches, then
/// calls Context::end.
template <typename Call>
Result<Launch> begin_call(const CallFrame& frame, Call& call) {
  Result<Launch> begun = detail::try_to_begin(frame, call);
  if (begun.ok()) return begun;
  return frame.context.refuse(
      frame.record, frame.stream, begun.status(),
      [&call](const Launch& launch, const CallRecord& refused) { return call.launch_refusal(launch, refused); });
}

/// All steps of a call that does not wait on the host.
template <typename Call>
Status make_call(const CallFrame& frame, Call& call) {
  const Result<Launch> begun = begin_call(frame, call);
  if (!begun.ok()) return begun.status();
  return frame.context.end(*begun, call.launch(*begun), to_string(frame.record.operation));
}

/// A call made of lambdas.
template <typename Prepare, typename LaunchCall, typename LaunchRefusal>
struct CallOf {
  Prepare prepare;
  LaunchCall launch;
  LaunchRefusal launch_refusal;
};
template <typename Prepare, typename LaunchCall, typename LaunchRefusal>
CallOf(Prepare, LaunchCall, LaunchRefusal) -> CallOf<Prepare, LaunchCall, LaunchRefusal>;

}  // namespace ferry::cuda

#endif  // FERRY_CUDA_CALL_GROUP_CALL_HPP
