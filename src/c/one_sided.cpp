/// C interface of one-sided calls.

#include "ferry/one_sided.hpp"

#include "c/convert.hpp"
#include "c/handles.hpp"
#include "c/status.hpp"
#include "c/structs.hpp"

// NOLINTBEGIN(readability-identifier-naming): the names of the C interface

struct ferry_one_sided {
  std::shared_ptr<ferry::OneSided> value;
};

struct ferry_team {
  ferry::Team value;
};

// NOLINTEND(readability-identifier-naming)

namespace ferry::c {
namespace {

static_assert(FERRY_EQUAL == static_cast<int>(Comparison::kEqual));
static_assert(FERRY_NOT_EQUAL == static_cast<int>(Comparison::kNotEqual));
static_assert(FERRY_GREATER == static_cast<int>(Comparison::kGreater));
static_assert(FERRY_GREATER_EQUAL == static_cast<int>(Comparison::kGreaterEqual));
static_assert(FERRY_LESS == static_cast<int>(Comparison::kLess));
static_assert(FERRY_LESS_EQUAL == static_cast<int>(Comparison::kLessEqual));
static_assert(FERRY_SIGNAL_SET == static_cast<int>(SignalOp::kSet));
static_assert(FERRY_SIGNAL_ADD == static_cast<int>(SignalOp::kAdd));

constexpr const char* kNoHandle = "the ferry_one_sided is null";
constexpr const char* kNoResult = "the pointer to the result is null";

/// Result of `run` on the handle's object; a null handle is refused.
template <typename Handle, typename Run>
ferry_status* call(const char* name, Handle* handle, const Run& run) noexcept {
  return guarded([&]() -> Status {
    if (handle == nullptr) return invalid(name, kNoHandle);
    return run(*handle->value);
  });
}

Status create(ferry_bootstrap* bootstrap, const ferry_one_sided_options* given, ferry_one_sided** handle) {
  constexpr const char* kCall = "ferry_one_sided_create";
  if (bootstrap == nullptr) return invalid(kCall, "the bootstrap is null");
  ferry_one_sided_options read;
  Status status = handle == nullptr ? invalid(kCall, kNoResult) : Status();
  if (status.ok()) status = read_struct(kCall, given, read);
  if (!status.ok()) {
    OneSidedOptions refused;
    refused.backend = kUnreadable;
    refused.timeout_ns = kRefusalTimeoutNs;
    (void)OneSided::create(bootstrap->value, refused);
    return status;
  }
  OneSidedOptions options;
  options.backend = text_or(read.backend, options.backend.c_str());
  options.transport = text_or(read.transport, options.transport.c_str());
  options.net_devices = text_or(read.net_devices, "");
  options.heap_bytes = nonzero_or(static_cast<std::size_t>(read.heap_bytes), options.heap_bytes);
  options.timeout_ns = nonzero_or(read.timeout_ns, options.timeout_ns);
  options.ranks_per_node = read.ranks_per_node;
  if (read.use_device != 0) options.device = read.device;
  auto made = std::make_unique<ferry_one_sided>();
  auto one_sided = OneSided::create(bootstrap->value, options);
  if (!one_sided.ok()) return one_sided.status();
  made->value = std::move(*one_sided);
  *handle = made.release();
  return {};
}

Status fill_topology(const OneSided& one_sided, ferry_topology* wanted) {
  const Topology& topology = one_sided.topology();
  ferry_topology known{};
  known.rank = topology.rank;
  known.num_ranks = topology.num_ranks;
  known.ranks_per_node = topology.ranks_per_node;
  known.num_nodes = topology.num_nodes();
  return write_struct("ferry_one_sided_topology", known, wanted);
}

/// Writes the value of a successful result.
template <typename Value, typename Wanted>
Status hand_over(Result<Value> result, Wanted* wanted) {
  if (result.ok()) *wanted = static_cast<Wanted>(*result);
  return result.status();
}

/// `to`: where the previous value goes, and the stream; without them the result has it.
template <typename Word, typename... To>
auto fetch(const char* name, OneSided& shm, int rank, std::int32_t op, Word* word, Word value, To... to)
    -> decltype(shm.fetch_add(rank, word, value, to...)) {
  switch (op) {
    case FERRY_FETCH_ADD:
      return shm.fetch_add(rank, word, value, to...);
    case FERRY_FETCH_SWAP:
      return shm.swap(rank, word, value, to...);
    case FERRY_FETCH_AND:
      return shm.fetch_and(rank, word, value, to...);
    case FERRY_FETCH_OR:
      return shm.fetch_or(rank, word, value, to...);
    case FERRY_FETCH_XOR:
      return shm.fetch_xor(rank, word, value, to...);
    default:
      return invalid(name, "op is no operation, expected FERRY_FETCH_ADD to FERRY_FETCH_XOR");
  }
}

Status allocate(OneSided& one_sided, std::uint64_t num_bytes, void** data) {
  // Every rank refuses this size, which no heap has, so that no rank waits for this one.
  if (data == nullptr) {
    (void)one_sided.allocate(SIZE_MAX);
    return invalid("ferry_one_sided_allocate", kNoResult);
  }
  return hand_over(one_sided.allocate(static_cast<std::size_t>(num_bytes)), data);
}

Status get_team(OneSided& one_sided, std::int32_t which, ferry_team** handle) {
  constexpr const char* kCall = "ferry_team_get";
  if (handle == nullptr) return invalid(kCall, kNoResult);
  if (which < FERRY_TEAM_WORLD || which > FERRY_TEAM_RAIL)
    return invalid(kCall, "which is no team, expected FERRY_TEAM_WORLD to FERRY_TEAM_RAIL");
  auto made = std::make_unique<ferry_team>();
  made->value = which == FERRY_TEAM_WORLD  ? one_sided.world()
                : which == FERRY_TEAM_NODE ? one_sided.node()
                                           : one_sided.rail();
  *handle = made.release();
  return {};
}

/// Null: all ranks.
Team team_of(const OneSided& one_sided, const ferry_team* team) {
  return team != nullptr ? team->value : one_sided.world();
}

Status split(OneSided& one_sided, const ferry_team* parent, std::int32_t colour, std::int32_t key,
             ferry_team** handle) {
  auto made = std::make_unique<ferry_team>();
  Result<Team> team = one_sided.split(team_of(one_sided, parent), colour, key);
  if (!team.ok()) return team.status();
  if (handle == nullptr) return invalid("ferry_team_split", kNoResult);
  made->value = std::move(*team);
  *handle = made->value.valid() ? made.release() : nullptr;
  return {};
}

}  // namespace
}  // namespace ferry::c

using namespace ferry::c;
using ferry::Comparison;
using ferry::OneSided;
using ferry::SignalOp;

ferry_status* ferry_one_sided_create(ferry_bootstrap* bootstrap, const ferry_one_sided_options* options,
                                     ferry_one_sided** one_sided) {
  return guarded([&] { return create(bootstrap, options, one_sided); });
}

ferry_status* ferry_one_sided_destroy(ferry_one_sided* one_sided) {
  return call("ferry_one_sided_destroy", one_sided, [](OneSided& shm) { return shm.destroy(); });
}

void ferry_one_sided_free(ferry_one_sided* one_sided) { delete one_sided; }

ferry_status* ferry_one_sided_topology(const ferry_one_sided* one_sided, ferry_topology* topology) {
  return call("ferry_one_sided_topology", one_sided, [&](OneSided& shm) { return fill_topology(shm, topology); });
}

const char* ferry_one_sided_backend(const ferry_one_sided* one_sided) {
  return one_sided == nullptr ? "" : one_sided->value->backend().data();  // a literal, so it ends with a zero
}

ferry_status* ferry_one_sided_poll(ferry_one_sided* one_sided) {
  return call("ferry_one_sided_poll", one_sided, [](OneSided& shm) { return shm.poll_errors(); });
}

ferry_status* ferry_one_sided_allocate(ferry_one_sided* one_sided, uint64_t num_bytes, void** data) {
  return call("ferry_one_sided_allocate", one_sided, [&](OneSided& shm) { return allocate(shm, num_bytes, data); });
}

ferry_status* ferry_one_sided_release(ferry_one_sided* one_sided, void* data) {
  return call("ferry_one_sided_release", one_sided, [&](OneSided& shm) { return shm.free(data); });
}

void* ferry_one_sided_peer_pointer(const ferry_one_sided* one_sided, int32_t rank, const void* data) {
  if (one_sided == nullptr) return nullptr;
  return guarded_or(static_cast<void*>(nullptr), [&] { return one_sided->value->peer_pointer(rank, data); });
}

ferry_status* ferry_put(ferry_one_sided* one_sided, int32_t rank, void* dest, const void* source, uint64_t num_bytes,
                        void* stream) {
  return call("ferry_put", one_sided,
              [&](OneSided& shm) { return shm.put(rank, dest, source, num_bytes, to_stream(stream)); });
}

ferry_status* ferry_put_nbi(ferry_one_sided* one_sided, int32_t rank, void* dest, const void* source,
                            uint64_t num_bytes, void* stream) {
  return call("ferry_put_nbi", one_sided,
              [&](OneSided& shm) { return shm.put_nbi(rank, dest, source, num_bytes, to_stream(stream)); });
}

ferry_status* ferry_get(ferry_one_sided* one_sided, int32_t rank, void* dest, const void* source, uint64_t num_bytes,
                        void* stream) {
  return call("ferry_get", one_sided,
              [&](OneSided& shm) { return shm.get(rank, dest, source, num_bytes, to_stream(stream)); });
}

ferry_status* ferry_get_nbi(ferry_one_sided* one_sided, int32_t rank, void* dest, const void* source,
                            uint64_t num_bytes, void* stream) {
  return call("ferry_get_nbi", one_sided,
              [&](OneSided& shm) { return shm.get_nbi(rank, dest, source, num_bytes, to_stream(stream)); });
}

ferry_status* ferry_put_signal(ferry_one_sided* one_sided, int32_t rank, void* dest, const void* source,
                               uint64_t num_bytes, uint64_t* word, uint64_t value, int32_t op, void* stream) {
  return call("ferry_put_signal", one_sided, [&](OneSided& shm) {
    return shm.put_signal(rank, dest, source, num_bytes, word, value, static_cast<SignalOp>(op), to_stream(stream));
  });
}

ferry_status* ferry_put_signal_nbi(ferry_one_sided* one_sided, int32_t rank, void* dest, const void* source,
                                   uint64_t num_bytes, uint64_t* word, uint64_t value, int32_t op, void* stream) {
  return call("ferry_put_signal_nbi", one_sided, [&](OneSided& shm) {
    return shm.put_signal_nbi(rank, dest, source, num_bytes, word, value, static_cast<SignalOp>(op), to_stream(stream));
  });
}

ferry_status* ferry_signal(ferry_one_sided* one_sided, int32_t rank, uint64_t* word, uint64_t value, int32_t op,
                           void* stream) {
  return call("ferry_signal", one_sided, [&](OneSided& shm) {
    return shm.signal(rank, word, value, static_cast<SignalOp>(op), to_stream(stream));
  });
}

ferry_status* ferry_signal32(ferry_one_sided* one_sided, int32_t rank, uint32_t* word, uint32_t value, int32_t op,
                             void* stream) {
  return call("ferry_signal32", one_sided, [&](OneSided& shm) {
    return shm.signal(rank, word, value, static_cast<SignalOp>(op), to_stream(stream));
  });
}

ferry_status* ferry_fetch_add(ferry_one_sided* one_sided, int32_t rank, uint64_t* word, uint64_t value,
                              uint64_t* fetched, void* stream) {
  return call("ferry_fetch_add", one_sided,
              [&](OneSided& shm) { return shm.fetch_add(rank, word, value, fetched, to_stream(stream)); });
}

ferry_status* ferry_compare_swap(ferry_one_sided* one_sided, int32_t rank, uint64_t* word, uint64_t expected,
                                 uint64_t desired, uint64_t* fetched, void* stream) {
  return call("ferry_compare_swap", one_sided, [&](OneSided& shm) {
    return shm.compare_swap(rank, word, expected, desired, fetched, to_stream(stream));
  });
}

ferry_status* ferry_fetch_add_on_host(ferry_one_sided* one_sided, int32_t rank, uint64_t* word, uint64_t value,
                                      uint64_t* fetched) {
  constexpr const char* kCall = "ferry_fetch_add_on_host";
  return call(kCall, one_sided, [&](OneSided& shm) {
    return fetched == nullptr ? invalid(kCall, kNoResult) : hand_over(shm.fetch_add(rank, word, value), fetched);
  });
}

ferry_status* ferry_compare_swap_on_host(ferry_one_sided* one_sided, int32_t rank, uint64_t* word, uint64_t expected,
                                         uint64_t desired, uint64_t* fetched) {
  constexpr const char* kCall = "ferry_compare_swap_on_host";
  return call(kCall, one_sided, [&](OneSided& shm) {
    if (fetched == nullptr) return invalid(kCall, kNoResult);
    return hand_over(shm.compare_swap(rank, word, expected, desired), fetched);
  });
}

ferry_status* ferry_compare_swap32(ferry_one_sided* one_sided, int32_t rank, uint32_t* word, uint32_t expected,
                                   uint32_t desired, uint32_t* fetched, void* stream) {
  return call("ferry_compare_swap32", one_sided, [&](OneSided& shm) {
    return shm.compare_swap(rank, word, expected, desired, fetched, to_stream(stream));
  });
}

ferry_status* ferry_compare_swap32_on_host(ferry_one_sided* one_sided, int32_t rank, uint32_t* word, uint32_t expected,
                                           uint32_t desired, uint32_t* fetched) {
  constexpr const char* kCall = "ferry_compare_swap32_on_host";
  return call(kCall, one_sided, [&](OneSided& shm) {
    if (fetched == nullptr) return invalid(kCall, kNoResult);
    return hand_over(shm.compare_swap(rank, word, expected, desired), fetched);
  });
}

ferry_status* ferry_fetch(ferry_one_sided* one_sided, int32_t rank, int32_t op, uint64_t* word, uint64_t value,
                          uint64_t* fetched, void* stream) {
  constexpr const char* kCall = "ferry_fetch";
  return call(kCall, one_sided,
              [&](OneSided& shm) { return fetch(kCall, shm, rank, op, word, value, fetched, to_stream(stream)); });
}

ferry_status* ferry_fetch_on_host(ferry_one_sided* one_sided, int32_t rank, int32_t op, uint64_t* word, uint64_t value,
                                  uint64_t* fetched) {
  constexpr const char* kCall = "ferry_fetch_on_host";
  return call(kCall, one_sided, [&](OneSided& shm) {
    if (fetched == nullptr) return invalid(kCall, kNoResult);
    return hand_over(fetch(kCall, shm, rank, op, word, value), fetched);
  });
}

ferry_status* ferry_fetch32(ferry_one_sided* one_sided, int32_t rank, int32_t op, uint32_t* word, uint32_t value,
                            uint32_t* fetched, void* stream) {
  constexpr const char* kCall = "ferry_fetch32";
  return call(kCall, one_sided,
              [&](OneSided& shm) { return fetch(kCall, shm, rank, op, word, value, fetched, to_stream(stream)); });
}

ferry_status* ferry_fetch32_on_host(ferry_one_sided* one_sided, int32_t rank, int32_t op, uint32_t* word,
                                    uint32_t value, uint32_t* fetched) {
  constexpr const char* kCall = "ferry_fetch32_on_host";
  return call(kCall, one_sided, [&](OneSided& shm) {
    if (fetched == nullptr) return invalid(kCall, kNoResult);
    return hand_over(fetch(kCall, shm, rank, op, word, value), fetched);
  });
}

ferry_status* ferry_wait_until(ferry_one_sided* one_sided, const uint64_t* word, int32_t comparison, uint64_t value,
                               int64_t timeout_ns, void* stream) {
  return call("ferry_wait_until", one_sided, [&](OneSided& shm) {
    return shm.wait_until(word, static_cast<Comparison>(comparison), value, to_stream(stream), timeout_ns);
  });
}

ferry_status* ferry_test_word(ferry_one_sided* one_sided, const uint64_t* word, int32_t comparison, uint64_t value,
                              int32_t* holds) {
  constexpr const char* kCall = "ferry_test_word";
  return call(kCall, one_sided, [&](OneSided& shm) {
    if (holds == nullptr) return invalid(kCall, kNoResult);
    return hand_over(shm.test(word, static_cast<Comparison>(comparison), value), holds);
  });
}

ferry_status* ferry_fence(ferry_one_sided* one_sided, int32_t rank, void* stream) {
  constexpr std::int32_t kEachRank = -1;
  return call("ferry_fence", one_sided, [&](OneSided& shm) {
    return rank == kEachRank ? shm.fence(to_stream(stream)) : shm.fence(rank, to_stream(stream));
  });
}

ferry_status* ferry_quiet(ferry_one_sided* one_sided, void* stream) {
  return call("ferry_quiet", one_sided, [&](OneSided& shm) { return shm.quiet(to_stream(stream)); });
}

ferry_status* ferry_quiet_rank(ferry_one_sided* one_sided, int32_t rank, void* stream) {
  return call("ferry_quiet_rank", one_sided, [&](OneSided& shm) { return shm.quiet(rank, to_stream(stream)); });
}

ferry_status* ferry_barrier(ferry_one_sided* one_sided, const ferry_team* team, void* stream) {
  return call("ferry_barrier", one_sided,
              [&](OneSided& shm) { return shm.barrier(team_of(shm, team), to_stream(stream)); });
}

ferry_status* ferry_team_get(ferry_one_sided* one_sided, int32_t which, ferry_team** team) {
  return call("ferry_team_get", one_sided, [&](OneSided& shm) { return get_team(shm, which, team); });
}

ferry_status* ferry_team_split(ferry_one_sided* one_sided, const ferry_team* parent, int32_t colour, int32_t key,
                               ferry_team** team) {
  return call("ferry_team_split", one_sided, [&](OneSided& shm) { return split(shm, parent, colour, key, team); });
}

int32_t ferry_team_num_ranks(const ferry_team* team) { return team == nullptr ? 0 : team->value.num_ranks(); }
int32_t ferry_team_rank(const ferry_team* team) { return team == nullptr ? -1 : team->value.rank(); }
int32_t ferry_team_world_rank(const ferry_team* team, int32_t team_rank) {
  return team == nullptr ? -1 : team->value.world_rank(team_rank);
}
void ferry_team_free(ferry_team* team) { delete team; }
