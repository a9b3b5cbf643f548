#ifndef FERRY_CUDA_CONTEXT_CONTEXT_HPP
#define FERRY_CUDA_CONTEXT_CONTEXT_HPP

/// An open group on this rank: its parts, and how calls of any kind begin, end and fail.

#include <cuda_runtime_api.h>

#include <cstdint>
#include <functional>
#include <optional>
#include <string_view>

#include "core/backend.hpp"
#include "cuda/context/parts.hpp"
#include "cuda/memory/deferred_free.hpp"
#include "cuda/memory/staging.hpp"

namespace ferry::cuda {

/// CUDA's number of a stream. Unlike a handle it is never reused.
using StreamId = unsigned long long;

/// A call that is being launched: its stream, and its identification for the peers.
struct Launch {
  cudaStream_t stream = nullptr;
  bool captured = false;
  std::uint64_t agreement = 0;
  std::int64_t record_number = 0;  ///< in the CallLog
  StreamId stream_id = 0;          ///< only if not captured
};

class Context {
 public:
  Context(Parts parts, std::int64_t timeout_ns)
      : timeout_ns_(timeout_ns), parts_(std::move(parts)), staging_(parts_.memory) {}
  /// Waits for the last call: kernels end by their deadline, or when a peer is lost, and the memory that they use must
  /// live until then.
  ~Context();
  Context(const Context&) = delete;
  Context& operator=(const Context&) = delete;

  const Parts& parts() const { return parts_; }
  std::int64_t timeout_ns() const { return timeout_ns_; }
  Staging& staging() { return staging_; }

  /// Checks that the group is whole and that the stream belongs to this GPU. Returns whether the stream is being
  /// captured.
  Result<bool> check_stream(std::string_view operation, Stream stream);
  /// Orders the stream after earlier calls and publishes the record to the peers. After an error the peers still wait,
  /// so the caller must refuse the call.
  Result<Launch> begin(const CallRecord& record, cudaStream_t stream, bool captured);
  /// Must follow the call's last launch, whether or not it succeeded: memory is reused only after the launched kernels.
  Status end(const Launch& launch, cudaError_t launched, std::string_view operation);
  /// Launches a kernel that informs the peers that this rank cannot make the call because of `status`. `refused` is the
  /// record with that status. Returns `status` in the words that the peers will read.
  Status refuse(const CallRecord& record, Stream stream, const Status& status,
                const std::function<cudaError_t(const Launch& launch, const CallRecord& refused)>& launch_refusal);

  /// Puts work of this rank alone on the stream, after its earlier calls, whose memory is kept until the work is done.
  /// `captured`: result of check_stream for this stream, if the caller has it.
  Status launch_local(std::string_view operation, Stream stream, const std::function<cudaError_t(cudaStream_t)>& launch,
                      std::optional<bool> captured = {});

  /// Breaks the group because of an error of this rank alone.
  Status fail(const Status& status);
  /// Breaks the group because `rank` did not arrive in time.
  Status give_up_on(int rank, std::string_view what);
  /// Called before the host waits for kernels of the present call: its record shows that they are launched. See also
  /// GroupState::expect_wait.
  void expect_wait();
  /// Called while the host waits in `operation`: see GroupState::check_interrupt. Waiting kernels of this rank end as
  /// well.
  Status check_interrupt(std::string_view operation);
  /// Breaks the group because this rank ran out of host memory inside a call: the other ranks must not wait for it.
  Status out_of_memory(Operation operation);

  /// Returns a kernel's wait that timed out or was stopped, or wrong rows that a kernel has found, as a Status, which
  /// breaks the group; ok if there was neither.
  Status check_lost();
  Status describe(const FaultReport& fault, std::string_view operation,
                  RailLink::FaultOf records = RailLink::FaultOf::kAnyCall) const;

  /// Collective: implements Backend::renew. No call may be running.
  Status renew(const BackendContext& context, StartLatency start_latency);

  /// Implement Backend::trim, ::wait, ::poll and ::destroy.
  Status trim();
  Status wait(Stream stream);
  Status poll();
  Status destroy();
  /// Waits until this rank's calls have run, but for captured ones.
  Status wait_for_calls(std::string_view operation);

 private:
  bool is_last_stream(StreamId id) const { return launched_ && id == last_stream_id_; }
  /// Orders the stream, which is not being captured, after earlier calls; returns its id.
  Result<StreamId> follow_last_call(std::string_view operation, cudaStream_t stream);
  /// Records the end of a call that is not captured, after its launches.
  cudaError_t record_last_call(cudaStream_t stream, StreamId id);
  /// Clears the pending fault and describes it; ok if there is none.
  Status take_fault();

  LiveGroup alive_;  // declared first, so that it is destroyed last: it keeps memory of the parts that must outlive
                     // them
  std::int64_t timeout_ns_;
  Parts parts_;
  Staging staging_;
  bool launched_ = false;        // a call was launched, so the last call's event has been recorded
  StreamId last_stream_id_ = 0;  // if launched_: another call on this stream needs neither checks nor ordering
  /// Stream of the current call, once it was checked.
  struct CheckedStream {
    cudaStream_t stream;
    StreamId id;
  };
  std::optional<CheckedStream> checked_;
};

/// Status of a call whose arguments were refused by this rank's checks; ok for other calls.
Status status_of(const CallRecord& record);

}  // namespace ferry::cuda

#endif  // FERRY_CUDA_CONTEXT_CONTEXT_HPP
