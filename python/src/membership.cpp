#include "membership.hpp"

#include <nanobind/stl/optional.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "errors.hpp"
#include "ferry/membership.hpp"
#include "gil.hpp"

namespace nb = nanobind;
using namespace nb::literals;

namespace ferry::python {
namespace {

nb::tuple tuple_of(const std::vector<int>& numbers) {
  nb::list list;
  for (const int number : numbers) list.append(number);
  return nb::tuple(list);
}

/// The fields of ferry.MembershipView, in their order.
nb::tuple fields_of(const MembershipView& view) {
  return nb::make_tuple(view.epoch, view.rank, tuple_of(view.ids), tuple_of(view.kept_ranks), tuple_of(view.lost_ids),
                        tuple_of(view.joined_ids), view.num_complete_steps);
}

template <typename Call>
auto without_gil(Call call) {
  const GilReleased released;
  return call();
}

/// A Membership whose calls raise. All of them wait for one that another thread makes, which may need the GIL to ask
/// for signals, so none holds it.
class PyMembership {
 public:
  PyMembership(std::shared_ptr<Membership> members, std::shared_ptr<const SignalCheck> signals)
      : members_(std::move(members)), signals_(std::move(signals)) {}

  static std::shared_ptr<PyMembership> create(std::shared_ptr<Bootstrap> bootstrap, const std::string& secret,
                                              const std::string& host, std::int64_t timeout_ns) {
    const auto signals = std::make_shared<SignalCheck>();
    MembershipOptions options;
    options.host = host;
    options.secret = secret;
    options.timeout_ns = timeout_ns;
    options.interrupted = [signals] { return signals->ask(); };
    auto members = without_gil([&] { return Membership::create(std::move(bootstrap), options); });
    return std::make_shared<PyMembership>(value_or_raise(std::move(members)), signals);
  }

  static std::shared_ptr<PyMembership> join(std::vector<std::string> contacts, const std::string& secret, int id,
                                            const std::string& host, std::int64_t admission_timeout_ns,
                                            std::int64_t timeout_ns) {
    const auto signals = std::make_shared<SignalCheck>();
    JoinOptions options;
    options.admission_timeout_ns = admission_timeout_ns;
    options.contacts = std::move(contacts);
    options.secret = secret;
    options.id = id;
    options.host = host;
    options.timeout_ns = timeout_ns;
    options.interrupted = [signals] { return signals->ask(); };
    auto members = without_gil([&] { return Membership::join(options); });
    return std::make_shared<PyMembership>(value_or_raise(std::move(members)), signals);
  }

  /// Only before the first call of next_view, which returns later ones.
  nb::tuple first_view() const { return fields_of(members_->view()); }
  std::string address() const { return members_->address(); }

  void complete_steps(std::uint64_t num_steps) {
    signals_->refuse_in_handler("Membership.complete_steps");
    without_gil([&] { members_->complete_steps(num_steps); });
  }
  int num_waiting() {
    signals_->refuse_in_handler("Membership.num_waiting");
    return without_gil([&] { return members_->num_waiting(); });
  }
  int num_awaiting() {
    signals_->refuse_in_handler("Membership.num_awaiting");
    return without_gil([&] { return members_->num_awaiting(); });
  }

  /// late_rank: the rank in whose place a call of the present view's group timed out.
  nb::tuple next_view(std::optional<int> late_rank, std::vector<int> silent_ids, bool leave) {
    signals_->refuse_in_handler("Membership.next_view");
    NextViewOptions options;
    if (late_rank) options.reason = Status(ErrorCode::kTimeout, "a call of the group timed out", *late_rank);
    options.silent_ids = std::move(silent_ids);
    options.leave = leave;
    return fields_of(value_or_raise(without_gil([&] { return members_->next_view(options); })));
  }

  std::shared_ptr<Bootstrap> bootstrap() {
    signals_->refuse_in_handler("Membership.group");
    return value_or_raise(without_gil([&] { return members_->bootstrap(); }));
  }

 private:
  std::shared_ptr<Membership> members_;
  std::shared_ptr<const SignalCheck> signals_;
};

}  // namespace

void define_membership(nb::module_& module) {
  nb::class_<PyMembership>(module, "Membership")
      .def_prop_ro("address", &PyMembership::address)
      .def("first_view", &PyMembership::first_view)
      .def("complete_steps", &PyMembership::complete_steps)
      .def("num_waiting", &PyMembership::num_waiting)
      .def("num_awaiting", &PyMembership::num_awaiting)
      .def("next_view", &PyMembership::next_view, "late_rank"_a.none(), "silent_ids"_a, "leave"_a)
      .def("bootstrap", &PyMembership::bootstrap);
  module.def("create_membership", &PyMembership::create);
  module.def("join_membership", &PyMembership::join);
}

}  // namespace ferry::python
