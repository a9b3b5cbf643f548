#include "emulator/emulator.hpp"

#include <csetjmp>
#include <cstring>
#include <deque>
#include <random>
#include <utility>
#include <vector>

#include <ucontext.h>

namespace ferry::emulator {
namespace {

constexpr int kWarpLanes = 32;
constexpr std::size_t kStackBytes = std::size_t{64} << 10;
/// Stacks begin at so many different places, or all would lie in the same few sets of the processor's caches.
constexpr std::size_t kStackColours = 32;
constexpr std::size_t kStackStepBytes = 448;
/// Kernels find this in shared memory that nobody has written, and it must still follow what they have asked for.
constexpr std::byte kPoison{0xA5};
constexpr std::size_t kGuardBytes = 128;
constexpr std::size_t kSharedAlignment = 128;
/// Turns of each thread, where all only poll and nothing moves, before the clock goes on. Kernels look at the clock
/// every 64 polls.
constexpr std::uint64_t kStillTurns = 300;
constexpr std::uint64_t kClockStepNs = 10'000'000'000;
/// Steps of the clock, more than any deadline, in which nothing moves.
constexpr int kMaxClockSteps = 40;

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

struct Work {
  std::function<void()> call;
  bool is_grid = false;
  GridShape shape;
};

struct Stream {
  std::deque<Work> queue;
  std::deque<std::unique_ptr<Grid>> running;  ///< those that have ended stay until those before have

  unsigned num_alive() const {
    unsigned alive = 0;
    for (const std::unique_ptr<Grid>& grid : running) alive += grid->num_alive;
    return alive;
  }
  /// Whether the next work may begin. At most two grids run at a time.
  bool has_room() const {
    if (running.empty()) return true;
    return running.size() == 1 && !queue.empty() && queue.front().is_grid && queue.front().shape.overlaps;
  }
};

Machine::State* machine = nullptr;

}  // namespace

struct Machine::State {
  std::minstd_rand random;
  std::deque<Stream> streams;
  std::vector<Thread*> ready;    ///< have something to do
  std::vector<Thread*> polling;  ///< can only look again
  std::vector<std::unique_ptr<std::byte[]>> stacks;
  Thread* current = nullptr;
  std::jmp_buf scheduler{};
  std::string error;
  std::uint64_t clock_ns = kClockStepNs;
  std::uint64_t still_turns = 0;
  int clock_steps = 0;
  std::size_t num_started = 0;

  bool one_in(unsigned n) { return n <= 1 || random() % n == 0; }

  static void put(Thread& thread, std::vector<Thread*>* list) {
    if (thread.list != nullptr) {
      thread.list->back()->list_idx = thread.list_idx;
      (*thread.list)[thread.list_idx] = thread.list->back();
      thread.list->pop_back();
    }
    thread.list = list;
    if (list == nullptr) return;
    thread.list_idx = list->size();
    list->push_back(&thread);
  }

  void set_ready(Thread& thread) {
    thread.waits_in = nullptr;
    put(thread, &ready);
  }

  void moved() {
    still_turns = 0;
    clock_steps = 0;
  }

  /// Back to the scheduler; returns with this thread's next turn.
  void give_turn() {
    if (_setjmp(current->where) == 0) _longjmp(scheduler, 1);
  }

  void wait_in(const char* what) {
    current->waits_in = what;
    put(*current, nullptr);
    give_turn();
  }

  [[noreturn]] void fail(std::string text) {
    error = std::move(text);
    _longjmp(scheduler, 1);
  }

  static void enter_thread() {
    machine->current->block->grid->body();
    machine->end_thread();
  }

  void give_vote(Block& block) {
    for (Thread& thread : block.threads) thread.vote = block.vote;
    block.vote = {};
    block.num_arrived = 0;
    moved();
  }

  [[noreturn]] void end_thread() {
    Block& block = *current->block;
    put(*current, nullptr);
    stacks.push_back(std::move(current->stack));  // this thread stands on it, but runs no more
    current->waits_in = nullptr;
    --block.num_alive;
    moved();
    if (block.num_alive > 0 && block.num_arrived == block.num_alive) release(block, nullptr);
    if (block.num_alive == 0) {
      for (std::size_t i = 0; i < kGuardBytes; ++i) {
        if (block.shared[block.grid->shape.shared_bytes + i] != kPoison) fail("a block wrote past its shared memory");
      }
      --block.grid->num_alive;
    }
    _longjmp(scheduler, 1);
  }

  /// Lets the threads go that have met, but `last`, which does not wait.
  void release(Block& block, const Thread* last) {
    give_vote(block);
    for (Thread& thread : block.threads) {
      if (&thread != last && thread.waits_in != nullptr && std::strcmp(thread.waits_in, "__syncthreads") == 0) {
        set_ready(thread);
      }
    }
  }

  void resume(Thread& thread) {
    current = &thread;
    if (_setjmp(scheduler) != 0) return;
    if (thread.started) _longjmp(thread.where, 1);
    thread.started = true;
    ucontext_t context{};
    getcontext(&context);
    context.uc_stack.ss_sp = thread.stack.get();
    context.uc_stack.ss_size = kStackBytes - num_started++ % kStackColours * kStackStepBytes;
    context.uc_link = nullptr;
    makecontext(&context, enter_thread, 0);
    setcontext(&context);
  }

  unsigned draw_pace() {
    constexpr unsigned kPaces[] = {1, 1, 2, 8};
    return kPaces[random() % std::size(kPaces)];
  }

  void begin_block(Grid& grid, unsigned block_idx) {
    Block& block = grid.blocks.emplace_back();
    block.grid = &grid;
    block.num_alive = grid.shape.num_threads;
    block.pace = draw_pace();
    block.memory.assign(grid.shape.shared_bytes + kGuardBytes + kSharedAlignment, kPoison);
    const auto address = reinterpret_cast<std::uintptr_t>(block.memory.data());
    block.shared = block.memory.data() + (kSharedAlignment - address % kSharedAlignment) % kSharedAlignment;
    block.warps.resize((grid.shape.num_threads + kWarpLanes - 1) / kWarpLanes);
    for (unsigned i = 0; i < grid.shape.num_threads; ++i) {
      Thread& thread = block.threads.emplace_back();
      thread.place = {{i, 0, 0}, {block_idx, 0, 0}, dim3(grid.shape.num_threads), dim3(grid.shape.num_blocks)};
      thread.block = &block;
      thread.warp = &block.warps[i / kWarpLanes];
      thread.warp->threads[i % kWarpLanes] = &thread;
      if (stacks.empty()) {
        thread.stack = std::make_unique_for_overwrite<std::byte[]>(kStackBytes);
      } else {
        thread.stack = std::move(stacks.back());
        stacks.pop_back();
      }
      set_ready(thread);
    }
  }

  /// Begins what streams have next; whether any had something, or has.
  bool serve_streams() {
    bool busy = false;
    for (Stream& stream : streams) {
      if (stream.num_alive() == 0) stream.running.clear();
      while (stream.has_room()) {
        if (stream.queue.empty()) break;
        Work work = std::move(stream.queue.front());
        stream.queue.pop_front();
        moved();
        if (!work.is_grid) {
          work.call();
          continue;
        }
        const Grid* const before = stream.running.empty() ? nullptr : stream.running.front().get();
        Grid& grid = *stream.running.emplace_back(std::make_unique<Grid>());
        grid.before = before;
        grid.shape = work.shape;
        grid.body = std::move(work.call);
        grid.num_alive = grid.shape.num_blocks;
        grid.pace = draw_pace();
        for (unsigned i = 0; i < grid.shape.num_blocks; ++i) begin_block(grid, i);
      }
      busy = busy || !stream.running.empty();
    }
    return busy;
  }

  bool can_go_on() const { return !ready.empty() || !polling.empty(); }

  /// A thread for the next turn.
  Thread& draw() {
    constexpr unsigned kPollingPace = 8;
    if (ready.empty() || (!polling.empty() && one_in(kPollingPace))) return *polling[random() % polling.size()];
    for (;;) {
      Thread& thread = *ready[random() % ready.size()];
      if (one_in(thread.block->grid->pace) && one_in(thread.block->pace)) return thread;
    }
  }

  std::string describe_waiting() const {
    std::string text;
    for (std::size_t stream = 0; stream < streams.size(); ++stream) {
      for (const std::unique_ptr<Grid>& grid : streams[stream].running) {
        for (const Block& block : grid->blocks) {
          for (const Thread& thread : block.threads) {
            if (thread.waits_in == nullptr) continue;
            return "stream " + std::to_string(stream) + ", block " + std::to_string(thread.place.block.x) +
                   ", thread " + std::to_string(thread.place.thread.x) + " waits in " + thread.waits_in;
          }
        }
      }
    }
    return "threads only poll";
  }

  std::string run() {
    while (error.empty() && serve_streams()) {
      unsigned alive = 0;
      for (const Stream& stream : streams) alive += stream.num_alive();
      const auto any_ended = [&] {
        unsigned now = 0;
        for (const Stream& stream : streams) now += stream.num_alive();
        return now != alive;
      };
      constexpr int kTurnsPerLook = 64;
      do {
        for (int i = 0; i < kTurnsPerLook && error.empty() && can_go_on(); ++i) {
          if (ready.empty()) ++still_turns;
          resume(draw());
        }
        if (still_turns >= kStillTurns * polling.size() && ready.empty()) {
          still_turns = 0;
          clock_ns += kClockStepNs;
          if (++clock_steps > kMaxClockSteps) error = "nothing moves any more: " + describe_waiting();
        }
      } while (error.empty() && can_go_on() && !any_ended());
      if (!can_go_on() && error.empty() && !any_ended()) error = "no thread can go on: " + describe_waiting();
    }
    return error;
  }
};

Machine::Machine(std::uint64_t seed) : state_(std::make_unique<State>()) {
  state_->random.seed(static_cast<std::uint_fast32_t>(seed ^ seed >> 32));
  machine = state_.get();
}

Machine::~Machine() { machine = nullptr; }

cudaStream_t Machine::add_stream() { return reinterpret_cast<cudaStream_t>(&state_->streams.emplace_back()); }

void Machine::enqueue(cudaStream_t stream, std::function<void()> call) {
  reinterpret_cast<Stream*>(stream)->queue.push_back({std::move(call), false, {}});
}

void Machine::launch(cudaStream_t stream, const GridShape& shape, std::function<void()> body) {
  reinterpret_cast<Stream*>(stream)->queue.push_back({std::move(body), true, shape});
}

std::string Machine::run() { return state_->run(); }

const ThreadPlace& place() { return machine->current->place; }

void poll() {
  Thread& thread = *machine->current;
  thread.warp->polled = true;
  Machine::State::put(thread, &machine->polling);
  machine->give_turn();
  machine->set_ready(thread);
}

void about_to_store() {
  machine->moved();
  if (machine->one_in(2)) machine->give_turn();
}

const std::uint64_t* meet_lanes(const char* operation, std::uint32_t mask, std::uint64_t value) {
  Thread& thread = *machine->current;
  Warp& warp = *thread.warp;
  const unsigned lane = thread.place.thread.x % kWarpLanes;
  std::size_t idx = 0;
  while (idx < warp.meetings.size() && (warp.meetings[idx].mask & mask) == 0) ++idx;
  if (idx == warp.meetings.size()) warp.meetings.push_back({mask, 0, operation, {}});
  Meeting& meeting = warp.meetings[idx];
  if (meeting.mask != mask || std::strcmp(meeting.operation, operation) != 0 || (mask >> lane & 1U) == 0) {
    machine->fail("lanes of a warp part: thread " + std::to_string(thread.place.thread.x) + " of block " +
                  std::to_string(thread.place.block.x) + " comes to " + operation + ", others are in " +
                  meeting.operation);
  }
  meeting.arrived |= 1U << lane;
  meeting.lanes[lane] = value;
  if (meeting.arrived != mask) {
    machine->wait_in(operation);
    return thread.lanes;
  }
  for (int i = 0; i < kWarpLanes; ++i) {
    if ((mask >> i & 1U) == 0) continue;
    std::memcpy(warp.threads[i]->lanes, meeting.lanes, sizeof(meeting.lanes));
    if (warp.threads[i] != &thread) machine->set_ready(*warp.threads[i]);
  }
  warp.meetings.erase(warp.meetings.begin() + static_cast<std::ptrdiff_t>(idx));
  if (!warp.polled) machine->moved();  // lanes that poll together move nothing
  warp.polled = false;
  return thread.lanes;
}

BlockVote meet_block(bool vote) {
  Thread& thread = *machine->current;
  Block& block = *thread.block;
  block.vote.all = block.vote.all && vote;
  block.vote.any = block.vote.any || vote;
  block.vote.count += vote ? 1 : 0;
  if (++block.num_arrived == block.num_alive) {
    machine->release(block, &thread);
  } else {
    machine->wait_in("__syncthreads");
  }
  return thread.vote;
}

void await_grid_before() {
  const Grid* const before = machine->current->block->grid->before;
  while (before != nullptr && before->num_alive > 0) poll();
}

std::byte* dynamic_shared() { return machine->current->block->shared; }

std::uint64_t now_ns() { return machine->clock_ns; }

void launch_grid(cudaStream_t stream, const GridShape& shape, std::function<void()> body) {
  reinterpret_cast<Stream*>(stream)->queue.push_back({std::move(body), true, shape});
}

}  // namespace ferry::emulator

// What loading kernels asks of the CUDA runtime, which is not there.
extern "C" {

cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* attributes, const void* /*function*/) {
  *attributes = {};
  return cudaSuccess;
}

cudaError_t cudaFuncSetAttribute(const void* /*function*/, cudaFuncAttribute /*attribute*/, int /*value*/) {
  return cudaSuccess;
}

}  // extern "C"
