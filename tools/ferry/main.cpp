#include <fmt/format.h>

#include <CLI/App.hpp>
#include <CLI/Config.hpp>
#include <CLI/Formatter.hpp>
#include <exception>
#include <new>

#include "bench/bench.hpp"
#include "bench/tune.hpp"
#include "demo/demo.hpp"
#include "doctor/doctor.hpp"
#include "ferry/version.hpp"
#include "run/exit_code.hpp"

int main(int argc, char** argv) {
  using namespace ferry::tools;
  int exit_code = kExitOk;
  try {
    CLI::App app("Ferry: expert-parallel dispatch and combine", "ferry");
    app.set_version_flag("--version", fmt::format("ferry {} ({})", ferry::version(), ferry::commit()));
    app.require_subcommand(1);
    app.failure_message(CLI::FailureMessage::simple);
    add_demo_command(app, &exit_code);
    add_bench_command(app, &exit_code);
    add_tune_command(app, &exit_code);
    add_doctor_command(app, &exit_code);
    try {
      app.parse(argc, argv);
    } catch (const CLI::ParseError& error) {
      return app.exit(error) == 0 ? kExitOk : kExitUsage;
    }
  } catch (const std::bad_alloc&) {
    return report_failure(
        "", {ferry::ErrorCode::kSystem, "the machine is out of memory; use fewer tokens or a smaller layer"},
        kExitFailed);
  } catch (const std::exception& error) {
    return report_failure("", {ferry::ErrorCode::kInternal, error.what()}, kExitFailed);
  }
  return exit_code;
}
