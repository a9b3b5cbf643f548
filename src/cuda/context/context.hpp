#ifndef FERRY_CUDA_CONTEXT_CONTEXT_HPP
#define FERRY_CUDA_CONTEXT_CONTEXT_HPP

/// An open group on this rank: its parts, and how calls begin, end and fail, whatever they move.

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

/// What CUDA numbers streams by. Unlike a handle it is never used again.
using StreamId = unsigned long long;

/// A call that is being launched: its stream, and how peers identify it.
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
  /// Waits for the last call: kernels end by their deadline, or when a peer is lost, and what they use must last until
  /// then.
  ~Context();
  Context(const Context&) = delete;
  Context& operator=(const Context&) = delete;

  const Parts& parts() const { return parts_; }
  std::int64_t timeout_ns() const { return timeout_ns_; }
  Staging& staging() { return staging_; }

  /// Checks that the group is whole and the stream one of this GPU's. The result: is the stream being captured?
  Result<bool> check_stream(std::string_view operation, Stream stream);
  /// Orders the stream after earlier calls and publishes the record to the peers. An error leaves the peers waiting:
  /// refuse the call.
  Result<Launch> begin(const CallRecord& record, cudaStream_t stream, bool captured);
  /// After the call's last launch, whether or not it succeeded: memory is reused only after what was launched.
  Status end(const Launch& launch, cudaError_t launched, std::string_view operation);
  /// This rank cannot make the call, because of `status`: launches a kernel by which the peers learn of it. `refused` is
  /// the record with that status. Returns `status` in the words that the peers will find.
  Status refuse(const CallRecord& record, Stream stream, const Status& status,
                const std::function<cudaError_t(const Launch& launch, const CallRecord& refused)>& launch_refusal);

  /// Puts work of this rank alone on the stream, after its earlier calls; what they use rests until it is done.
  /// `captured`: what check_stream has just said of the stream, if it was asked.
  Status launch_local(std::string_view operation, Stream stream, const std::function<cudaError_t(cudaStream_t)>& launch,
                      std::optional<bool> captured = {});

  /// Breaks the group because of an error that is this rank's own.
  Status fail(const Status& status);
  /// Breaks the group because `rank` did not come in time.
  Status give_up_on(int rank, std::string_view what);
  /// For waits of the host: see GroupState::expect_wait.
  void expect_wait();
  /// For waits of the host in `operation`: see GroupState::check_interrupt. Kernels of this rank that wait end as well.
  Status check_interrupt(std::string_view operation);
  /// This rank ran out of host memory inside a call: the others must not wait for it.
  Status out_of_memory(Operation operation);

  /// A wait of a kernel that timed out or was stopped, as a Status that breaks the group; ok if there was none.
  Status check_lost();
  Status describe(const FaultReport& fault, std::string_view operation,
                  RailLink::FaultOf records = RailLink::FaultOf::kAnyCall) const;

  /// Backend::trim, ::wait, ::poll and ::destroy.
  Status trim();
  Status wait(Stream stream);
  Status poll();
  Status destroy();

 private:
  bool is_last_stream(StreamId id) const { return launched_ && id == last_stream_id_; }
  /// Orders the stream, which is not captured, after earlier calls; returns its id.
  Result<StreamId> follow_last_call(std::string_view operation, cudaStream_t stream);
  /// After the launches of a call that is not captured.
  cudaError_t record_last_call(cudaStream_t stream, StreamId id);
  /// Clears the pending fault and describes it; ok if there is none.
  Status take_fault();

  LiveGroup alive_;  // first, so that it goes last: memory of the parts may have to rest
  std::int64_t timeout_ns_;
  Parts parts_;
  Staging staging_;
  bool launched_ = false;        // something was, so the last call's event has been recorded
  StreamId last_stream_id_ = 0;  // if launched_: one more call there needs neither checks nor ordering
  /// Of the call that is being made, once its stream was checked.
  struct CheckedStream {
    cudaStream_t stream;
    StreamId id;
  };
  std::optional<CheckedStream> checked_;
};

/// Status of a call whose arguments this rank's checks refused; ok for others.
Status status_of(const CallRecord& record);

}  // namespace ferry::cuda

#endif  // FERRY_CUDA_CONTEXT_CONTEXT_HPP
