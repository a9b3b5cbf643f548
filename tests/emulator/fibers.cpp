#include "emulator/fibers.hpp"

#include <algorithm>
#include <utility>

#include <ucontext.h>

namespace ferry::emulator {
namespace {

constexpr std::size_t kStackBytes = std::size_t{64} << 10;
/// Number of different offsets at which stacks begin; with a single one all stacks would use the same few cache sets.
constexpr std::size_t kStackColours = 32;
constexpr std::size_t kStackStepBytes = 448;
/// Initial content of shared memory. After the requested bytes it must stay unchanged.
constexpr std::byte kPoison{0xA5};
constexpr std::size_t kGuardBytes = 128;
constexpr std::size_t kSharedAlignment = 128;

/// Moves the thread to another list; null: to none.
void put(Thread& thread, std::vector<Thread*>* list) {
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

}  // namespace

Fibers::Fibers(std::uint64_t seed) { random_.seed(static_cast<std::uint_fast32_t>(seed ^ seed >> 32)); }

void Fibers::begin(Grid& grid) {
  grid.num_alive = grid.shape.num_blocks;
  grid.pace = draw_pace();
  num_blocks_ += grid.num_alive;
  const unsigned num_first = std::min(grid.shape.num_blocks, grid.max_blocks);
  while (grid.blocks.size() < num_first) begin_block(grid);
}

void Fibers::take_turns() {
  constexpr int kTurnsPerLook = 64;
  for (int i = 0; i < kTurnsPerLook && error_.empty() && can_go_on(); ++i) {
    if (ready_.empty()) ++still_turns_;
    resume(draw());
  }
}

unsigned Fibers::draw_pace() {
  if (hurries_) return 1;
  constexpr unsigned kPaces[] = {1, 1, 2, 8};
  return kPaces[random_() % std::size(kPaces)];
}

/// The lane after the one that had the last turn, if it is ready.
Thread* Fibers::next_of_warp() const {
  if (current_ == nullptr) return nullptr;
  const unsigned lane = (current_->place.thread.x + 1) % kWarpLanes;
  Thread* const next = current_->warp->threads[lane];
  return next != nullptr && next->list == &ready_ ? next : nullptr;
}

/// Draws a thread for the next turn.
Thread& Fibers::draw() {
  constexpr unsigned kPollingPace = 8;
  if (hurries_) {
    if (Thread* const next = next_of_warp(); next != nullptr) return *next;
  }
  if (ready_.empty() || (!polling_.empty() && one_in(kPollingPace))) return *polling_[random_() % polling_.size()];
  for (;;) {
    Thread& thread = *ready_[random_() % ready_.size()];
    if (one_in(thread.block->grid->pace) && one_in(thread.block->pace)) return thread;
  }
}

/// Begins the next block of the grid.
void Fibers::begin_block(Grid& grid) {
  const auto block_idx = static_cast<unsigned>(grid.blocks.size());
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
    if (stacks_.empty()) {
      thread.stack = std::make_unique_for_overwrite<std::byte[]>(kStackBytes);
    } else {
      thread.stack = std::move(stacks_.back());
      stacks_.pop_back();
    }
    set_ready(thread);
  }
}

void Fibers::resume(Thread& thread) {
  current_ = &thread;
  if (_setjmp(scheduler_) != 0) return;
  if (thread.started) _longjmp(thread.where, 1);
  thread.started = true;
  ucontext_t context{};
  getcontext(&context);
  context.uc_stack.ss_sp = thread.stack.get();
  context.uc_stack.ss_size = kStackBytes - num_started_++ % kStackColours * kStackStepBytes;
  context.uc_link = nullptr;
  makecontext(&context, enter_thread, 0);
  setcontext(&context);
}

/// Returns to the scheduler; continues with this thread's next turn.
void Fibers::give_turn() {
  if (_setjmp(current_->where) == 0) _longjmp(scheduler_, 1);
}

void Fibers::poll() {
  Thread& thread = *current_;
  looked_ns_ += look_ns_;
  put(thread, &polling_);
  give_turn();
  set_ready(thread);
}

void Fibers::maybe_give_turn() {
  constexpr unsigned kPace = 2;
  constexpr unsigned kHurriedPace = 16;
  if (one_in(hurries_ ? kHurriedPace : kPace)) give_turn();
}

void Fibers::set_ready(Thread& thread) {
  thread.waits_in = nullptr;
  put(thread, &ready_);
}

void Fibers::wait_in(const char* what) {
  current_->waits_in = what;
  put(*current_, nullptr);
  give_turn();
}

void Fibers::fail(std::string text) {
  error_ = std::move(text);
  _longjmp(scheduler_, 1);
}

void Fibers::enter_thread() {
  fibers().current_->block->grid->body();
  fibers().end_thread();
}

void Fibers::end_thread() {
  Block& block = *current_->block;
  put(*current_, nullptr);
  stacks_.push_back(std::move(current_->stack));  // this thread still uses the stack, but does not run again
  current_->waits_in = nullptr;
  --block.num_alive;
  moved();
  if (block.num_alive > 0 && block.num_arrived == block.num_alive) release(block, nullptr);
  if (block.num_alive == 0) {
    for (std::size_t i = 0; i < kGuardBytes; ++i) {
      if (block.shared[block.grid->shape.shared_bytes + i] != kPoison) fail("a block wrote past its shared memory");
    }
    Grid& grid = *block.grid;
    --grid.num_alive;
    --num_blocks_;
    if (grid.blocks.size() < grid.shape.num_blocks) begin_block(grid);
  }
  current_ = nullptr;
  _longjmp(scheduler_, 1);
}

void Fibers::release(Block& block, const Thread* last) {
  for (Thread& thread : block.threads) thread.vote = block.vote;
  block.vote = {};
  block.num_arrived = 0;
  moved();
  for (Thread& thread : block.threads) {
    if (&thread != last && thread.waits_in == kMeetsBlock) set_ready(thread);
  }
}

// In this file because the memory and its fill byte are here.
std::byte* static_shared(const void* type, std::size_t num_bytes) {
  std::vector<std::byte>& object = fibers().current().block->statics[type];
  if (object.empty()) object.assign(num_bytes, kPoison);
  return object.data();
}

}  // namespace ferry::emulator
