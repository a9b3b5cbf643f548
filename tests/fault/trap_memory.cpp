#include "fault/trap_memory.hpp"

#include <signal.h>
#include <sys/mman.h>
#include <unistd.h>

#include <new>
#include <vector>

#include "ferry/bootstrap.hpp"
#include "launch/shared_area.hpp"
#include "node/futex.hpp"

namespace ferry::test {
namespace {

struct Trap {
  Fate fate = Fate::kKilled;
  SharedWords* words = nullptr;
  unsigned num_survivors = 0;
  std::byte* memory = nullptr;
  std::size_t size_bytes = 0;
};
Trap trap;  // state of the signal handler, which can use only globals

void on_fault(int) {
  if (trap.fate == Fate::kKilled) kill(getpid(), SIGKILL);
  if (trap.fate == Fate::kStopped) {
    kill(getpid(), SIGSTOP);
    mprotect(trap.memory, trap.size_bytes, PROT_READ | PROT_WRITE);
    return;
  }
  wait_for_survivors(trap.words, trap.num_survivors);
  _exit(0);
}

}  // namespace

SharedWords* make_shared_words() {
  static std::vector<launch::SharedArea> areas;
  areas.push_back(launch::SharedArea::map(sizeof(SharedWords)).value());
  return new (areas.back().bytes().data()) SharedWords();
}

std::byte* make_trap_memory(std::size_t size_bytes, Fate fate, SharedWords* words, unsigned num_survivors) {
  void* memory = mmap(nullptr, size_bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  auto* bytes = static_cast<std::byte*>(memory);
  trap = {fate, words, num_survivors, bytes, size_bytes};
  struct sigaction action {};
  action.sa_handler = on_fault;
  sigaction(SIGSEGV, &action, nullptr);
  mprotect(bytes + size_bytes / 2, size_bytes / 2, PROT_NONE);
  return bytes;
}

void report_survivor_done(SharedWords* words) {
  words->num_survivors_done.fetch_add(1);
  node::futex_wake_all(words->num_survivors_done);
}

void wait_for_survivors(SharedWords* words, unsigned num_survivors) {
  for (unsigned done = words->num_survivors_done.load(); done < num_survivors;
       done = words->num_survivors_done.load()) {
    node::futex_wait(words->num_survivors_done, done, kNsPerSecond);
  }
}

}  // namespace ferry::test
