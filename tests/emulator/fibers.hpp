#ifndef FERRY_TESTS_EMULATOR_FIBERS_HPP
#define FERRY_TESTS_EMULATOR_FIBERS_HPP

/// Threads of the grids that have begun: whose turn is next, and which threads wait for which.

#include <csetjmp>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "emulator/emulator.hpp"

namespace ferry::emulator {

inline constexpr int kWarpLanes = 32;
/// Name of the operation in which threads wait for their block.
inline constexpr const char* kMeetsBlock = "__syncthreads";

struct Grid;
struct Block;
struct Warp;

struct FreeMemory {
  void operator()(std::byte* memory) const { std::free(memory); }
};

/// A stack, which threads have one after the other, and the place at which its thread continues.
struct Fiber {
  std::byte* stack = nullptr;
  std::jmp_buf where{};
  bool started = false;
};

/// Lanes of a warp that meet. It lasts until each has read the others' values.
struct Meeting {
  std::uint32_t mask = 0;
  std::uint32_t arrived = 0;
  int num_readers = 0;
  const char* operation = "";
  std::uint64_t lanes[kWarpLanes] = {};
};

struct Thread {
  Fiber* fiber = nullptr;
  Block* block = nullptr;
  Warp* warp = nullptr;
  std::vector<Thread*>* list = nullptr;  ///< list of ready or polling threads that holds this one, if any
  std::size_t list_idx = 0;
  const char* waits_in = nullptr;
  Meeting* met = nullptr;  ///< its values may be read until the thread meets others again
  ThreadPlace place{};
};

struct Warp {
  Thread* threads[kWarpLanes] = {};
  Meeting* meetings[kWarpLanes] = {};  ///< those that have not met yet
  int num_meetings = 0;
  std::uint32_t ready = 0;  ///< lanes that are ready to run
  bool polled = false;      ///< a lane has polled since the last meeting
};

struct Block {
  Grid* grid = nullptr;
  std::vector<Thread> threads;
  std::vector<Warp> warps;
  std::vector<std::byte> memory;
  std::byte* shared = nullptr;
  std::map<const void*, std::vector<std::byte>> statics;  ///< by type
  unsigned num_alive = 0;
  unsigned num_arrived = 0;
  unsigned num_ready = 0;
  BlockVote vote;  ///< of the threads that have arrived
  BlockVote voted;
  unsigned pace = 1;
};

struct Grid {
  const Grid* before = nullptr;  ///< the previous grid of the stream, if this one began beside it
  GridShape shape;
  std::function<void()> body;
  std::deque<Block> blocks;  ///< those that have begun
  unsigned num_alive = 0;    ///< blocks that have not ended
  unsigned max_blocks = 0;   ///< most that are alive at the same time
  unsigned pace = 1;
};

/// Scheduler of fibers. All threads run on the host thread that calls take_turns.
class Fibers {
 public:
  explicit Fibers(std::uint64_t seed);
  ~Fibers();
  Fibers(const Fibers&) = delete;
  Fibers& operator=(const Fibers&) = delete;

  /// Makes threads of a warp take turns in lane order, those of a block one after the other for a while, and all grids
  /// run at the same speed. This is faster, because a block's stacks stay in the cache; the threads of the host still
  /// vary the order.
  void hurry() { hurries_ = true; }

  /// Adds the grid: its threads get turns from now on.
  void begin(Grid& grid);

  /// Takes some turns, fewer if no thread can have one.
  void take_turns();

  bool can_go_on() const { return !ready_.empty() || !polling_.empty(); }
  bool only_poll() const { return ready_.empty(); }
  /// Whether all threads only poll and each has polled long enough without progress.
  bool stand_still() const { return ready_.empty() && still_turns_ >= kStillTurns * polling_.size(); }
  /// Blocks, of grids that have begun, that have not ended.
  unsigned num_blocks() const { return num_blocks_; }
  const std::string& error() const { return error_; }
  void set_error(std::string text) { error_ = std::move(text); }

  /// Records a change that other threads may see.
  void moved() {
    still_turns_ = 0;
    num_moves_++;
  }
  std::uint64_t num_moves() const { return num_moves_; }
  void forget_still_turns() { still_turns_ = 0; }

  void let_looks_take(std::uint64_t look_ns) { look_ns_ = look_ns; }
  /// Time that polls have taken.
  std::uint64_t looked_ns() const { return looked_ns_; }

  // For the thread whose turn it is.

  Thread& current() { return *current_; }
  /// Gives turns to other threads, because this one can only poll.
  void poll();
  void maybe_give_turn();
  void wait_in(const char* what);
  void set_ready(Thread& thread);
  /// Releases the threads that have met, except `last`, which does not wait.
  void release(Block& block, const Thread* last);
  /// A meeting that has no lanes yet.
  Meeting& begin_meeting(std::uint32_t mask, const char* operation);
  /// Ends the thread's use of the values of its last meeting.
  void forget_meeting(Thread& thread);
  [[noreturn]] void fail(std::string text);

 private:
  /// Turns of each thread, when all only poll and nothing changes, before the clock advances. Kernels read the clock
  /// every 64 polls.
  static constexpr std::uint64_t kStillTurns = 300;

  bool one_in(unsigned n) { return n <= 1 || random_() % n == 0; }
  unsigned draw_pace();
  Thread& draw();
  Thread* next_of_block() const;
  void add_fibers();
  void begin_block(Grid& grid);
  void put(Thread& thread, std::vector<Thread*>* list);
  Thread* next_turn();
  [[noreturn]] void go_to(Thread* next);
  void give_turn();
  [[noreturn]] static void run_threads();
  void end_thread();

  std::minstd_rand random_;
  std::vector<Thread*> ready_;    ///< ready to run
  std::vector<Thread*> polling_;  ///< can only poll
  std::vector<std::unique_ptr<std::byte, FreeMemory>> stack_chunks_;
  std::deque<Fiber> fibers_;
  std::vector<Fiber*> idle_fibers_;
  std::vector<std::unique_ptr<Meeting>> meetings_;
  std::vector<Meeting*> idle_meetings_;
  Thread* current_ = nullptr;
  Thread* last_ = nullptr;  ///< had the last turn; null if its block has ended
  int turns_left_ = 0;
  std::jmp_buf scheduler_{};
  std::string error_;
  std::uint64_t still_turns_ = 0;
  std::uint64_t num_moves_ = 0;
  std::uint64_t look_ns_ = 0;
  std::uint64_t looked_ns_ = 0;
  unsigned num_blocks_ = 0;
  bool hurries_ = false;
};

/// Fibers of the only machine.
Fibers& fibers();

}  // namespace ferry::emulator

#endif  // FERRY_TESTS_EMULATOR_FIBERS_HPP
