#include "bootstrap.hpp"

#include <string>
#include <utility>

#include "arguments.hpp"
#include "errors.hpp"
#include "gil.hpp"

namespace nb = nanobind;

namespace ferry::python {
namespace {

class CallbackBootstrap final : public Bootstrap {
 public:
  CallbackBootstrap(int rank, int num_ranks, nb::callable gather, std::string local_address)
      : rank_(rank), num_ranks_(num_ranks), gather_(std::move(gather)), local_address_(std::move(local_address)) {}
  ~CallbackBootstrap() override {
    const nb::gil_scoped_acquire gil;
    gather_.reset();
  }

  int rank() const override { return rank_; }
  int num_ranks() const override { return num_ranks_; }
  std::string local_address() const override { return local_address_; }

  Result<std::vector<std::vector<std::byte>>> all_gather(std::span<const std::byte> mine,
                                                         std::int64_t /*timeout_ns*/) override {
    if (!failed_.ok()) return failed_;
    const nb::gil_scoped_acquire gil;
    try {
      const nb::list all = nb::cast<nb::list>(gather_(nb::bytes(mine.data(), mine.size())));
      if (all.size() != static_cast<std::size_t>(num_ranks_)) {
        return fail("it returned " + std::to_string(all.size()) + " items, expected " + std::to_string(num_ranks_));
      }
      std::vector<std::vector<std::byte>> gathered;
      for (const nb::handle item : all) {
        const auto bytes = nb::cast<nb::bytes>(item);
        const auto* data = reinterpret_cast<const std::byte*>(bytes.c_str());
        gathered.emplace_back(data, data + bytes.size());
      }
      return gathered;
    } catch (nb::python_error& error) {
      // Without the traceback, which error.what() has: it would hide what to do.
      const nb::handle value = error.value();
      const std::string what = class_name(value) + ": " + nb::str(value).c_str();
      if (!error.matches(PyExc_Exception)) keep(error);  // Ctrl-C
      return fail(what);
    } catch (const std::exception& error) {
      return fail(error.what());
    }
  }

 private:
  Status fail(const std::string& what) {
    failed_ = Status(ErrorCode::kTransport, "all_gather: the all-gather of the process group failed: " + what +
                                                "; check that all ranks are alive and create the group together");
    return failed_;
  }

  int rank_;
  int num_ranks_;
  nb::callable gather_;
  std::string local_address_;
  Status failed_;
};

}  // namespace

std::shared_ptr<Bootstrap> callback_bootstrap(int rank, int num_ranks, nb::callable gather, std::string local_address) {
  return std::make_shared<CallbackBootstrap>(rank, num_ranks, std::move(gather), std::move(local_address));
}

std::shared_ptr<Bootstrap> environment_bootstrap(std::int64_t timeout_ns) {
  TcpBootstrapOptions options = value_or_raise(tcp_bootstrap_options_from_environment());
  options.timeout_ns = timeout_ns;
  Result<std::shared_ptr<Bootstrap>> bootstrap = [&] {
    const GilReleased released;
    return create_tcp_bootstrap(options);
  }();
  return value_or_raise(std::move(bootstrap));
}

}  // namespace ferry::python
