#include "emulator/fibers.hpp"

#include <algorithm>
#include <bit>
#include <cstdlib>
#include <cstring>
#include <iterator>
#include <new>
#include <utility>

#include <sys/mman.h>
#include <ucontext.h>

namespace ferry::emulator {
namespace {

/// Kernels compiled by g++ -O2 have used up to 7 KiB. The odd multiple of cache lines spreads the stacks over all sets
/// of the caches.
constexpr std::size_t kStackBytes = (std::size_t{32} << 10) + 448;
/// At the end of each stack; must stay unchanged.
constexpr std::uint64_t kStackEnd = 0x5AC3'0F96'E17B'24D8;
/// The first stacks lie in huge pages where the system has them: a turn is short, and finding the pages of its stack
/// took a third of it. Those of hundreds of thousands of threads would take up too much memory.
constexpr std::size_t kHugePageBytes = std::size_t{2} << 20;
constexpr std::size_t kStackChunkBytes = 8 * kHugePageBytes;
constexpr std::size_t kNumHugeChunks = 32;
/// Initial content of shared memory. After the requested bytes it must stay unchanged.
constexpr std::byte kPoison{0xA5};
constexpr std::size_t kGuardBytes = 128;
constexpr std::size_t kSharedAlignment = 128;

/// Chunks of stacks that no machine uses. The process keeps them: the system would clear every page of new ones, which
/// takes longer than most runs.
std::vector<std::unique_ptr<std::byte, FreeMemory>>& unused_chunks() {
  static std::vector<std::unique_ptr<std::byte, FreeMemory>> chunks;
  return chunks;
}

}  // namespace

Fibers::Fibers(std::uint64_t seed) { random_.seed(static_cast<std::uint_fast32_t>(seed ^ seed >> 32)); }

Fibers::~Fibers() { std::ranges::move(stack_chunks_, std::back_inserter(unused_chunks())); }

void Fibers::begin(Grid& grid) {
  grid.num_alive = grid.shape.num_blocks;
  grid.pace = draw_pace();
  num_blocks_ += grid.num_alive;
  const unsigned num_first = std::min(grid.shape.num_blocks, grid.max_blocks);
  while (grid.blocks.size() < num_first) begin_block(grid);
}

void Fibers::take_turns() {
  constexpr int kTurnsPerLook = 256;
  turns_left_ = kTurnsPerLook;
  if (_setjmp(scheduler_) == 0) go_to(next_turn());
}

/// Moves the thread to another list; null: to none.
void Fibers::put(Thread& thread, std::vector<Thread*>* list) {
  const std::uint32_t lane = 1U << thread.place.thread.x % kWarpLanes;
  if (thread.list != nullptr) {
    thread.list->back()->list_idx = thread.list_idx;
    (*thread.list)[thread.list_idx] = thread.list->back();
    thread.list->pop_back();
    if (thread.list == &ready_) {
      thread.warp->ready &= ~lane;
      --thread.block->num_ready;
    }
  }
  thread.list = list;
  if (list == nullptr) return;
  thread.list_idx = list->size();
  list->push_back(&thread);
  if (list == &ready_) {
    thread.warp->ready |= lane;
    ++thread.block->num_ready;
  }
}

unsigned Fibers::draw_pace() {
  if (hurries_) return 1;
  constexpr unsigned kPaces[] = {1, 1, 2, 8};
  return kPaces[random_() % std::size(kPaces)];
}

/// The ready thread of the last one's block that follows it: in its warp, or else in the warps after it.
Thread* Fibers::next_of_block() const {
  if (last_ == nullptr || last_->block->num_ready == 0) return nullptr;
  Block& block = *last_->block;
  const unsigned first = (last_->place.thread.x + 1) % kWarpLanes;
  if (const std::uint32_t after = std::rotr(last_->warp->ready, static_cast<int>(first)); after != 0) {
    return last_->warp->threads[(first + static_cast<unsigned>(std::countr_zero(after))) % kWarpLanes];
  }
  auto warp = static_cast<std::size_t>(last_->warp - block.warps.data());
  do {
    warp = (warp + 1) % block.warps.size();
  } while (block.warps[warp].ready == 0);
  return block.warps[warp].threads[std::countr_zero(block.warps[warp].ready)];
}

/// Draws a thread for the next turn.
Thread& Fibers::draw() {
  constexpr unsigned kPollingPace = 8;
  constexpr unsigned kBlockPace = 512;
  if (hurries_ && !one_in(kBlockPace)) {
    if (Thread* const next = next_of_block(); next != nullptr) return *next;
  }
  if (ready_.empty() || (!polling_.empty() && one_in(kPollingPace))) return *polling_[random_() % polling_.size()];
  for (;;) {
    Thread& thread = *ready_[random_() % ready_.size()];
    if (one_in(thread.block->grid->pace) && one_in(thread.block->pace)) return thread;
  }
}

void Fibers::add_fibers() {
  if (unused_chunks().empty()) {
    auto* memory = static_cast<std::byte*>(std::aligned_alloc(kHugePageBytes, kStackChunkBytes));
    if (memory == nullptr) throw std::bad_alloc();
    unused_chunks().emplace_back(memory);
    // A hint, which systems without huge pages refuse.
    if (stack_chunks_.size() < kNumHugeChunks) madvise(memory, kStackChunkBytes, MADV_HUGEPAGE);
  }
  std::byte* const chunk = stack_chunks_.emplace_back(std::move(unused_chunks().back())).get();
  unused_chunks().pop_back();
  constexpr std::size_t kNumStacks = kStackChunkBytes / kStackBytes;
  for (std::size_t i = kNumStacks; i-- > 0;) {
    Fiber& fiber = fibers_.emplace_back();
    fiber.stack = chunk + i * kStackBytes;
    std::memcpy(fiber.stack, &kStackEnd, sizeof(kStackEnd));
    idle_fibers_.push_back(&fiber);
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
  block.threads.resize(grid.shape.num_threads);
  for (unsigned i = 0; i < grid.shape.num_threads; ++i) {
    Thread& thread = block.threads[i];
    thread.place = {{i, 0, 0}, {block_idx, 0, 0}, dim3(grid.shape.num_threads), dim3(grid.shape.num_blocks)};
    thread.block = &block;
    thread.warp = &block.warps[i / kWarpLanes];
    thread.warp->threads[i % kWarpLanes] = &thread;
    if (idle_fibers_.empty()) add_fibers();
    thread.fiber = idle_fibers_.back();
    idle_fibers_.pop_back();
    set_ready(thread);
  }
}

/// The thread that has the next turn; null: none, the scheduler goes on.
Thread* Fibers::next_turn() {
  if (turns_left_ == 0 || !error_.empty() || !can_go_on()) return nullptr;
  --turns_left_;
  if (ready_.empty()) ++still_turns_;
  return &draw();
}

void Fibers::go_to(Thread* next) {
  if (next == nullptr) _longjmp(scheduler_, 1);
  current_ = last_ = next;
  the_place = &next->place;
  Fiber& fiber = *next->fiber;
  if (fiber.started) _longjmp(fiber.where, 1);
  fiber.started = true;
  ucontext_t context{};
  getcontext(&context);
  context.uc_stack.ss_sp = fiber.stack;
  context.uc_stack.ss_size = kStackBytes;
  context.uc_link = nullptr;
  makecontext(&context, run_threads, 0);
  setcontext(&context);
  std::abort();  // setcontext does not return
}

/// Lets other threads have their turns; continues with this thread's next turn.
void Fibers::give_turn() {
  Thread* const next = next_turn();
  if (next == current_) return;
  if (_setjmp(current_->fiber->where) == 0) go_to(next);
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

/// Runs the threads of a fiber.
void Fibers::run_threads() {
  for (;;) {
    fibers().current_->block->grid->body();
    fibers().end_thread();
  }
}

/// Ends the current thread; returns when its fiber has been given another.
void Fibers::end_thread() {
  Block& block = *current_->block;
  Fiber& fiber = *current_->fiber;
  if (std::memcmp(fiber.stack, &kStackEnd, sizeof(kStackEnd)) != 0) fail("a thread used more than its stack");
  put(*current_, nullptr);
  forget_meeting(*current_);
  idle_fibers_.push_back(current_->fiber);  // a new thread may have it now, and runs when this one has left
  current_->waits_in = nullptr;
  --block.num_alive;
  moved();
  if (block.num_alive > 0 && block.num_arrived == block.num_alive) release(block, nullptr);
  if (block.num_alive == 0) {
    last_ = nullptr;
    for (std::size_t i = 0; i < kGuardBytes; ++i) {
      if (block.shared[block.grid->shape.shared_bytes + i] != kPoison) fail("a block wrote past its shared memory");
    }
    Grid& grid = *block.grid;
    --grid.num_alive;
    --num_blocks_;
    if (grid.blocks.size() < grid.shape.num_blocks) begin_block(grid);
  }
  current_ = nullptr;
  Thread* const next = next_turn();
  if (_setjmp(fiber.where) == 0) go_to(next);
}

void Fibers::release(Block& block, const Thread* last) {
  block.voted = block.vote;
  block.vote = {};
  block.num_arrived = 0;
  moved();
  for (Thread& thread : block.threads) {
    if (&thread != last && thread.waits_in == kMeetsBlock) set_ready(thread);
  }
}

Meeting& Fibers::begin_meeting(std::uint32_t mask, const char* operation) {
  if (idle_meetings_.empty()) idle_meetings_.push_back(meetings_.emplace_back(std::make_unique<Meeting>()).get());
  Meeting& meeting = *idle_meetings_.back();
  idle_meetings_.pop_back();
  meeting = {mask, 0, std::popcount(mask), operation, {}};
  return meeting;
}

void Fibers::forget_meeting(Thread& thread) {
  Meeting* const met = std::exchange(thread.met, nullptr);
  if (met != nullptr && --met->num_readers == 0) idle_meetings_.push_back(met);
}

// In this file because the memory and its fill byte are here.
std::byte* static_shared(const void* type, std::size_t num_bytes) {
  std::vector<std::byte>& object = fibers().current().block->statics[type];
  if (object.empty()) object.assign(num_bytes, kPoison);
  return object.data();
}

}  // namespace ferry::emulator
