#ifndef FERRY_TESTS_EMULATOR_FIBERS_HPP
#define FERRY_TESTS_EMULATOR_FIBERS_HPP

/// The threads of the grids that have begun: who is next, who waits for whom.

#include <csetjmp>
#include <cstddef>
#include <cstdint>
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
/// What threads wait in that wait for their block.
inline constexpr const char* kMeetsBlock = "__syncthreads";

struct Grid;
struct Block;
struct Warp;

struct Thread {
  ThreadPlace place{};
  Block* block = nullptr;
  Warp* warp = nullptr;
  std::unique_ptr<std::byte[]> stack;
  std::jmp_buf where{};
  bool started = false;
  std::vector<Thread*>* list = nullptr;  ///< of those that can go on, while it is one
  std::size_t list_idx = 0;
  const char* waits_in = nullptr;
  std::uint64_t lanes[kWarpLanes] = {};
  BlockVote vote;
};

/// Lanes of a warp that are coming together.
struct Meeting {
  std::uint32_t mask = 0;
  std::uint32_t arrived = 0;
  const char* operation = "";
  std::uint64_t lanes[kWarpLanes] = {};
};

struct Warp {
  Thread* threads[kWarpLanes] = {};
  std::vector<Meeting> meetings;
  bool polled = false;  ///< since lanes met last
};

struct Block {
  Grid* grid = nullptr;
  std::deque<Thread> threads;
  std::deque<Warp> warps;
  std::vector<std::byte> memory;
  std::byte* shared = nullptr;
  std::map<const void*, std::vector<std::byte>> statics;  ///< by type
  unsigned num_alive = 0;
  unsigned num_arrived = 0;
  BlockVote vote;
  unsigned pace = 1;
};

struct Grid {
  const Grid* before = nullptr;  ///< on its stream, where this one began beside it
  GridShape shape;
  std::function<void()> body;
  std::deque<Block> blocks;
  unsigned num_alive = 0;
  unsigned pace = 1;
};

/// All threads run on the one that calls take_turns.
class Fibers {
 public:
  explicit Fibers(std::uint64_t seed);

  /// From now on threads of a warp go on one after the other and all grids at one pace: faster, and other orders come
  /// from the host's threads.
  void hurry() { hurries_ = true; }

  /// Its threads have turns from now on.
  void begin(Grid& grid);

  /// Some turns. Fewer if nobody can have one.
  void take_turns();

  bool can_go_on() const { return !ready_.empty() || !polling_.empty(); }
  bool only_poll() const { return ready_.empty(); }
  /// Turns since anything moved, if all only poll, for each of them.
  bool stand_still() const { return ready_.empty() && still_turns_ >= kStillTurns * polling_.size(); }
  /// Blocks that have begun and not ended.
  unsigned num_blocks() const { return num_blocks_; }
  const std::string& error() const { return error_; }
  void set_error(std::string text) { error_ = std::move(text); }

  /// Something has changed that others may look at.
  void moved() {
    still_turns_ = 0;
    num_moves_++;
  }
  std::uint64_t num_moves() const { return num_moves_; }
  void forget_still_turns() { still_turns_ = 0; }

  void let_looks_take(std::uint64_t look_ns) { look_ns_ = look_ns; }
  /// What they have taken.
  std::uint64_t looked_ns() const { return looked_ns_; }

  // For the thread that has the turn.

  Thread& current() { return *current_; }
  /// Others have theirs, as one that can only look again.
  void poll();
  void maybe_give_turn();
  void wait_in(const char* what);
  void set_ready(Thread& thread);
  /// Lets the threads go that have met, but `last`, which does not wait.
  void release(Block& block, const Thread* last);
  [[noreturn]] void fail(std::string text);

 private:
  /// Turns of each thread, where all only poll and nothing moves, before the clock goes on. Kernels look at the clock
  /// every 64 polls.
  static constexpr std::uint64_t kStillTurns = 300;

  bool one_in(unsigned n) { return n <= 1 || random_() % n == 0; }
  unsigned draw_pace();
  Thread& draw();
  Thread* next_of_warp() const;
  void begin_block(Grid& grid, unsigned block_idx);
  void resume(Thread& thread);
  void give_turn();
  static void enter_thread();
  [[noreturn]] void end_thread();

  std::minstd_rand random_;
  std::vector<Thread*> ready_;    ///< have something to do
  std::vector<Thread*> polling_;  ///< can only look again
  std::vector<std::unique_ptr<std::byte[]>> stacks_;
  Thread* current_ = nullptr;
  std::jmp_buf scheduler_{};
  std::string error_;
  std::uint64_t still_turns_ = 0;
  std::uint64_t num_moves_ = 0;
  std::uint64_t look_ns_ = 0;
  std::uint64_t looked_ns_ = 0;
  std::size_t num_started_ = 0;
  unsigned num_blocks_ = 0;
  bool hurries_ = false;
};

/// Those of the machine that there is.
Fibers& fibers();

}  // namespace ferry::emulator

#endif  // FERRY_TESTS_EMULATOR_FIBERS_HPP
