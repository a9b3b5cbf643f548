#ifndef FERRY_CPU_INTRANODE_PARTICIPANTS_HPP
#define FERRY_CPU_INTRANODE_PARTICIPANTS_HPP

/// Ranks of one node that make a call together: all of them, in which case a missing rank breaks the group; or, in
/// latency mode of groups that mask lost ranks or have absent ones, those that this rank does not mask.

#include <fmt/format.h>

#include "cpu/context/context.hpp"
#include "cpu/latency/survivors.hpp"

namespace ferry::cpu::intranode {

class Participants {
 public:
  /// `survivors`: null if all ranks take part. Both must outlive it.
  Participants(const Context& context, Survivors* survivors) : sync_(context.sync), survivors_(survivors) {}

  /// Whether ranks may be masked. Peers' masks may differ, so a rank only reads from the others' arenas, which stay
  /// mapped even after their processes end, and writes nothing to them.
  bool masks() const { return survivors_ != nullptr; }
  bool include(int rank) const { return survivors_ == nullptr || survivors_->include(rank); }

  /// CallSync::begin among the participants.
  Status begin(const node::CallDescriptor& descriptor) {
    return survivors_ == nullptr ? sync_.begin(descriptor) : survivors_->begin(descriptor);
  }
  /// The descriptor that an included rank passed to begin.
  const node::CallDescriptor& descriptor_of(int rank) const {
    return survivors_ == nullptr ? sync_.peers().descriptor_of(rank) : survivors_->descriptor_of(rank);
  }

  /// Ends the call: `take()` uses the data that the others have published; then this rank waits until no rank reads its
  /// memory any more. With masks `take` is called again whenever a rank is found to have continued without this one,
  /// because that rank may have overwritten the data that `take` read.
  template <typename Take>
  Status complete(Take take) {
    Status status = take();
    if (survivors_ == nullptr) {
      if (!status.ok()) return status;
      sync_.post(node::Phase::kDone);
      return sync_.wait(node::Phase::kDone);
    }
    while (survivors_->drop_deserters()) status = take();
    const bool breaks = status.code() == ErrorCode::kInternal || status.code() == ErrorCode::kDataCorrupt;
    if (breaks) return sync_.fail(status.code(), status.peer(), status.message());
    const Status finished = survivors_->finish();
    return status.ok() ? finished : status;
  }

  /// Error of a `rank` that published a location outside its memory. Breaks the group; with masks only complete() does,
  /// since the rank may have continued without this one.
  Status bad_location(Operation operation, int rank) {
    if (survivors_ == nullptr) return sync_.bad_location(operation, rank);
    return Status(ErrorCode::kInternal,
                  fmt::format("{}: rank {} published what is not in its arena; please report this bug",
                              to_string(operation), rank),
                  rank);
  }

  /// The result of a RowCheck. As bad_location, a wrong row breaks the group; with masks only in complete(), since the
  /// rank that sent it may have continued without this one.
  Status refuse_rows(const Status& checked) {
    if (survivors_ != nullptr || checked.ok()) return checked;
    return sync_.fail(checked.code(), checked.peer(), checked.message());
  }

 private:
  call::CallSync& sync_;
  Survivors* survivors_;
};

}  // namespace ferry::cpu::intranode

#endif  // FERRY_CPU_INTRANODE_PARTICIPANTS_HPP
