#include "membership/joining.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <charconv>
#include <optional>
#include <string_view>
#include <utility>
#include <vector>

#include "bootstrap/errors.hpp"
#include "bootstrap/socket.hpp"
#include "membership/member_link.hpp"

namespace ferry::membership {
namespace {

using bootstrap::Deadline;

/// How often the program is asked whether to go on.
constexpr std::int64_t kAskNs = 100'000'000;

/// Time that a contact has to begin to answer before the next one is called. One that computes does so when it next
/// says that it has completed a step; the calls begin again after the last contact.
constexpr std::int64_t kContactNs = 2 * kNsPerSecond;

Status invalid(std::string message) {
  return Status(ErrorCode::kInvalidArgument, "Membership::join: " + std::move(message));
}

/// "host:port" or "[host]:port" as a member.
Result<Member> parse_contact(const std::string& text) {
  const std::size_t colon = text.rfind(':');
  std::uint16_t port = 0;
  if (colon != std::string::npos && colon > 0) {
    const char* const end = text.data() + text.size();
    const auto [stop, error] = std::from_chars(text.data() + colon + 1, end, port);
    if (error != std::errc() || stop != end) port = 0;
  }
  if (port != 0) return Member{-1, bootstrap::without_brackets(text.substr(0, colon)), port, 0};
  return invalid(
      fmt::format("the contact \"{}\" is no address; pass what Membership::address returns, \"host:port\"", text));
}

Status check(const JoinOptions& options) {
  if (options.contacts.empty()) return invalid("there are no contacts; pass the addresses of one or more members");
  if (options.secret.empty()) return invalid("the secret is empty; pass the one that the members have");
  if (options.id < -1) return invalid(fmt::format("id is {}, expected a number from 0, or -1 for any", options.id));
  Status admission = check_timeout("Membership::join: admission_timeout_ns", options.admission_timeout_ns);
  return admission.ok() ? check_timeout("Membership::join: timeout_ns", options.timeout_ns) : admission;
}

/// Calls the contacts in turn, each until it lets this process in or is gone.
class Joining {
 public:
  Joining(const JoinOptions& options, std::vector<Member> contacts, Founded& founded)
      : options_(options), contacts_(std::move(contacts)), founded_(founded) {}

  Status run() {
    const Deadline deadline = Deadline::after(options_.admission_timeout_ns);
    while (!deadline.expired()) {
      if (!link_) call_next();
      link_->advance();
      for (const Letter& letter : link_->take_letters()) {
        if (is_in(letter)) return {};
      }
      if (!link_->refusal().ok()) return link_->refusal();
      if (link_->is_dead() || (!link_->is_answered() && contact_time_.expired())) link_.reset();
      if (options_.interrupted && options_.interrupted()) {
        return Status(ErrorCode::kPeerLost, "Membership::join: told to give up by JoinOptions::interrupted");
      }
      if (Status status = wait(deadline); !status.ok()) return status;
    }
    return Status(
        ErrorCode::kTimeout,
        fmt::format("Membership::join: not let in within {}: {}",
                    bootstrap::format_seconds(options_.admission_timeout_ns),
                    was_taken_ ? "the members did not call next_view, or a living member has that id"
                               : fmt::format("no contact answered ({}); are address and secret right?", reason_)));
  }

 private:
  void call_next() {
    link_.emplace(contacts_[next_ % contacts_.size()], Caller{kNoMember, options_.secret});
    ++next_;
    contact_time_ = Deadline::after(kContactNs);
    link_->open_with({}, Join{founded_.self});
  }

  bool is_in(const Letter& letter) {
    const auto* decision = std::get_if<Decision>(&letter.content);
    if (decision == nullptr) return false;
    for (const Member& member : decision->view.members) {
      if (member.port != founded_.self.port || member.host != founded_.self.host) continue;
      founded_.self = member;
      founded_.view = decision->view;
      return true;
    }
    return false;
  }

  Status wait(Deadline deadline) {
    if (!link_) {  // a dead contact is called again only after the pause that a link takes
      return bootstrap::wait_until_ready({}, earlier(deadline, Deadline::after(kAskNs / 20)));
    }
    was_taken_ = was_taken_ || link_->is_connected();
    if (!link_->reason().empty()) reason_ = link_->reason();
    pollfd entry = link_->entry();
    const Deadline next = earlier(earlier(deadline, link_->next_deadline()), Deadline::after(kAskNs));
    return bootstrap::wait_until_ready({&entry, 1}, next);
  }

  const JoinOptions& options_;
  std::vector<Member> contacts_;
  Founded& founded_;
  std::optional<MemberLink> link_;
  std::size_t next_ = 0;
  Deadline contact_time_ = Deadline::after(0);
  bool was_taken_ = false;
  std::string reason_ = "no process listens there";
};

/// The address of this host on the way to a contact.
Result<std::string> address_towards(const Member& contact) {
  Result<std::vector<bootstrap::Address>> addresses = bootstrap::resolve(contact.host, contact.port);
  if (!addresses.ok()) return addresses.status();
  const bootstrap::Address& to = addresses->front();
  // Connecting a datagram socket only looks up the route.
  const UniqueFd probe(socket(to.storage.ss_family, SOCK_DGRAM | SOCK_CLOEXEC, 0));
  if (!probe.valid() || connect(probe.get(), to.raw(), to.size) != 0) {
    return invalid(
        fmt::format("no way leads to {}; set JoinOptions::host to this host's address", bootstrap::to_string(to)));
  }
  return bootstrap::ends_of(probe.get()).local;
}

}  // namespace

Result<Founded> join(const JoinOptions& options) {
  if (Status status = check(options); !status.ok()) return status;
  std::vector<Member> contacts;
  for (const std::string& text : options.contacts) {
    Result<Member> contact = parse_contact(text);
    if (!contact.ok()) return contact.status();
    contacts.push_back(std::move(*contact));
  }
  Result<std::string> host =
      options.host.empty() ? address_towards(contacts.front()) : Result<std::string>(options.host);
  if (!host.ok()) return host.status();
  Founded founded;
  founded.secret = options.secret;
  Result<std::unique_ptr<Endpoint>> endpoint =
      Endpoint::open(*host, founded.secret, static_cast<int>(contacts.size()) + 1);
  if (!endpoint.ok()) return endpoint.status();
  Result<Listener> listener = listen_anywhere(*host);
  if (!listener.ok()) return listener.status();
  founded.endpoint = std::move(*endpoint);
  founded.bootstrap_listener = std::move(listener->fd);
  founded.self = {options.id, *host, founded.endpoint->port(), listener->port};
  if (Status status = Joining(options, std::move(contacts), founded).run(); !status.ok()) return status;
  return founded;
}

}  // namespace ferry::membership
