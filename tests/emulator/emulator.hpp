#ifndef FERRY_TESTS_EMULATOR_EMULATOR_HPP
#define FERRY_TESTS_EMULATOR_EMULATOR_HPP

/// Runs CUDA kernels on the CPU: their own source, compiled as C++ (cuda_emulated.hpp), every thread a fiber. All
/// blocks of all kernels that have begun, on all streams, are alive together and take turns in an order drawn from a
/// seed, so that blocks and ranks may wait for each other, and every run can be repeated.
///
/// It finds what depends on the order in which threads come to each other: a missing wait, barrier or count, words
/// used again too early, lanes that part. Memory itself is the CPU's and stores are seen at once: it finds no missing
/// fence. Turns change where a kernel polls, stores a flag, meets other threads or uses an atomic.

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
  bool overlaps = false;  ///< begins beside the grid before it on the stream, and waits for its end itself
};

/// How much of what was queued on a stream is done. Guarded by the machine.
struct Progress {
  std::uint64_t num_queued = 0;
  std::uint64_t num_done = 0;
};

/// A place in a stream's work: over when all before it is done.
struct Mark {
  std::shared_ptr<const Progress> progress;
  std::uint64_t num_works = 0;

  bool is_over() const { return progress == nullptr || progress->num_done >= num_works; }
};

/// A host with GPUs. One at a time in a process. Work may be queued from any thread.
class Machine {
 public:
  explicit Machine(std::uint64_t seed);
  ~Machine();
  Machine(const Machine&) = delete;
  Machine& operator=(const Machine&) = delete;

  /// A queue of work, as in CUDA. Work of different streams runs together, at paces drawn for each kernel.
  cudaStream_t add_stream();
  /// The stream ends once its work is done. Nothing more may be queued on it.
  void close_stream(cudaStream_t stream);

  /// Queues a call on the host.
  void enqueue(cudaStream_t stream, std::function<void()> call);

  /// Queues a call on the host that may take long: other streams go on meanwhile. Where the machine is live.
  void enqueue_beside(cudaStream_t stream, std::function<void()> call);

  /// What is queued from now on begins after the mark.
  void enqueue_wait(cudaStream_t stream, Mark awaited);

  /// Queues a grid of threads that each call `body`.
  void launch(cudaStream_t stream, const GridShape& shape, std::function<void()> body);

  /// Runs everything that is queued. Returns what went wrong: threads that wait for others that will not come, shared
  /// memory overrun; "" if nothing did. After an error the machine is of no further use.
  ///
  /// The clock of the kernels (`now_ns`) stands still while anything moves, and goes on by seconds when nothing does:
  /// deadlines are met exactly when a wait would last forever.
  std::string run();

  /// From now on it also goes on with each look that a thread takes at what others may change.
  void let_looks_take(std::uint64_t look_ns);

  /// Runs whatever is queued, as long as the process lives, beside threads of the host: the clock is theirs. Returns
  /// only with what went wrong.
  std::string run_live();

  /// Behind all that is queued on the stream.
  Mark mark(cudaStream_t stream) const;
  bool is_over(const Mark& mark) const;
  /// Until the mark is over. Where the machine is live.
  void wait(const Mark& mark) const;

  struct State;
  State& state() { return *state_; }

 private:
  std::unique_ptr<State> state_;
};

// What kernels call, through cuda_emulated.hpp and the headers in shim/.

struct ThreadPlace {
  uint3 thread;
  uint3 block;
  dim3 num_threads;
  dim3 num_blocks;
};
const ThreadPlace& place();

/// Lets others run before something is looked at that they may change.
void poll();

/// Something others may look at is about to change. They may get a turn.
void about_to_store();

/// Meets the other lanes of `mask` in the same `operation`; returns what lane 0 to 31 gave.
const std::uint64_t* meet_lanes(const char* operation, std::uint32_t mask, std::uint64_t value);

/// What the threads of the block gave, taken together.
struct BlockVote {
  bool all = true;
  bool any = false;
  int count = 0;
};
BlockVote meet_block(bool vote);

/// Waits until the grid before this one on its stream has ended.
void await_grid_before();

std::byte* dynamic_shared();
/// The block's object of this type, at first as nobody has written it.
std::byte* static_shared(const void* type, std::size_t num_bytes);
std::uint64_t now_ns();

/// The machine that there is.
Machine& the_machine();

/// Called ahead of each launch: what CUDA does for a kernel that it has not loaded yet.
void about_to_launch(const void* kernel);

/// Launches on it, from a kernel's own source.
void launch_grid(cudaStream_t stream, const GridShape& shape, std::function<void()> body);

}  // namespace ferry::emulator

#endif  // FERRY_TESTS_EMULATOR_EMULATOR_HPP
