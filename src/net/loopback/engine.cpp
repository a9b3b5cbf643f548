#include "net/loopback/engine.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <charconv>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <map>
#include <random>
#include <utility>

#include "net/blob.hpp"
#include "net/loopback/inbox.hpp"
#include "net/loopback/region.hpp"
#include "net/loopback/rules.hpp"

namespace ferry::net::loopback {
namespace {

constexpr std::string_view kName = "loopback";
constexpr const char* kRateVariable = "FERRY_LOOPBACK_RATE";

std::int64_t now_ns() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

/// Nanoseconds per byte on the link to an end; 0 without a rate.
Result<double> link_ns_per_byte() {
  const char* const given = std::getenv(kRateVariable);
  if (given == nullptr || *given == '\0') return 0.0;
  const std::string_view text(given);
  std::uint64_t bytes_per_s = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), bytes_per_s);
  if (error != std::errc() || end != text.data() + text.size() || bytes_per_s == 0) {
    return Status(ErrorCode::kInvalidArgument,
                  fmt::format("network engine loopback: {} is \"{}\", expected a number of bytes per second, such as "
                              "1250000000 for 10 Gbit/s; or unset it",
                              kRateVariable, text));
  }
  return 1e9 / static_cast<double>(bytes_per_s);
}

struct alignas(64) CacheLine {
  std::array<std::byte, 64> bytes;
};

struct Peer {
  std::shared_ptr<Inbox> inbox;  // null before connect and for this end itself
  bool lost = false;
  bool loss_reported = false;
  // Highest arrival number applied so far: of any operation, and of notifies by channel.
  std::uint64_t newest = 0;
  std::vector<std::uint64_t> newest_notify;
};

class LoopbackEngine final : public Engine {
 public:
  LoopbackEngine(const EngineOptions& options, const Token& token, std::shared_ptr<Inbox> inbox, double ns_per_byte)
      : options_(options),
        ns_per_byte_(ns_per_byte),
        own_memory_(options.memory.empty() ? (options.memory_bytes + sizeof(CacheLine) - 1) / sizeof(CacheLine) : 0),
        token_(token),
        inbox_(std::move(inbox)),
        peers_(static_cast<std::size_t>(options.num_peers)) {
    if (!own_memory_.empty()) {
      options_.memory = {reinterpret_cast<std::byte*>(own_memory_.data()), options_.memory_bytes};
    }
    for (Peer& peer : peers_) peer.newest_notify.resize(static_cast<std::size_t>(options.num_channels));
    offer_inbox(token_, inbox_);
  }
  ~LoopbackEngine() override { close(); }

  std::string_view name() const override { return kName; }
  std::span<std::byte> memory() const override { return options_.memory; }
  Result<Blob> address() const override { return make_blob(kName, options_, token_); }
  Status connect(std::span<const Blob> addresses, EngineEvents events) override;
  void put(int peer, int channel, std::size_t local_offset, std::size_t remote_offset, std::size_t num_bytes) override;
  void notify(int peer, int channel, std::uint64_t value) override;
  void put_from(int peer, int channel, std::span<const std::byte> source, std::size_t remote_offset) override;
  void get(int peer, std::span<std::byte> into, std::size_t remote_offset, std::uint64_t ticket) override;
  void atomic(int peer, int channel, const AtomicOp& op, std::uint64_t ticket) override;
  void flush(int peer, std::uint64_t ticket) override;
  void forget(std::uint64_t ticket) override { gets_.erase(ticket); }
  bool poll() override;
  // put() copies the sender's bytes, so nothing is ever left to send.
  bool flushed(int /*peer*/) const override { return true; }
  int event_fd() const override { return inbox_->wake().get(); }
  bool arm() override;
  std::vector<Path> paths() const override;
  void limit_close_time(std::int64_t /*timeout_ns*/) override {}  // close() does not wait
  void close() override;

 private:
  Peer& at(int peer) { return peers_[static_cast<std::size_t>(peer)]; }
  void post(int peer, Operation operation);
  void lose(int peer, ErrorCode code, std::string_view why);
  bool notice_cuts();
  std::vector<Operation> take_due(Mix mix);
  void mix_channels(std::vector<Operation>* operations);
  void mix_all(std::vector<Operation>* operations);
  int draw_wait();
  void note_order(const Operation& operation);
  void apply(const Operation& operation);
  bool is_inside(const Operation& operation, std::size_t num_bytes);
  void serve(const Operation& operation);
  void take_answer(const Operation& operation);

  EngineOptions options_;
  const double ns_per_byte_;       // of the link to this end; 0: transfers take no time
  std::int64_t link_free_ns_ = 0;  // time at which the link has carried everything so far
  std::vector<CacheLine> own_memory_;
  Token token_;
  std::shared_ptr<Inbox> inbox_;
  EngineEvents events_;
  std::vector<Peer> peers_;
  std::map<std::uint64_t, std::span<std::byte>> gets_;  // destinations, by ticket
  std::vector<Operation> waiting_;                      // arrived, but held back by a fault
  std::mt19937_64 random_;
  std::uint64_t seed_ = 0;
  std::uint64_t num_arrived_ = 0;
  bool connected_ = false;
  bool closed_ = false;
};

Status LoopbackEngine::connect(std::span<const Blob> addresses, EngineEvents events) {
  if (addresses.size() != peers_.size()) {
    return Status(ErrorCode::kTransport,
                  fmt::format("network engine loopback: {} addresses for {} peers; please report this bug",
                              addresses.size(), peers_.size()));
  }
  std::vector<std::shared_ptr<Inbox>> found(peers_.size());
  for (int peer = 0; peer < options_.num_peers; ++peer) {
    if (peer == options_.self) continue;
    const auto index = static_cast<std::size_t>(peer);
    Result<std::span<const std::byte>> own_part = parse_blob(addresses[index], kName, options_, peer);
    if (!own_part.ok()) return own_part.status();
    Token token{};
    if (own_part->size() != token.size()) {
      return Status(ErrorCode::kTransport,
                    fmt::format("network engine loopback: rank {} published a token of {} bytes, expected {}; run the "
                                "same build on every rank",
                                options_.rank_of(peer), own_part->size(), token.size()),
                    options_.rank_of(peer));
    }
    std::ranges::copy(*own_part, token.begin());
    found[index] = find_inbox(token);
  }
  events_ = std::move(events);
  for (std::size_t peer = 0; peer < peers_.size(); ++peer) peers_[peer].inbox = std::move(found[peer]);
  connected_ = true;
  return {};
}

void LoopbackEngine::put(int peer, int channel, std::size_t local_offset, std::size_t remote_offset,
                         std::size_t num_bytes) {
  const Region region = Region::of(options_, local_offset);
  if (!region.contains(num_bytes)) {
    lose(peer, ErrorCode::kInternal, "a put from outside this end's memory; please report this bug");
    return;
  }
  put_from(peer, channel, region.memory.subspan(region.offset, num_bytes), remote_offset);
}

void LoopbackEngine::put_from(int peer, int channel, std::span<const std::byte> source, std::size_t remote_offset) {
  post(peer, Operation{.kind = Operation::Kind::kPut,
                       .channel = channel,
                       .offset = remote_offset,
                       .bytes = {source.begin(), source.end()}});
}

void LoopbackEngine::notify(int peer, int channel, std::uint64_t value) {
  post(peer, Operation{.kind = Operation::Kind::kNotify, .channel = channel, .bytes = {}, .value = value});
}

void LoopbackEngine::get(int peer, std::span<std::byte> into, std::size_t remote_offset, std::uint64_t ticket) {
  gets_[ticket] = into;
  post(peer, Operation{.kind = Operation::Kind::kGet,
                       .offset = remote_offset,
                       .bytes = {},
                       .num_bytes = into.size(),
                       .ticket = ticket});
}

void LoopbackEngine::atomic(int peer, int channel, const AtomicOp& op, std::uint64_t ticket) {
  post(peer,
       Operation{.kind = Operation::Kind::kAtomic, .channel = channel, .bytes = {}, .atomic = op, .ticket = ticket});
}

void LoopbackEngine::flush(int peer, std::uint64_t ticket) {
  post(peer, Operation{.kind = Operation::Kind::kFlush, .bytes = {}, .ticket = ticket});
}

void LoopbackEngine::post(int peer, Operation operation) {
  Peer& to = at(peer);
  if (to.lost || to.inbox == nullptr || rule_for(options_.self, peer, options_.num_peers).dropped) return;
  operation.from = options_.self;
  if (ns_per_byte_ > 0) operation.posted_ns = now_ns();
  to.inbox->post(std::move(operation));
}

bool LoopbackEngine::poll() {
  if (!connected_ || closed_) return false;
  bool moved = notice_cuts();
  const MixRule rule = mix_rule();
  if (rule.seed != seed_) {
    seed_ = rule.seed;
    random_.seed(rule.seed + static_cast<std::uint64_t>(options_.self));
  }
  std::vector<Operation> due = take_due(rule.mix);
  if (rule.mix == Mix::kChannels) mix_channels(&due);
  if (rule.mix == Mix::kAll) mix_all(&due);
  for (const Operation& operation : due) apply(operation);
  moved |= !due.empty();
  for (int peer = 0; peer < options_.num_peers; ++peer) {
    if (peer != options_.self && at(peer).inbox == nullptr && !at(peer).loss_reported) {
      lose(peer, ErrorCode::kPeerLost, "it has left this process");
      moved = true;
    }
  }
  return moved;
}

bool LoopbackEngine::notice_cuts() {
  bool any = false;
  for (int peer = 0; peer < options_.num_peers; ++peer) {
    if (peer == options_.self || at(peer).lost || !rule_for(peer, options_.self, options_.num_peers).cut) continue;
    lose(peer, ErrorCode::kTransport, "the connection was cut");
    any = true;
  }
  return any;
}

/// Number of polls that a scrambled operation waits: usually few or none, so that calls make progress, sometimes more
/// than other operations need to arrive.
int LoopbackEngine::draw_wait() {
  constexpr std::array<std::uint64_t, 8> kLongest = {1, 1, 1, 4, 4, 16, 16, 64};
  return static_cast<int>(random_() % kLongest[random_() % kLongest.size()]);
}

/// True if the ordering rule, which no fault may break, requires the operation to stay behind a waiting one.
bool is_behind(const Operation& operation, const std::vector<Operation>& waiting) {
  using Kind = Operation::Kind;
  return std::ranges::any_of(waiting, [&operation](const Operation& earlier) {
    if (earlier.from != operation.from) return false;
    switch (operation.kind) {
      case Kind::kPut:
      case Kind::kGet:
      case Kind::kAnswer:
        return false;
      case Kind::kAtomic:
      case Kind::kNotify:
        return earlier.kind == Kind::kPut && earlier.channel == operation.channel;
      case Kind::kFlush:
        return earlier.kind == Kind::kPut || earlier.kind == Kind::kAtomic;
      case Kind::kGone:
        return true;
    }
    return true;
  });
}

/// Operations that may be applied now, in order of arrival. The operations of a pair of ends stay behind the first one
/// that must wait, unless the mix is kAll.
std::vector<Operation> LoopbackEngine::take_due(Mix mix) {
  for (Operation& operation : inbox_->take()) {
    operation.arrival = ++num_arrived_;
    if (ns_per_byte_ > 0 && !operation.bytes.empty()) {
      link_free_ns_ = std::max(link_free_ns_, operation.posted_ns) +
                      static_cast<std::int64_t>(ns_per_byte_ * static_cast<double>(operation.bytes.size()));
      operation.due_ns = link_free_ns_;
    }
    waiting_.push_back(std::move(operation));
  }
  const std::int64_t now = ns_per_byte_ > 0 ? now_ns() : 0;
  std::vector<Operation> due;
  std::vector<Operation> later;
  std::vector<bool> blocked(peers_.size(), false);
  for (Operation& operation : waiting_) {
    const auto from = static_cast<std::size_t>(operation.from);
    const PairRule rule = rule_for(operation.from, options_.self, options_.num_peers);
    if (operation.polls_left < 0) {
      operation.polls_left = rule.delay_polls + (mix == Mix::kAll ? draw_wait() : 0);
      if (operation.polls_left > 0) count_delayed();
    }
    if (rule.delay_polls == 0 && mix != Mix::kAll) operation.polls_left = 0;
    bool waits = rule.held || operation.polls_left > 0 || operation.due_ns > now;
    if (operation.polls_left > 0) --operation.polls_left;
    if (mix == Mix::kAll) {
      waits = waits || is_behind(operation, later);
    } else {
      blocked[from] = blocked[from] || waits;
      waits = blocked[from];
    }
    (waits ? later : due).push_back(std::move(operation));
  }
  waiting_ = std::move(later);
  return due;
}

/// Merges the channels at random: each keeps its order; a peer's flushes and its end stay behind everything it sent.
void LoopbackEngine::mix_channels(std::vector<Operation>* operations) {
  std::vector<std::vector<Operation>> lanes;
  std::vector<std::pair<int, int>> keys;
  std::vector<Operation> last;
  for (Operation& operation : *operations) {
    if (operation.kind == Operation::Kind::kGone || operation.kind == Operation::Kind::kFlush) {
      last.push_back(std::move(operation));
      continue;
    }
    const std::pair key{operation.from, operation.channel};
    const auto lane = static_cast<std::size_t>(std::ranges::find(keys, key) - keys.begin());
    if (lane == keys.size()) {
      keys.push_back(key);
      lanes.emplace_back();
    }
    lanes[lane].push_back(std::move(operation));
  }
  operations->clear();
  std::vector<std::size_t> next(lanes.size(), 0);
  std::vector<std::size_t> open(lanes.size());
  for (std::size_t lane = 0; lane < open.size(); ++lane) open[lane] = lane;
  while (!open.empty()) {
    const std::size_t drawn = random_() % open.size();
    const std::size_t lane = open[drawn];
    operations->push_back(std::move(lanes[lane][next[lane]++]));
    if (next[lane] == lanes[lane].size()) open.erase(open.begin() + static_cast<std::ptrdiff_t>(drawn));
  }
  std::ranges::move(last, std::back_inserter(*operations));
}

/// Random order, except that atomics and notifies follow all puts, and flushes and the end of a peer follow everything.
void LoopbackEngine::mix_all(std::vector<Operation>* operations) {
  std::ranges::shuffle(*operations, random_);
  std::ranges::stable_sort(*operations, {}, &Operation::kind);
}

/// Counts reordered operations, so that tests can check that their faults have happened.
void LoopbackEngine::note_order(const Operation& operation) {
  Peer& peer = at(operation.from);
  bool stale = false;
  if (operation.kind == Operation::Kind::kNotify) {
    std::uint64_t& newest = peer.newest_notify[static_cast<std::size_t>(operation.channel)];
    stale = operation.arrival < newest;
    newest = std::max(newest, operation.arrival);
  }
  if (operation.arrival < peer.newest) count_overtaken(stale);
  peer.newest = std::max(peer.newest, operation.arrival);
}

void LoopbackEngine::apply(const Operation& operation) {
  if (at(operation.from).lost) return;
  switch (operation.kind) {
    case Operation::Kind::kGone:
      lose(operation.from, ErrorCode::kPeerLost, "it has closed its end");
      return;
    case Operation::Kind::kNotify:
      if (operation.channel < 0 || operation.channel >= options_.num_channels) return;
      note_order(operation);
      if (events_.notified) {
        events_.notified(operation.from, operation.channel, operation.value);
      }
      return;
    case Operation::Kind::kPut: {
      note_order(operation);
      if (!is_inside(operation, operation.bytes.size())) return;
      const Region region = Region::of(options_, operation.offset);
      store_bytes(region.memory.data() + region.offset, operation.bytes.data(), operation.bytes.size());
      return;
    }
    case Operation::Kind::kAtomic:
    case Operation::Kind::kGet:
    case Operation::Kind::kFlush:
      serve(operation);
      return;
    case Operation::Kind::kAnswer:
      take_answer(operation);
      return;
  }
}

/// False for a range outside this end's memory; the sender is then lost.
bool LoopbackEngine::is_inside(const Operation& operation, std::size_t num_bytes) {
  const bool may_be_gpu = operation.kind == Operation::Kind::kPut;
  if ((may_be_gpu || operation.offset < kGpuOffset) && Region::of(options_, operation.offset).contains(num_bytes)) {
    return true;
  }
  lose(operation.from, ErrorCode::kTransport,
       fmt::format("it named {} bytes at offset {}, outside the {} bytes of this end's memory; please report this bug",
                   num_bytes, operation.offset, options_.memory.size()));
  return false;
}

/// Applies an operation and answers it if the sender asked for an answer.
void LoopbackEngine::serve(const Operation& operation) {
  note_order(operation);
  Operation answer{.kind = Operation::Kind::kAnswer, .bytes = {}, .ticket = operation.ticket};
  if (operation.kind == Operation::Kind::kGet) {
    if (!is_inside(operation, operation.num_bytes)) return;
    answer.bytes.resize(operation.num_bytes);
    load_bytes(answer.bytes.data(), options_.memory.data() + operation.offset, operation.num_bytes);
  } else if (operation.kind == Operation::Kind::kAtomic) {
    if (!is_sound(operation.atomic, options_.memory)) {
      lose(
          operation.from, ErrorCode::kTransport,
          fmt::format("it named a word at offset {}, which is misaligned or outside the {} bytes of this end's memory; "
                      "please report this bug",
                      operation.atomic.offset, options_.memory.size()));
      return;
    }
    answer.value = events_.apply_atomic ? events_.apply_atomic(operation.atomic)
                                        : apply_atomic(options_.memory.data(), operation.atomic);
    if (events_.changed) events_.changed();
  }
  if (operation.ticket != kNoTicket) post(operation.from, std::move(answer));
}

void LoopbackEngine::take_answer(const Operation& operation) {
  if (const auto found = gets_.find(operation.ticket); found != gets_.end()) {
    if (found->second.size() != operation.bytes.size()) return;
    load_bytes(found->second.data(), operation.bytes.data(), operation.bytes.size());
    gets_.erase(found);
  }
  if (events_.completed) events_.completed(operation.from, operation.ticket, operation.value);
}

void LoopbackEngine::lose(int peer, ErrorCode code, std::string_view why) {
  Peer& gone = at(peer);
  gone.lost = true;
  if (gone.loss_reported) return;
  gone.loss_reported = true;
  if (events_.lost) {
    const int rank = options_.rank_of(peer);
    events_.lost(peer,
                 Status(code, fmt::format("network engine loopback: the connection to rank {}: {}", rank, why), rank));
  }
}

bool LoopbackEngine::arm() {
  if (!connected_ || closed_) return true;
  inbox_->wake().clear();  // not in every poll; operations posted after this check signal again
  if (!inbox_->empty()) return false;
  // Operations delayed by a number of polls need polls; held ones wait for release() to wake this end.
  return std::ranges::none_of(waiting_, [this](const Operation& operation) {
    return !rule_for(operation.from, options_.self, options_.num_peers).held;
  });
}

std::vector<Path> LoopbackEngine::paths() const {
  std::vector<Path> paths;
  for (int peer = 0; peer < options_.num_peers; ++peer) {
    if (peer != options_.self) paths.push_back({peer, "memory of this process", true});
  }
  return paths;
}

void LoopbackEngine::close() {
  if (closed_) return;
  closed_ = true;
  withdraw_inbox(token_);
  inbox_->shut();
  for (int peer = 0; peer < options_.num_peers; ++peer) {
    if (peer != options_.self) post(peer, Operation{.kind = Operation::Kind::kGone, .bytes = {}});
  }
  for (Peer& peer : peers_) {
    peer.lost = true;
    peer.inbox = nullptr;
  }
}

}  // namespace

Result<std::unique_ptr<Engine>> create_engine(const EngineOptions& options) {
  const Result<double> ns_per_byte = link_ns_per_byte();
  if (!ns_per_byte.ok()) return ns_per_byte.status();
  Result<Token> token = make_token();
  if (!token.ok()) return token.status();
  auto inbox = std::make_shared<Inbox>();
  if (inbox->wake().get() < 0) {
    return Status(ErrorCode::kSystem,
                  fmt::format("network engine loopback: eventfd failed: {}; raise the open-file limit (ulimit -n) if "
                              "descriptors ran out",
                              std::strerror(inbox->wake().error())));
  }
  return std::unique_ptr<Engine>(std::make_unique<LoopbackEngine>(options, *token, std::move(inbox), *ns_per_byte));
}

Status probe() { return {}; }

}  // namespace ferry::net::loopback
