#ifndef FERRY_MEMBERSHIP_H
#define FERRY_MEMBERSHIP_H

/// C interface: the ranks of a program as a set that shrinks when processes are lost, and grows when others take their
/// place (ferry/membership.hpp). Include ferry/ferry.h.

#include "ferry/ferry_base.h"
#include "ferry/ferry_group.h"

// NOLINTBEGIN(readability-identifier-naming): C has no namespaces
#ifdef __cplusplus
extern "C" {
#endif

/// ferry::Membership: a process's part in a changing set of members. One call at a time.
typedef struct ferry_membership ferry_membership;

/// ferry::MembershipOptions. The same on every rank, except host, interrupted and interrupted_user.
typedef struct ferry_membership_options {
  uint64_t struct_size;
  const char* host;    ///< numeric address of this host; NULL: the bootstrap's, or 127.0.0.1 if all are on one host
  const char* secret;  ///< the same on all ranks; NULL: a random one, then no other process can join
  int64_t timeout_ns;  ///< wait for a member that lives and does not come; 0: 50 s
  ferry_interrupted interrupted;  ///< NULL: waits end by themselves; else it ends ferry_membership_next_view
  void* interrupted_user;         ///< passed to `interrupted`
} ferry_membership_options;

/// Collective over the ranks of the bootstrap, which is used only during this call.
FERRY_C_API ferry_status* ferry_membership_create(ferry_bootstrap* bootstrap, const ferry_membership_options* options,
                                                  ferry_membership** membership);

/// ferry::JoinOptions.
typedef struct ferry_join_options {
  uint64_t struct_size;
  const char* const* contacts;    ///< [num_contacts] "host:port" of members (ferry_membership_address), tried in turn
  const char* secret;             ///< that of the members
  const char* host;               ///< numeric address of this host; NULL: the one that leads to the contact
  int64_t admission_timeout_ns;   ///< time until the members let it in; 0: 50 s
  int64_t timeout_ns;             ///< as in ferry_membership_options, once it is a member; 0: 50 s
  ferry_interrupted interrupted;  ///< as in ferry_membership_options; it ends ferry_membership_join, too
  void* interrupted_user;
  int32_t num_contacts;
  int32_t use_id;  ///< take the number `id`, that of a lost member or a new one; 0: the lowest free one
  int32_t id;
  int32_t reserved;  ///< 0
} ferry_join_options;

/// Asks members to be let in, and waits until they have made their next view, with this process in it.
FERRY_C_API ferry_status* ferry_membership_join(const ferry_join_options* options, ferry_membership** membership);
/// For the others this process has ended; to leave in good order call ferry_membership_next_view with `leave`.
FERRY_C_API void ferry_membership_free(ferry_membership* membership);

/// ferry::MembershipView. Filled by the library; the arrays belong to the membership, until its next call of
/// ferry_membership_next_view that succeeds. Empty arrays are NULL.
typedef struct ferry_membership_view {
  uint64_t struct_size;
  uint64_t epoch;               ///< 0 for the first view, one more for each later one
  uint64_t num_complete_steps;  ///< steps that all members that come from the view before have completed
  const int32_t* ids;           ///< [num_ranks] numbers of the members, ascending
  const int32_t* kept_ranks;    ///< ranks that members of this view had in the one before, ascending
  const int32_t* lost_ids;      ///< members of the view before that are not in this one
  const int32_t* joined_ids;    ///< members of this view that were not in the one before, as processes
  int32_t rank;                 ///< this process's index in `ids`, and its rank in groups of the view; -1: it has left
  int32_t num_ranks;
  int32_t num_kept_ranks;
  int32_t num_lost_ids;
  int32_t num_joined_ids;
  int32_t reserved;
} ferry_membership_view;

FERRY_C_API ferry_status* ferry_membership_get_view(const ferry_membership* membership, ferry_membership_view* view);
/// "host:port" of this process, for ferry_join_options::contacts. Belongs to the membership. "" for NULL.
FERRY_C_API const char* ferry_membership_address(const ferry_membership* membership);
/// This process has completed the steps 0 to num_steps - 1, by the program's own count. Sends nothing now.
FERRY_C_API ferry_status* ferry_membership_complete_steps(ferry_membership* membership, uint64_t num_steps);
/// Processes that ask this one to be let in. Local, never waits. 0 for NULL.
FERRY_C_API int32_t ferry_membership_num_waiting(ferry_membership* membership);
/// Members that wait for this one in ferry_membership_next_view. Local, never waits. 0 for NULL.
FERRY_C_API int32_t ferry_membership_num_awaiting(ferry_membership* membership);

/// ferry::NextViewOptions.
typedef struct ferry_next_view_options {
  uint64_t struct_size;
  /// Status of the call that failed, of a group of the present view; NULL: none. It remains the caller's. The rank that
  /// a FERRY_ERROR_TIMEOUT names counts as lost unless it comes before the others are complete.
  const ferry_status* reason;
  int32_t leave;     ///< the next view is without this process
  int32_t reserved;  ///< 0
  /// [num_silent_ids] members that the caller has waited for in vain, such as the ranks of ferry_group_suspend: they
  /// count as lost unless they come before the others are complete. Ids of no other member are ignored.
  const int32_t* silent_ids;
  int32_t num_silent_ids;
  int32_t reserved_too;  ///< 0
} ferry_next_view_options;

/// Collective over the members that live: agree on the next view.
FERRY_C_API ferry_status* ferry_membership_next_view(ferry_membership* membership,
                                                     const ferry_next_view_options* options);

/// Collective over the members of the view, once in each: a bootstrap among them, for ferry_group_create and
/// ferry_one_sided_create. Later calls in the same view give other handles of the same bootstrap, or the same error.
/// The caller frees the handle; it may outlive the membership.
FERRY_C_API ferry_status* ferry_membership_bootstrap(ferry_membership* membership, ferry_bootstrap** bootstrap);

#ifdef __cplusplus
}  // extern "C"
#endif
// NOLINTEND(readability-identifier-naming)

#endif  // FERRY_MEMBERSHIP_H
