#include "gpu/survivors.hpp"

#include <fmt/format.h>
#include <sched.h>
#include <signal.h>

#include <filesystem>
#include <fstream>
#include <iterator>
#include <new>
#include <stdexcept>
#include <system_error>
#include <utility>
#include <vector>

#include "launch/shared_area.hpp"
#include "node/futex.hpp"

namespace ferry::test {
namespace {

/// Longer than any wait of these tests, except deadlines of calls.
constexpr std::int64_t kPatienceNs = 100 * kNsPerSecond;

/// Whether all threads of a process have ended; its parent may not have waited for it yet.
bool has_ended(pid_t process) {
  const std::string folder = fmt::format("/proc/{}", process);
  std::ifstream file(folder + "/stat");
  const std::string text((std::istreambuf_iterator<char>(file)), std::istreambuf_iterator<char>());
  const std::size_t name_end = text.rfind(')');  // proc(5): the name may contain anything, and the state follows it
  if (name_end == std::string::npos || name_end + 2 >= text.size()) return true;
  const char state = text[name_end + 2];
  if (state != 'Z' && state != 'X') return false;
  std::error_code error;
  const std::filesystem::directory_iterator tasks(folder + "/task", error);
  return error || std::distance(begin(tasks), end(tasks)) <= 1;
}

}  // namespace

PreparedCase prepare_fault_case(const FaultCase& one) {
  ExchangeCase exchange;
  exchange.name = fmt::format("{} ranks", one.num_ranks);
  exchange.world = {
      .num_ranks = one.num_ranks, .num_topk = 4, .num_experts = 2 * one.num_ranks + 1, .max_tokens = one.max_tokens};
  exchange.world.spare_recv_rows = one.bounded ? 3 : -1;
  exchange.memory = one.memory;
  exchange.dispatches = {{.hidden = one.hidden}};
  exchange.combines = {{.hidden = one.hidden, .weighted = true}};
  return prepare(exchange);
}

Routing run_up_to(RankContext& context, Group& group, const PreparedCase& prepared, Operation interrupted) {
  Routing routing;
  if (interrupted != Operation::kRoute) routing = check_route(context, group, prepared);
  if (interrupted == Operation::kCombine) check_dispatch(context, group, routing, prepared, 0);
  meet(context);
  return routing;
}

Status make_call(RankContext& context, Group& group, const PreparedCase& prepared, const Routing& routing,
                 Operation operation, const std::function<void()>& before) {
  const Stream stream = stream_of(group);
  if (operation == Operation::kRoute) {
    const RouteArguments arguments(context, group, prepared);
    before();
    return finish(group, group.route(arguments.input(), arguments.options(), stream).status());
  }
  if (operation == Operation::kDispatch) {
    const DispatchTensors tensors(context, group, prepared, 0);
    before();
    return finish(group, group.dispatch(routing, tensors.in, tensors.out, stream, tensors.options));
  }
  const CombineTensors tensors(context, group, prepared, 0);
  before();
  return finish(group, group.combine(routing, tensors.in, tensors.out, stream, tensors.options));
}

void expect_gpu_copies(RankContext& context) {
  const Bytes bytes(1 << 20, std::byte{0x42});
  const DeviceMemory memory(bytes.size());
  copy_to_device(memory.data(), bytes.data(), bytes.size());
  context.expect(read_memory(true, memory.data(), bytes.size()) == bytes, "the GPU no longer copies");
}

void go_on_without(int victim, RankContext& context, const PreparedCase& without_victim, const Meeting& meeting) {
  expect_gpu_copies(context);
  const int num_survivors = context.num_ranks() - 1;
  const int new_rank = context.rank() < victim ? context.rank() : context.rank() - 1;
  auto bootstrap = create_tcp_bootstrap(meeting.options(new_rank, num_survivors));
  if (!context.expect_ok(bootstrap.status(), "the survivors' bootstrap")) return;
  RankContext survivor(new_rank, num_survivors, *bootstrap);
  auto second = Group::create(*bootstrap, gpu_group_options());
  if (!context.expect_ok(second.status(), "the survivors' group")) return;
  check_case(survivor, **second, without_victim);
  for (const std::string& text : survivor.failures()) context.fail("among the survivors: " + text);
  context.expect_ok((*second)->destroy(), "the end");
}

SharedScene* make_shared_scene() {
  static std::vector<launch::SharedArea> areas;
  areas.push_back(launch::SharedArea::map(sizeof(SharedScene)).value());
  return new (areas.back().bytes().data()) SharedScene();
}

void await(const std::function<bool()>& there, std::string_view what) {
  const std::int64_t deadline_ns = node::monotonic_ns() + kPatienceNs;
  while (!there()) {
    if (node::monotonic_ns() > deadline_ns) throw std::runtime_error(fmt::format("timed out waiting for: {}", what));
    sched_yield();
  }
}

void kill_and_await(pid_t process) {
  if (kill(process, SIGKILL) != 0) throw std::system_error(errno, std::generic_category(), "kill");
  await([process] { return has_ended(process); }, "the end of the killed process");
}

UnderWay::UnderWay(Stream stream, std::function<void()> report) {
  const int device = current_device();
  thread_ = std::thread([this, stream, device, report = std::move(report)] {
    use_device(device);
    while (!ends_.load()) {
      if (!is_idle(stream)) {
        report();
        return;
      }
      sched_yield();
    }
  });
}

UnderWay::~UnderWay() {
  ends_.store(true);
  thread_.join();
}

}  // namespace ferry::test
