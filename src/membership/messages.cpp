#include "membership/messages.hpp"

#include <algorithm>
#include <bit>
#include <utility>

#include "net/blob.hpp"

namespace ferry::membership {
namespace {

/// Bound on ids, members and their numbers in a letter: as many ranks as a bootstrap takes.
constexpr std::uint32_t kMaxMembers = 65'536;

/// Longest host name (RFC 1035 section 2.3.4: 255 octets), and an address with its zone is shorter.
constexpr std::uint32_t kMaxHostBytes = 255;

void put_id(net::BlobWriter& writer, Id id) { writer.u32(std::bit_cast<std::uint32_t>(id)); }
Id take_id(net::BlobReader& reader) { return std::bit_cast<Id>(reader.u32()); }

void put(net::BlobWriter& writer, const Member& member) {
  put_id(writer, member.id);
  writer.u32(member.port);
  writer.u32(member.bootstrap_port);
  writer.u32(static_cast<std::uint32_t>(member.host.size()));
  writer.bytes(std::as_bytes(std::span(member.host.data(), member.host.size())));
}

void put(net::BlobWriter& writer, const std::vector<Member>& members) {
  writer.u32(static_cast<std::uint32_t>(members.size()));
  for (const Member& member : members) put(writer, member);
}

void put(net::BlobWriter& writer, const View& view) {
  writer.u64(view.epoch);
  writer.u64(view.num_complete_steps);
  put(writer, view.members);
}

void put(net::BlobWriter& writer, const Ballot& ballot) {
  writer.u64(ballot.round);
  put_id(writer, ballot.coordinator);
}

void put(net::BlobWriter& writer, const Report& report) {
  writer.u64(report.num_complete_steps);
  writer.u32(report.leaves ? 1 : 0);
  writer.u32(static_cast<std::uint32_t>(report.accused.size()));
  for (const Id id : report.accused) put_id(writer, id);
  put(writer, report.joiners);
}

void put(net::BlobWriter& writer, const Prepare& prepare) { put(writer, prepare.ballot); }

void put(net::BlobWriter& writer, const Promise& promise) {
  put(writer, promise.ballot);
  put(writer, promise.lock.ballot);
  put(writer, promise.lock.view);
}

void put(net::BlobWriter& writer, const Proposal& proposal) {
  put(writer, proposal.ballot);
  put(writer, proposal.view);
}

void put(net::BlobWriter& writer, const Acknowledgement& acknowledgement) { put(writer, acknowledgement.ballot); }
void put(net::BlobWriter& /*writer*/, const Decision& /*decision*/) {}
void put(net::BlobWriter& /*writer*/, const Beat& /*beat*/) {}
void put(net::BlobWriter& /*writer*/, const Hail& /*hail*/) {}
void put(net::BlobWriter& writer, const Join& join) { put(writer, join.member); }

/// Reads letters. What is out of range makes `ok` false.
class LetterReader {
 public:
  explicit LetterReader(std::span<const std::byte> bytes) : reader_(bytes) {}

  bool finished() const { return valid_ && reader_.finished(); }
  std::uint32_t kind() { return reader_.u32(); }

  Member member() {
    Member member;
    member.id = take_id(reader_);
    member.port = port();
    member.bootstrap_port = port();
    const std::span<const std::byte> host = reader_.bytes(bounded(kMaxHostBytes));
    member.host.assign(reinterpret_cast<const char*>(host.data()), host.size());
    return member;
  }
  std::vector<Member> members() {
    std::vector<Member> members;
    const std::uint32_t count = bounded(kMaxMembers);
    for (std::uint32_t i = 0; i < count && reader_.ok(); ++i) members.push_back(member());
    return members;
  }
  View view() {
    View view;
    view.epoch = reader_.u64();
    view.num_complete_steps = reader_.u64();
    view.members = members();
    const auto is_out_of_order = [](const Member& a, const Member& b) { return a.id >= b.id; };
    if (std::ranges::adjacent_find(view.members, is_out_of_order) != view.members.end()) valid_ = false;
    return view;
  }
  Ballot ballot() {
    const std::uint64_t round = reader_.u64();
    return {round, take_id(reader_)};
  }
  Report report() {
    Report report;
    report.num_complete_steps = reader_.u64();
    report.leaves = reader_.u32() != 0;
    const std::uint32_t num_accused = bounded(kMaxMembers);
    for (std::uint32_t i = 0; i < num_accused && reader_.ok(); ++i) report.accused.push_back(take_id(reader_));
    report.joiners = members();
    return report;
  }
  Promise promise() {
    Promise promise;
    promise.ballot = ballot();
    promise.lock.ballot = ballot();
    promise.lock.view = view();
    return promise;
  }
  Proposal proposal() {
    const Ballot ballot = this->ballot();
    return {ballot, view()};
  }

 private:
  std::uint32_t bounded(std::uint32_t most) {
    const std::uint32_t value = reader_.u32();
    if (value <= most) return value;
    valid_ = false;
    return 0;
  }
  std::uint16_t port() { return static_cast<std::uint16_t>(bounded(UINT16_MAX)); }

  net::BlobReader reader_;
  bool valid_ = true;
};

/// Kinds are the positions in Content, which never change.
template <typename T>
constexpr std::uint32_t kind_of() {
  return static_cast<std::uint32_t>(Content(T{}).index());
}

}  // namespace

std::vector<std::byte> encode(const View& view, const Content& content) {
  net::BlobWriter writer;
  writer.u32(static_cast<std::uint32_t>(content.index()));
  const auto* decision = std::get_if<Decision>(&content);
  put(writer, decision != nullptr ? decision->view : view);
  std::visit([&writer](const auto& part) { put(writer, part); }, content);
  return writer.blob();
}

Result<Letter> decode(std::span<const std::byte> bytes) {
  LetterReader reader(bytes);
  const std::uint32_t kind = reader.kind();
  Letter letter;
  letter.view = reader.view();
  if (kind == kind_of<Report>()) {
    letter.content = reader.report();
  } else if (kind == kind_of<Prepare>()) {
    letter.content = Prepare{reader.ballot()};
  } else if (kind == kind_of<Promise>()) {
    letter.content = reader.promise();
  } else if (kind == kind_of<Proposal>()) {
    letter.content = reader.proposal();
  } else if (kind == kind_of<Acknowledgement>()) {
    letter.content = Acknowledgement{reader.ballot()};
  } else if (kind == kind_of<Decision>()) {
    letter.content = Decision{letter.view};
  } else if (kind == kind_of<Beat>()) {
    letter.content = Beat{};
  } else if (kind == kind_of<Hail>()) {
    letter.content = Hail{};
  } else if (kind == kind_of<Join>()) {
    letter.content = Join{reader.member()};
  } else {
    return Status(ErrorCode::kTransport, "Membership: another process sent a letter of an unknown kind");
  }
  if (reader.finished()) return letter;
  return Status(ErrorCode::kTransport,
                "Membership: another process sent a malformed letter; do all run the same "
                "version of Ferry?");
}

}  // namespace ferry::membership
