#include "emulator/emulator.hpp"

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <deque>
#include <limits>
#include <list>
#include <mutex>
#include <thread>
#include <utility>

#include "emulator/fibers.hpp"

namespace ferry::emulator {
namespace {

constexpr std::uint64_t kClockStepNs = 10'000'000'000;
/// Steps of the clock without progress after which the run fails; longer than any deadline.
constexpr int kMaxClockSteps = 40;

struct Work {
  enum class Kind { kCall, kCallBeside, kGrid };
  std::function<void()> call;
  Kind kind = Kind::kCall;
  GridShape shape;
  Mark awaited;  ///< mark of another stream that must be reached before this work begins
};

struct Stream {
  std::deque<Work> queue;
  std::deque<std::unique_ptr<Grid>> running;  ///< grids that have ended stay until the earlier ones have ended
  std::shared_ptr<Progress> progress = std::make_shared<Progress>();
  unsigned max_blocks = std::numeric_limits<unsigned>::max();  ///< of a grid that are alive at the same time
  bool is_closed = false;
  bool is_beside = false;  ///< a call on the host is in progress

  unsigned num_alive() const {
    unsigned alive = 0;
    for (const std::unique_ptr<Grid>& grid : running) alive += grid->num_alive;
    return alive;
  }
  /// Whether the next work may begin. At most two grids of a stream run at a time.
  bool can_begin() const {
    if (is_beside || queue.empty() || !queue.front().awaited.is_over()) return false;
    if (running.empty()) return true;
    return running.size() == 1 && queue.front().kind == Work::Kind::kGrid && queue.front().shape.overlaps;
  }
};

Machine* machine = nullptr;

}  // namespace

struct Machine::State {
  Fibers fibers;
  std::list<Stream> streams;  ///< guarded by `mutex`, with their queues and progress
  std::mutex mutex;
  std::condition_variable changed;  ///< work was queued or completed
  bool is_live = false;
  std::uint64_t clock_ns = kClockStepNs;

  explicit State(std::uint64_t seed) : fibers(seed) {}

  void queue(cudaStream_t stream, Work work) {
    const std::lock_guard lock(mutex);
    auto& to = *reinterpret_cast<Stream*>(stream);
    to.queue.push_back(std::move(work));
    ++to.progress->num_queued;
    changed.notify_all();
  }

  void begin_grid(Stream& stream, Work work) {
    const Grid* const before = stream.running.empty() ? nullptr : stream.running.front().get();
    Grid& grid = *stream.running.emplace_back(std::make_unique<Grid>());
    grid.before = before;
    grid.shape = work.shape;
    grid.max_blocks = stream.max_blocks;
    grid.body = std::move(work.call);
    fibers.begin(grid);
  }

  void finish(Stream& stream, std::uint64_t num_works) {
    stream.progress->num_done += num_works;
    changed.notify_all();
  }

  void call_beside(Stream& stream, std::function<void()> call) {
    stream.is_beside = true;
    std::thread([this, &stream, call = std::move(call)] {
      call();
      const std::lock_guard lock(mutex);
      stream.is_beside = false;
      finish(stream, 1);
    }).detach();
  }

  /// Begins the next work of each stream; returns whether any stream had or has work.
  bool serve_streams() {
    std::unique_lock lock(mutex);
    bool busy = false;
    for (auto stream = streams.begin(); stream != streams.end();) {
      if (stream->num_alive() == 0 && !stream->running.empty()) {
        finish(*stream, stream->running.size());
        stream->running.clear();
        busy = true;
      }
      while (stream->can_begin()) {
        Work work = std::move(stream->queue.front());
        stream->queue.pop_front();
        busy = true;
        fibers.moved();
        if (work.kind == Work::Kind::kGrid) {
          begin_grid(*stream, std::move(work));
          continue;
        }
        if (work.kind == Work::Kind::kCallBeside) {
          call_beside(*stream, std::move(work.call));
          continue;
        }
        lock.unlock();
        if (work.call) work.call();
        lock.lock();
        finish(*stream, 1);
      }
      busy = busy || !stream->running.empty();
      const bool is_over = stream->is_closed && !stream->is_beside && stream->queue.empty() && stream->running.empty();
      stream = is_over ? streams.erase(stream) : std::next(stream);
    }
    return busy;
  }

  std::string describe_waiting() {
    const std::lock_guard lock(mutex);
    int stream_idx = -1;
    for (const Stream& stream : streams) {
      ++stream_idx;
      for (const std::unique_ptr<Grid>& grid : stream.running) {
        for (const Block& block : grid->blocks) {
          for (const Thread& thread : block.threads) {
            if (thread.waits_in == nullptr) continue;
            return "stream " + std::to_string(stream_idx) + ", block " + std::to_string(thread.place.block.x) +
                   ", thread " + std::to_string(thread.place.thread.x) + " waits in " + thread.waits_in;
          }
        }
      }
    }
    return "threads only poll";
  }

  /// Runs turns until streams have to be served.
  void run_fibers() {
    const unsigned num_blocks = fibers.num_blocks();
    fibers.take_turns();
    if (!fibers.can_go_on() && fibers.error().empty() && fibers.num_blocks() == num_blocks && num_blocks != 0) {
      fibers.set_error("no thread can continue: " + describe_waiting());
    }
  }

  std::string run() {
    int clock_steps = 0;
    std::uint64_t num_moves = 0;
    while (fibers.error().empty() && serve_streams()) {
      run_fibers();
      if (!fibers.stand_still()) continue;
      if (std::exchange(num_moves, fibers.num_moves()) != num_moves) clock_steps = 0;
      fibers.forget_still_turns();
      clock_ns += kClockStepNs;
      if (++clock_steps > kMaxClockSteps) fibers.set_error("no progress: " + describe_waiting());
    }
    return fibers.error();
  }

  std::string run_live() {
    is_live = true;
    fibers.hurry();
    while (fibers.error().empty()) {
      if (!serve_streams()) {
        std::unique_lock lock(mutex);
        changed.wait(lock, [this] { return std::ranges::any_of(streams, &Stream::can_begin); });
        continue;
      }
      run_fibers();
      if (fibers.only_poll()) std::this_thread::yield();  // the polled value may depend on a host thread
    }
    return fibers.error();
  }
};

Machine::Machine(std::uint64_t seed) : state_(std::make_unique<State>(seed)) { machine = this; }

Machine::~Machine() { machine = nullptr; }

cudaStream_t Machine::add_stream() {
  const std::lock_guard lock(state_->mutex);
  return reinterpret_cast<cudaStream_t>(&state_->streams.emplace_back());
}

void Machine::close_stream(cudaStream_t stream) {
  const std::lock_guard lock(state_->mutex);
  reinterpret_cast<Stream*>(stream)->is_closed = true;
  state_->changed.notify_all();
}

void Machine::limit_blocks(cudaStream_t stream, unsigned max_blocks) {
  const std::lock_guard lock(state_->mutex);
  reinterpret_cast<Stream*>(stream)->max_blocks = max_blocks;
}

void Machine::enqueue(cudaStream_t stream, std::function<void()> call) {
  state_->queue(stream, {std::move(call), Work::Kind::kCall, {}, {}});
}

void Machine::enqueue_beside(cudaStream_t stream, std::function<void()> call) {
  state_->queue(stream, {std::move(call), Work::Kind::kCallBeside, {}, {}});
}

void Machine::enqueue_wait(cudaStream_t stream, Mark awaited) {
  state_->queue(stream, {nullptr, Work::Kind::kCall, {}, std::move(awaited)});
}

void Machine::launch(cudaStream_t stream, const GridShape& shape, std::function<void()> body) {
  state_->queue(stream, {std::move(body), Work::Kind::kGrid, shape, {}});
}

Mark Machine::mark(cudaStream_t stream) const {
  const std::lock_guard lock(state_->mutex);
  const auto& of = *reinterpret_cast<const Stream*>(stream);
  return {of.progress, of.progress->num_queued};
}

bool Machine::is_over(const Mark& mark) const {
  const std::lock_guard lock(state_->mutex);
  return mark.is_over();
}

void Machine::wait(const Mark& mark) const {
  std::unique_lock lock(state_->mutex);
  state_->changed.wait(lock, [&mark] { return mark.is_over(); });
}

std::string Machine::run() { return state_->run(); }

void Machine::let_looks_take(std::uint64_t look_ns) { state_->fibers.let_looks_take(look_ns); }

std::string Machine::run_live() { return state_->run_live(); }

Machine& the_machine() { return *machine; }

Fibers& fibers() { return machine->state().fibers; }

std::uint64_t now_ns() {
  Machine::State& state = machine->state();
  if (!state.is_live) return state.clock_ns + state.fibers.looked_ns();
  const auto now = std::chrono::steady_clock::now().time_since_epoch();
  return static_cast<std::uint64_t>(std::chrono::nanoseconds(now).count());
}

}  // namespace ferry::emulator
