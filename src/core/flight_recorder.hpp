#ifndef FERRY_CORE_FLIGHT_RECORDER_HPP
#define FERRY_CORE_FLIGHT_RECORDER_HPP

#include <cstdint>
#include <span>
#include <string_view>

#include "core/flight_record.hpp"
#include "ferry/status.hpp"
#include "ferry/types.hpp"

namespace ferry {

/// Arguments of a call that its entry shows.
struct RecordedShape {
  std::int64_t num_tokens = -1;
  std::int64_t num_topk = -1;
  std::int64_t row_bytes = 0;
  DType dtype = DType::kUint8;
};

/// Rank and group that a record is of.
struct RecordOwner {
  std::uint64_t group_id = 0;
  int rank = 0;
  int num_ranks = 1;
  int ranks_per_node = 1;
  std::int64_t timeout_ns = 0;
};

/// Writer of a rank's flight record, which outlives it.
class FlightRecorder {
 public:
  explicit FlightRecorder(FlightRecord& record) : record_(&record) {}

  /// Publishes the record. Called once, before the first call.
  void open(const RecordOwner& owner);

  /// Number of the present or last collective call, from 1; 0: there was none.
  std::int64_t number() const { return num_calls_; }
  /// Begins the entry of a call.
  void begin(RecordedOperation operation);
  /// Adds the arguments to the entry of the present call.
  void describe(const RecordedShape& shape);
  /// The present call has reached `phase`.
  void reach(CallPhase phase) {
    if (in_call_) entry().phase.store(static_cast<std::uint8_t>(phase), std::memory_order_release);
  }
  /// Ends the entry of the present call. `done`: phase of a call that returns ok.
  void end(const Status& status, CallPhase done);

  /// Counts the waits of the present call, whether or not they last.
  void count_wait() { ++num_waits_; }
  /// Shows a wait that lasts: `missing` are the ranks whose part is missing. `which`: kHostWait or kGpuWait.
  void show_wait(std::size_t which, std::span<const int> missing, std::string_view reason, std::int64_t since_ns);
  void end_wait(std::size_t which);

 private:
  FlightEntry& entry() { return record_->calls[num_entries_ % kNumRecordedCalls]; }

  FlightRecord* record_;
  std::uint64_t num_entries_ = 0;  ///< entries that have ended; the present one is behind them
  std::int64_t num_calls_ = 0;     ///< collective calls
  std::int32_t num_waits_ = 0;     ///< of the present call
  bool in_call_ = false;
};

/// Records a call from its construction on. `recorder` may be null: nothing is recorded.
class RecordedScope {
 public:
  RecordedScope(FlightRecorder* recorder, RecordedOperation operation) : recorder_(recorder) {
    if (recorder_ != nullptr) recorder_->begin(operation);
  }
  RecordedScope(const RecordedScope&) = delete;
  RecordedScope& operator=(const RecordedScope&) = delete;

  void describe(const RecordedShape& shape) {
    if (recorder_ != nullptr) recorder_->describe(shape);
  }
  /// Ends the entry; returns `status`. Every way out of a call passes here once.
  Status end(Status status, CallPhase done = CallPhase::kReturned) {
    if (recorder_ != nullptr) recorder_->end(status, done);
    return status;
  }

 private:
  FlightRecorder* recorder_;
};

}  // namespace ferry

#endif  // FERRY_CORE_FLIGHT_RECORDER_HPP
