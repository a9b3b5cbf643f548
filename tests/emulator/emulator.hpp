#ifndef FERRY_TESTS_EMULATOR_EMULATOR_HPP
#define FERRY_TESTS_EMULATOR_EMULATOR_HPP

/// Runs CUDA kernels on the CPU: the kernel's own source, compiled as C++ (cuda_emulated.hpp), with a fiber for every
/// thread. All blocks of all kernels that have begun, on all streams, are alive at the same time, unless limited, and
/// take turns in an order drawn from a seed, so that blocks and ranks may wait for each other, and every run can be
/// repeated.
///
/// The emulator finds errors that depend on the order of threads: a missing wait, barrier or count, words reused too
/// early, lanes that diverge. Memory is the CPU's, and stores are visible at once: it finds no missing fence. Turns
/// change where a kernel polls, stores a flag, meets other threads or uses an atomic.

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>

namespace ferry::emulator {

struct GridShape {
  unsigned num_blocks = 1;
  unsigned num_threads = 1;
  std::size_t shared_bytes = 0;
  bool overlaps = false;  ///< begins beside the previous grid of the stream, and itself waits for its end
};

/// Progress of the work queued on a stream. Guarded by the machine.
struct Progress {
  std::uint64_t num_queued = 0;
  std::uint64_t num_done = 0;
};

/// A place in a stream's work, reached when all earlier work is done.
struct Mark {
  std::shared_ptr<const Progress> progress;
  std::uint64_t num_works = 0;

  bool is_over() const { return progress == nullptr || progress->num_done >= num_works; }
};

/// A host with GPUs. Only one may exist in a process at a time. Any thread may queue work.
class Machine {
 public:
  explicit Machine(std::uint64_t seed);
  ~Machine();
  Machine(const Machine&) = delete;
  Machine& operator=(const Machine&) = delete;

  /// A queue of work, as in CUDA. Work of different streams runs concurrently, at speeds drawn for each kernel.
  cudaStream_t add_stream();
  /// Ends the stream once its work is done. No more work may be queued on it.
  void close_stream(cudaStream_t stream);

  /// Lets at most `max_blocks` blocks of each grid of the stream be alive at the same time. The others begin in the
  /// order of their numbers, one whenever another ends, as where a kernel has more blocks than the multiprocessors that
  /// it may use. Called before work is queued.
  void limit_blocks(cudaStream_t stream, unsigned max_blocks);

  /// Queues a call on the host.
  void enqueue(cudaStream_t stream, std::function<void()> call);

  /// Queues a long host call, during which other streams continue. Only if the machine is live.
  void enqueue_beside(cudaStream_t stream, std::function<void()> call);

  /// Delays all work queued later until the mark is reached.
  void enqueue_wait(cudaStream_t stream, Mark awaited);

  /// Queues a grid of threads that each call `body`.
  void launch(cudaStream_t stream, const GridShape& shape, std::function<void()> body);

  /// Runs all queued work. Returns the error: threads that wait for an event that cannot happen, or shared memory
  /// overrun; "" if there was none. After an error the machine is unusable.
  ///
  /// The clock of the kernels (`now_ns`) stands still while anything makes progress, and advances by seconds when
  /// nothing does: a deadline expires exactly if its wait would last forever.
  std::string run();

  /// Makes the clock also advance with each poll by a thread of a value that others may change.
  void let_looks_take(std::uint64_t look_ns);

  /// Runs all queued work for the life of the process, beside threads of the host and on their clock. Returns only on
  /// an error.
  std::string run_live();

  /// Mark after all work queued on the stream.
  Mark mark(cudaStream_t stream) const;
  bool is_over(const Mark& mark) const;
  /// Waits until the mark is reached. Only if the machine is live.
  void wait(const Mark& mark) const;

  struct State;
  State& state() { return *state_; }

 private:
  std::unique_ptr<State> state_;
};

// Functions that kernels call through cuda_emulated.hpp and the headers in shim/.

struct ThreadPlace {
  uint3 thread;
  uint3 block;
  dim3 num_threads;
  dim3 num_blocks;
};
/// Place of the thread whose turn it is.
inline const ThreadPlace* the_place = nullptr;
inline const ThreadPlace& place() { return *the_place; }

/// Lets other threads run before this thread reads a value that they may change.
void poll();

/// Announces a change of a value that other threads may read. They may get a turn.
void about_to_store();

/// Meets the other lanes of `mask` in the same `operation`; returns the values of lanes 0 to 31.
const std::uint64_t* meet_lanes(const char* operation, std::uint32_t mask, std::uint64_t value);

/// Combined votes of a block's threads.
struct BlockVote {
  bool all = true;
  bool any = false;
  int count = 0;
};
BlockVote meet_block(bool vote);

/// Waits until the previous grid of the stream has ended.
void await_grid_before();

std::byte* dynamic_shared();
/// The block's object of this type, with arbitrary content at first.
std::byte* static_shared(const void* type, std::size_t num_bytes);
std::uint64_t now_ns();

/// The only machine of the process.
Machine& the_machine();

/// Called before each launch: emulates CUDA's loading of a kernel at its first launch.
void about_to_launch(const void* kernel);

/// Launches on the machine, from a kernel's own source.
void launch_grid(cudaStream_t stream, const GridShape& shape, std::function<void()> body);

}  // namespace ferry::emulator

#endif  // FERRY_TESTS_EMULATOR_EMULATOR_HPP
