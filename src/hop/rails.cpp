#include "hop/rails.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cstring>

#include "core/group_options.hpp"
#include "node/cores.hpp"
#include "node/futex.hpp"
#include "plan/to_size.hpp"

namespace ferry::hop {
namespace {

enum Channel : int { kHello = 0, kCall, kVerdict, kChunks, kCredits, kNumChannels };

/// In values of kCall, kVerdict and kChunks: the sender has gone.
constexpr std::uint64_t kLeft = std::uint64_t{1} << 63;

/// Enough to tell peers why the group is broken, over any network that works: a hundred round trips around the world
/// and some lost packets.
constexpr std::int64_t kLastWordsNs = 1'000'000'000;

plan::RailMemory::Shape shape_of(const Topology& topology) {
  return {to_size(topology.num_nodes()), sizeof(CallNotice), sizeof(node::Verdict)};
}

Result<const net::EngineFactory*> choose_engine(const std::string& name) {
  std::string reasons;
  std::string names;
  for (const net::EngineFactory& factory : net::engine_factories()) {
    names += fmt::format(", {}", factory.name);
    // The loopback network ends at the process: nobody wants it unasked.
    if (name != factory.name && (name != "auto" || factory.name == "loopback")) continue;
    const Status status = factory.probe();
    if (status.ok()) return &factory;
    reasons += fmt::format("; {}: {}", factory.name, status.message());
  }
  if (reasons.empty()) {
    return Status(
        ErrorCode::kInvalidArgument,
        fmt::format("Group::create: transport is \"{}\", expected \"auto\" or one of this build's{}", name, names));
  }
  return Status(ErrorCode::kUnsupported,
                fmt::format("Group::create: transport \"{}\" cannot run on this machine{}", name, reasons));
}

/// An engine does not know what its owner is doing.
Status while_creating(const Status& status) {
  if (status.ok()) return status;
  return Status(status.code(), fmt::format("Group::create: {}", status.message()), status.peer());
}

}  // namespace

Rails::Rails(const BackendContext& context, node::Crew& crew, std::byte* notices)
    : crew_(crew),
      topology_(context.topology),
      node_(topology_.node_of(topology_.rank)),
      num_nodes_(topology_.num_nodes()),
      memory_(nullptr, shape_of(topology_)),
      notices_(notices),
      ends_(to_size(num_nodes_)) {}

Rails::~Rails() {
  leave();
  // Peers that answer do so soon, and there is nothing to finish with the others.
  if (proxy_ != nullptr && !crew_.broken().ok()) proxy_->hurry(kLastWordsNs);
  // The notices stay: ranks of this node may still read those of the last call. They go with the arena.
  proxy_.reset();
}

Result<std::unique_ptr<Rails>> Rails::create(const BackendContext& context, node::Crew& crew) {
  Result<const net::EngineFactory*> factory = choose_engine(context.options.transport);
  Status status = factory.status();
  std::unique_ptr<Rails> rails;
  if (status.ok()) {
    const plan::RailMemory memory(nullptr, shape_of(context.topology));
    Result<std::byte*> notices = crew.arena().take(2 * to_size(context.topology.num_nodes()) * memory.call_stride());
    if (notices.ok()) {
      rails.reset(new Rails(context, crew, *notices));
    } else {
      status = Status(notices.status().code(),
                      fmt::format("Group::create: no room for what ranks say: {}", notices.status().message()));
    }
  }
  // What a rank cannot do it says in the gathers inside, so that all ranks fail together.
  net::Blob address;
  net::EngineOptions options;
  std::unique_ptr<net::Engine> engine;
  if (status.ok()) {
    rails->engine_name_ = (*factory)->name;
    options = {.self = rails->node_,
               .num_peers = rails->num_nodes_,
               .num_channels = kNumChannels,
               .memory_bytes = rails->memory_.size_bytes(),
               .timeout_ns = context.options.timeout_ns,
               .ranks = rails->ranks_of_rail()};
    Result<std::unique_ptr<net::Engine>> created = (*factory)->create(options);
    status = while_creating(created.status());
    if (created.ok()) {
      engine = std::move(*created);
      rails->memory_ = plan::RailMemory(engine->memory().data(), shape_of(context.topology));
    }
  }
  if (status.ok()) {
    Result<net::Blob> mine = engine->address();
    status = while_creating(mine.status());
    if (mine.ok()) address = std::move(*mine);
  }
  Result<std::vector<std::vector<std::byte>>> all =
      gather_or_fail(*context.bootstrap, status, address, context.options.timeout_ns);
  if (!all.ok()) return all.status();

  std::vector<net::Blob> rail;
  for (int node = 0; node < rails->num_nodes_; ++node) rail.push_back((*all)[to_size(rails->rank_of(node))]);
  rails->proxy_ = std::make_unique<net::Proxy>(
      std::move(engine), options, [&crew] { crew.ring_self(); }, crew.waits_awake());
  status = while_creating(rails->proxy_->start(rail));
  if (status.ok()) status = rails->greet();
  if (status.ok() && !node::cores_suffice_for(context.topology.num_ranks)) {
    rails->drives_itself_ =
        std::ranges::all_of(rails->routes(), [](const net::Route& route) { return route.in_memory; });
  }
  Result<std::vector<std::vector<std::byte>>> ready =
      gather_or_fail(*context.bootstrap, status, {}, context.options.timeout_ns);
  if (!ready.ok()) {
    // All ranks leave, and none has anything that another waits for.
    rails->proxy_->hurry(kLastWordsNs);
    return ready.status();
  }
  return rails;
}

std::vector<int> Rails::ranks_of_rail() const {
  std::vector<int> ranks;
  for (int node = 0; node < num_nodes_; ++node) ranks.push_back(rank_of(node));
  return ranks;
}

std::vector<int> Rails::peer_nodes() const {
  // From the next node on, so that not all ranks begin with the same peer.
  std::vector<int> nodes;
  for (int step = 1; step < num_nodes_; ++step) nodes.push_back((node_ + step) % num_nodes_);
  return nodes;
}

/// Done when every rail peer has said hello.
class Hello final : public node::Task {
 public:
  Hello(Rails& rails, const net::Proxy& proxy) : rails_(rails), proxy_(proxy) {}
  Step step() override {
    std::vector<int> missing;
    list_missing(&missing);
    return missing.empty() ? Step::kDone : Step::kIdle;
  }
  void list_missing(std::vector<int>* ranks) override {
    for (int node = 0; node < rails_.num_nodes(); ++node) {
      if (node != rails_.node() && proxy_.received(node, kHello) == 0) ranks->push_back(rails_.rank_of(node));
    }
  }
  std::string describe() const override {
    return fmt::format("Group::create: waited for its greeting over {}", rails_.engine_name());
  }

 private:
  Rails& rails_;
  const net::Proxy& proxy_;
};

Status Rails::greet() {
  for (int node : peer_nodes()) proxy_->notify(node, kHello, 1);
  Hello hello(*this, *proxy_);
  crew_.set_other_nodes(this);
  return crew_.run(hello);
}

void Rails::announce(const CallNotice& notice) {
  const std::size_t parity = notice.call % 2;
  num_announced_ = notice.call;
  std::memcpy(memory_.at(memory_.call_out(parity)), &notice, sizeof(notice));
  for (int node : peer_nodes()) {
    proxy_->put(node, kCall, memory_.call_out(parity), memory_.call_in(parity, to_size(node_)), sizeof(notice));
    proxy_->notify(node, kCall, notice.call);
  }
}

bool Rails::heard(int node, std::uint64_t call) const {
  return node == node_ || (proxy_->received(node, kCall) & ~kLeft) >= call;
}

node::Location Rails::notices(std::uint64_t call) const {
  return crew_.locate(notices_block(call), num_nodes_, sizeof(CallNotice),
                      static_cast<std::int64_t>(memory_.call_stride()));
}

void Rails::publish_notices(std::uint64_t call) {
  std::memcpy(notices_block(call), memory_.at(memory_.call_in(call % 2, 0)), notices_block_bytes());
}

std::byte* Rails::chunk_room(int node) {
  const End& end = ends_[to_size(node)];
  // A peer cannot have used up more than was sent; if it says so it harms nobody but itself.
  const std::uint64_t num_free = proxy_->received(node, kCredits) + plan::kNumChunks - end.num_sent;
  if (static_cast<std::int64_t>(num_free) <= 0) return nullptr;
  return memory_.at(memory_.chunk_out(to_size(node_), to_size(node), end.num_sent)) + plan::kChunkHeaderBytes;
}

void Rails::send_chunk(int node, plan::ChunkHeader header) {
  End& end = ends_[to_size(node)];
  header.chunk_idx = end.num_sent;
  const std::size_t local = memory_.chunk_out(to_size(node_), to_size(node), end.num_sent);
  std::memcpy(memory_.at(local), &header, sizeof(header));
  proxy_->put(node, kChunks, local, memory_.chunk_in(to_size(node_), to_size(node), end.num_sent),
              plan::kChunkHeaderBytes + std::size_t{header.num_items} * header.item_bytes);
  ++end.num_sent;
  proxy_->notify(node, kChunks, end.num_sent);
}

const std::byte* Rails::front_chunk(int node) const {
  const End& end = ends_[to_size(node)];
  if ((proxy_->received(node, kChunks) & ~kLeft) <= end.num_used) return nullptr;
  return memory_.at(memory_.chunk_in(to_size(node), to_size(node_), end.num_used));
}

void Rails::release_chunk(int node) {
  End& end = ends_[to_size(node)];
  ++end.num_used;
  proxy_->notify(node, kCredits, end.num_used);
}

void Rails::tell(const node::Verdict& verdict) {
  has_told_ = true;
  std::memcpy(memory_.at(memory_.verdict_out()), &verdict, sizeof(verdict));
  for (int node : peer_nodes()) {
    proxy_->put(node, kVerdict, memory_.verdict_out(), memory_.verdict_in(to_size(node_)), sizeof(verdict));
    proxy_->notify(node, kVerdict, 1);
  }
}

std::optional<node::OtherNodes::Told> Rails::told() {
  for (int node : peer_nodes()) {
    if ((proxy_->received(node, kVerdict) & ~kLeft) == 0) continue;
    const std::span<const std::byte, sizeof(node::Verdict)> bytes(memory_.at(memory_.verdict_in(to_size(node))),
                                                                  sizeof(node::Verdict));
    return Told{rank_of(node), usable_verdict(bytes, topology_.num_ranks)};
  }
  return std::nullopt;
}

Status Rails::presence(int rank) {
  const int node = topology_.node_of(rank);
  // All channels: what was put before on any has then arrived, the reason for going above all.
  const std::uint64_t left =
      proxy_->received(node, kCall) & proxy_->received(node, kVerdict) & proxy_->received(node, kChunks);
  if ((left & kLeft) != 0) {
    return Status(ErrorCode::kPeerLost, "has destroyed its group", rank);
  }
  const Status status = proxy_->peer_status(node);
  if (status.ok()) return {};
  return Status(status.code(), fmt::format("is gone from the network ({})", status.message()), rank);
}

void Rails::leave() {
  if (proxy_ == nullptr) return;
  for (int node : peer_nodes()) {
    proxy_->notify(node, kCall, num_announced_ | kLeft);
    proxy_->notify(node, kVerdict, (has_told_ ? 1 : 0) | kLeft);
    proxy_->notify(node, kChunks, ends_[to_size(node)].num_sent | kLeft);
  }
}

}  // namespace ferry::hop
