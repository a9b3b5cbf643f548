#include "fault/member_process.hpp"

#include <fmt/format.h>
#include <poll.h>
#include <unistd.h>

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <sstream>
#include <utility>

namespace ferry::test {
namespace {

std::int64_t now_ns() { return std::chrono::steady_clock::now().time_since_epoch() / std::chrono::nanoseconds(1); }

Result<std::shared_ptr<Membership>> become_member(const MemberSettings& settings) {
  const char* secret = std::getenv("FERRY_SECRET");
  if (settings.create_rank < 0) {
    JoinOptions options;
    options.contacts = settings.contacts;
    options.secret = secret;
    options.id = settings.join_id;
    options.timeout_ns = settings.patience_ns;
    return Membership::join(options);
  }
  TcpBootstrapOptions tcp;
  tcp.rank = settings.create_rank;
  tcp.num_ranks = settings.num_ranks;
  tcp.port = settings.port;
  tcp.secret = secret;
  Result<std::shared_ptr<Bootstrap>> bootstrap = create_tcp_bootstrap(tcp);
  if (!bootstrap.ok()) return bootstrap.status();
  MembershipOptions options;
  options.secret = secret;
  options.timeout_ns = settings.patience_ns;
  return Membership::create(*bootstrap, options);
}

MemberSettings settings_of(std::span<char*> arguments) {
  MemberSettings settings;
  for (std::size_t i = 1; i < arguments.size(); ++i) {
    const std::string name = arguments[i];
    const auto next = [&]() -> std::string { return ++i < arguments.size() ? arguments[i] : ""; };
    if (name == "--create") {
      settings.create_rank = std::atoi(next().c_str());
      settings.num_ranks = std::atoi(next().c_str());
      settings.port = static_cast<std::uint16_t>(std::atoi(next().c_str()));
    } else if (name == "--join") {
      settings.join_id = std::atoi(next().c_str());
      std::istringstream contacts(next());
      for (std::string contact; std::getline(contacts, contact, ',');) settings.contacts.push_back(contact);
    } else if (name == "--deadline-ms") {
      settings.deadline_ns = std::atoi(next().c_str()) * (kNsPerSecond / 1000);
    } else if (name == "--patience-ms") {
      settings.patience_ns = std::atoi(next().c_str()) * (kNsPerSecond / 1000);
    } else if (name == "--ranks-per-node") {
      settings.ranks_per_node = std::atoi(next().c_str());
    } else if (name == "--first-ranks") {
      settings.num_first_ranks = std::atoi(next().c_str());
    } else if (name == "--backend") {
      settings.backend = next();
    } else if (name == "--look-every") {
      settings.num_steps_between_views = static_cast<std::uint64_t>(std::atoi(next().c_str()));
    } else if (name == "--unmasked") {
      settings.masks = false;
    } else {
      fmt::print(stderr, "unknown argument {}\n", name);
      std::exit(2);
    }
  }
  return settings;
}

void print_event(const char* name, const std::string& fields = {}) {
  fmt::print("{{\"event\": \"{}\", \"at_ns\": {}{}}}\n", name, now_ns(), fields);
  std::fflush(stdout);
}

std::string text_of(const Status& status) {
  std::string text(status.message());
  std::erase_if(text, [](char c) { return c == '"' || c == '\\' || c == '\n'; });
  return fmt::format(", \"code\": \"{}\", \"peer\": {}, \"why\": \"{}\"", to_string(status.code()), status.peer(),
                     text);
}

void print_view(const Membership& members) {
  const MembershipView& view = members.view();
  print_event("view", fmt::format(", \"epoch\": {}, \"ids\": [{}], \"steps\": {}, \"address\": \"{}\"", view.epoch,
                                  fmt::join(view.ids, ", "), view.num_complete_steps, members.address()));
}

bool is_told_to_end() {
  pollfd entry{STDIN_FILENO, POLLIN, 0};
  return poll(&entry, 1, 0) > 0;
}

bool is_loss(const Status& status) {
  return status.code() == ErrorCode::kPeerLost || status.code() == ErrorCode::kTimeout ||
         status.code() == ErrorCode::kTransport;
}

/// Forms a group, and makes steps until the members look for each other, or one is lost. `step` is the next step.
Status run_steps(Membership& members, MemberWork& work, std::uint64_t num_steps_between_views, bool forms_group,
                 std::uint64_t& step) {
  if (forms_group) {
    if (Status status = work.form_group(members); !status.ok()) return status;
  }
  do {
    if (Status status = work.make_step(members.view(), step); !status.ok()) return status;
    members.complete_steps(++step);
    if (std::exchange(forms_group, false)) print_event("step");
  } while (step % num_steps_between_views != 0);
  return {};
}

/// Returns the exit code.
int run_views(Membership& members, MemberWork& work, std::uint64_t num_steps_between_views) {
  std::uint64_t step = members.view().num_complete_steps;
  bool forms_group = true;
  bool leaves = false;
  for (;;) {
    if (forms_group) print_view(members);
    const Status status = run_steps(members, work, num_steps_between_views, forms_group, step);
    if (!status.ok() && !is_loss(status)) {
      print_event("wrong", text_of(status));
      return 1;
    }
    if (!status.ok()) print_event("failed", text_of(status));
    NextViewOptions options{.reason = {}, .silent_ids = {}, .leave = leaves};
    if (!status.ok()) {
      options = work.take_loss(status);
      print_event("asked");
    }
    const Result<MembershipView> view = members.next_view(options);
    leaves = is_told_to_end();
    if (!view.ok()) {
      print_event("left_out", text_of(view.status()));
      return view.status().code() == ErrorCode::kPeerLost ? 0 : 1;
    }
    step = view->num_complete_steps;
    if (view->rank < 0) {
      print_event("ended", fmt::format(", \"steps\": {}", step));
      return 0;
    }
    forms_group = !status.ok() || !view->lost_ids.empty() || !view->joined_ids.empty();
  }
}

}  // namespace

int run_member(std::span<char*> arguments,
               const std::function<std::unique_ptr<MemberWork>(const MemberSettings&)>& make_work) {
  const MemberSettings settings = settings_of(arguments);
  print_event("start");
  Result<std::shared_ptr<Membership>> membership = become_member(settings);
  if (!membership.ok()) {
    print_event("no_member", text_of(membership.status()));
    return 1;
  }
  const std::unique_ptr<MemberWork> work = make_work(settings);
  return run_views(**membership, *work, settings.num_steps_between_views);
}

}  // namespace ferry::test
