#ifndef FERRY_CUDA_FAR_LINK_HPP
#define FERRY_CUDA_FAR_LINK_HPP

/// This rank's end of the network of latency mode: connections to the ranks of all other nodes, the memory that moves
/// over them, and the thread that drives it.

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string_view>
#include <vector>

#include "core/backend_context.hpp"
#include "cuda/context/parts.hpp"
#include "cuda/far/params.hpp"
#include "cuda/far/source.hpp"
#include "cuda/memory/pinned_memory.hpp"
#include "one_sided/driver.hpp"

namespace ferry::cuda {

class FarLink {
 public:
  /// Collective: succeeds on all ranks or fails on all, with `my_status` if that is an error. `parts` outlives it. Null
  /// on all ranks where one of them cannot have its inbox in GPU memory, as `layout` says, and the program has not
  /// asked for it (GroupOptions::ring_memory).
  static Result<std::unique_ptr<FarLink>> create(const BackendContext& context, const Parts& parts,
                                                 const FarLayout& layout, const Status& my_status);
  /// Sends what was posted, within the group's deadline.
  ~FarLink();
  FarLink(const FarLink&) = delete;
  FarLink& operator=(const FarLink&) = delete;

  const FarParams& params() const { return params_; }
  /// Pinned memory that `layout` takes, and GPU memory.
  static std::size_t memory_bytes(const FarLayout& layout);
  static std::size_t gpu_memory_bytes(const FarLayout& layout);
  /// Memory of at least so many bytes from which rows of combines leave, of the same kind as the inbox. It stays until
  /// the group ends, since graphs may use it, unless a later call takes more before a combine has used it.
  /// `operation`: the call whose error it is.
  /// @errors kSystem, kCuda: no memory can be taken or locked
  Result<PinnedBlock> take_returns(std::string_view operation, std::size_t num_bytes);
  /// A combine uses the memory that was taken last.
  void use_returns() { returns_used_ = true; }
  /// Adds the traffic to all ranks of a node to that of its rail peer. Waits, a second at most, until everything that
  /// was posted is counted.
  void add_traffic(NetworkUsage& usage) const;
  /// Returns once far ranks have all messages that kernels have posted, or are lost; after a second at most.
  void send_rest();
  /// Memory that this rank holds, pinned and of the GPU. Any thread.
  std::size_t held_bytes() const { return held_bytes_.load(std::memory_order_relaxed); }
  /// A message of each kind to each far rank is about to be posted: wakes the thread that looks for them.
  void expect_posts();

 private:
  class Answer;
  using Answers = std::vector<std::unique_ptr<Answer>>;  // by number of the far rank

  FarLink() = default;
  Status open(const BackendContext& context, const Parts& parts, const FarLayout& layout, const Status& my_status,
              Status* failure);
  Answers ask_all(one_sided::NetworkRequest request, std::int64_t end_ns);
  Status await_answers(std::int64_t limit_ns);
  Status take_memory(const BackendContext& context, const Parts& parts, const FarLayout& layout);

  Status find_lost();

  call::CallSync* sync_ = nullptr;
  int device_ = 0;
  PinnedBlock block_;
  std::shared_ptr<std::byte> gpu_;    // inbox and outbox; null: they are in block_
  std::vector<PinnedBlock> returns_;  // each is larger than the one before
  std::size_t returns_bytes_ = 0;     // of the last one
  bool returns_used_ = false;         // of the last one
  std::atomic<std::size_t> held_bytes_{0};
  std::shared_ptr<std::byte> state_;
  FarParams params_;
  FarSource::Options options_;
  std::unique_ptr<FarSource> source_;
  std::unique_ptr<one_sided::Driver> driver_;
  bool is_open_ = false;
};

}  // namespace ferry::cuda

#endif  // FERRY_CUDA_FAR_LINK_HPP
