/// C interface of memberships.

#include "ferry/membership.hpp"

#include <fmt/format.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "c/convert.hpp"
#include "c/handles.hpp"
#include "c/status.hpp"
#include "c/structs.hpp"

// NOLINTBEGIN(readability-identifier-naming): the names of the C interface

struct ferry_membership {
  std::shared_ptr<ferry::Membership> value;
  ferry::MembershipView view;  // which structs of the program point to, so a failed change leaves it as it is
  std::string address;
};

// NOLINTEND(readability-identifier-naming)

namespace ferry::c {
namespace {

static_assert(std::is_same_v<int, std::int32_t>, "views hand out arrays of int");

constexpr const char* kNoMembership = "the membership is null";
constexpr const char* kNoPlace = "the pointer to the membership is null";

/// Gives the other ranks time to come and be told of a refusal.
class PatientBootstrap final : public Bootstrap {
 public:
  explicit PatientBootstrap(std::shared_ptr<Bootstrap> bootstrap) : bootstrap_(std::move(bootstrap)) {}
  int rank() const override { return bootstrap_->rank(); }
  int num_ranks() const override { return bootstrap_->num_ranks(); }
  std::string local_address() const override { return bootstrap_->local_address(); }
  Result<std::vector<std::vector<std::byte>>> all_gather(std::span<const std::byte> mine, std::int64_t) override {
    return bootstrap_->all_gather(mine, kRefusalTimeoutNs);
  }

 private:
  std::shared_ptr<Bootstrap> bootstrap_;
};

/// Options that structs of creating and joining have in common.
template <typename Options, typename Read>
void read_common(const Read& read, Options& options) {
  options.host = text_or(read.host, "");
  options.secret = text_or(read.secret, "");
  options.timeout_ns = nonzero_or(read.timeout_ns, options.timeout_ns);
  if (read.interrupted != nullptr) {
    options.interrupted = [ask = read.interrupted, user = read.interrupted_user] { return ask(user) != 0; };
  }
}

Status hand_over(Result<std::shared_ptr<Membership>> members, ferry_membership** handle) {
  if (!members.ok()) return members.status();
  auto made = std::make_unique<ferry_membership>();
  made->value = std::move(*members);
  made->view = made->value->view();
  made->address = made->value->address();
  *handle = made.release();
  return {};
}

Status create_membership(ferry_bootstrap* bootstrap, const ferry_membership_options* given, ferry_membership** handle) {
  constexpr const char* kCall = "ferry_membership_create";
  if (bootstrap == nullptr) return invalid(kCall, "the bootstrap is null");
  ferry_membership_options read;
  Status status = handle == nullptr ? invalid(kCall, kNoPlace) : Status();
  if (status.ok()) status = read_struct(kCall, given, read);
  MembershipOptions options;
  if (!status.ok()) {
    options.timeout_ns = 0;  // refused on all ranks, so that none waits for this one
    (void)Membership::create(std::make_shared<PatientBootstrap>(bootstrap->value), options);
    return status;
  }
  read_common(read, options);
  return hand_over(Membership::create(bootstrap->value, options), handle);
}

Status join_members(const ferry_join_options* given, ferry_membership** handle) {
  constexpr const char* kCall = "ferry_membership_join";
  if (handle == nullptr) return invalid(kCall, kNoPlace);
  ferry_join_options read;
  if (Status status = read_struct(kCall, given, read); !status.ok()) return status;
  if (read.num_contacts < 0 || (read.num_contacts > 0 && read.contacts == nullptr)) {
    return Status(ErrorCode::kInvalidArgument,
                  fmt::format("{}: contacts is {} with num_contacts {}, expected the addresses of one or more members",
                              kCall, static_cast<const void*>(read.contacts), read.num_contacts));
  }
  JoinOptions options;
  read_common(read, options);
  options.admission_timeout_ns = nonzero_or(read.admission_timeout_ns, options.admission_timeout_ns);
  for (const char* contact : std::span(read.contacts, static_cast<std::size_t>(read.num_contacts))) {
    options.contacts.push_back(text_or(contact, ""));
  }
  if (read.use_id != 0 && read.id < 0) {
    return Status(ErrorCode::kInvalidArgument,
                  fmt::format("{}: id is {}, expected a number from 0, or use_id 0 for any", kCall, read.id));
  }
  if (read.use_id != 0) options.id = read.id;
  return hand_over(Membership::join(options), handle);
}

/// Points `first` to the elements and returns their number.
std::int32_t point_to(const std::vector<int>& elements, const std::int32_t*& first) {
  first = elements.empty() ? nullptr : elements.data();
  return static_cast<std::int32_t>(elements.size());
}

Status fill_view(const ferry_membership* membership, ferry_membership_view* wanted) {
  constexpr const char* kCall = "ferry_membership_get_view";
  if (membership == nullptr) return invalid(kCall, kNoMembership);
  const MembershipView& view = membership->view;
  ferry_membership_view known{};
  known.epoch = view.epoch;
  known.num_complete_steps = view.num_complete_steps;
  known.rank = view.rank;
  known.num_ranks = point_to(view.ids, known.ids);
  known.num_kept_ranks = point_to(view.kept_ranks, known.kept_ranks);
  known.num_lost_ids = point_to(view.lost_ids, known.lost_ids);
  known.num_joined_ids = point_to(view.joined_ids, known.joined_ids);
  return write_struct(kCall, known, wanted);
}

Status complete_steps(ferry_membership* membership, std::uint64_t num_steps) {
  if (membership == nullptr) return invalid("ferry_membership_complete_steps", kNoMembership);
  membership->value->complete_steps(num_steps);
  return {};
}

Status change_view(ferry_membership* membership, const ferry_next_view_options* given) {
  constexpr const char* kCall = "ferry_membership_next_view";
  if (membership == nullptr) return invalid(kCall, kNoMembership);
  ferry_next_view_options read;
  if (Status status = read_struct(kCall, given, read); !status.ok()) return status;
  NextViewOptions options;
  Status status = read_ranks(kCall, "silent_ids", read.silent_ids, read.num_silent_ids, options.silent_ids);
  if (!status.ok()) return status;
  if (read.reason != nullptr) options.reason = read.reason->value;
  options.leave = read.leave != 0;
  Result<MembershipView> view = membership->value->next_view(options);
  if (!view.ok()) return view.status();
  membership->view = std::move(*view);
  return {};
}

Status connect_members(ferry_membership* membership, ferry_bootstrap** handle) {
  constexpr const char* kCall = "ferry_membership_bootstrap";
  if (membership == nullptr) return invalid(kCall, kNoMembership);
  if (handle == nullptr) return invalid(kCall, "the pointer to the bootstrap is null");
  auto made = std::make_unique<ferry_bootstrap>();
  Result<std::shared_ptr<Bootstrap>> bootstrap = membership->value->bootstrap();
  if (!bootstrap.ok()) return bootstrap.status();
  made->value = std::move(*bootstrap);
  *handle = made.release();
  return {};
}

}  // namespace
}  // namespace ferry::c

using namespace ferry::c;

ferry_status* ferry_membership_create(ferry_bootstrap* bootstrap, const ferry_membership_options* options,
                                      ferry_membership** membership) {
  return guarded([&] { return create_membership(bootstrap, options, membership); });
}

ferry_status* ferry_membership_join(const ferry_join_options* options, ferry_membership** membership) {
  return guarded([&] { return join_members(options, membership); });
}

void ferry_membership_free(ferry_membership* membership) { delete membership; }

ferry_status* ferry_membership_get_view(const ferry_membership* membership, ferry_membership_view* view) {
  return guarded([&] { return fill_view(membership, view); });
}

const char* ferry_membership_address(const ferry_membership* membership) {
  return membership == nullptr ? "" : membership->address.c_str();
}

ferry_status* ferry_membership_complete_steps(ferry_membership* membership, uint64_t num_steps) {
  return guarded([&] { return complete_steps(membership, num_steps); });
}

int32_t ferry_membership_num_waiting(ferry_membership* membership) {
  return guarded_or(0, [&] { return membership == nullptr ? 0 : membership->value->num_waiting(); });
}

int32_t ferry_membership_num_awaiting(ferry_membership* membership) {
  return guarded_or(0, [&] { return membership == nullptr ? 0 : membership->value->num_awaiting(); });
}

ferry_status* ferry_membership_next_view(ferry_membership* membership, const ferry_next_view_options* options) {
  return guarded([&] { return change_view(membership, options); });
}

ferry_status* ferry_membership_bootstrap(ferry_membership* membership, ferry_bootstrap** bootstrap) {
  return guarded([&] { return connect_members(membership, bootstrap); });
}
