#include <fmt/format.h>

#include <CLI/App.hpp>
#include <CLI/Config.hpp>
#include <CLI/Formatter.hpp>
#include <exception>
#include <new>
#include <sstream>
#include <string>
#include <vector>

#include "bench/bench.hpp"
#include "bench/tune.hpp"
#include "demo/demo.hpp"
#include "doctor/doctor.hpp"
#include "ferry/version.hpp"
#include "planning/plan_command.hpp"
#include "report/output.hpp"
#include "run/exit_code.hpp"

int main(int argc, char** argv) {
  using namespace ferry::tools;
  hold_standard_streams();
  int exit_code = kExitOk;
  try {
    CLI::App app("Ferry: expert-parallel dispatch and combine", "ferry");
    app.set_version_flag("--version", fmt::format("ferry {} ({})", ferry::version(), ferry::commit()));
    app.require_subcommand(1);
    app.failure_message(CLI::FailureMessage::simple);
    add_demo_command(app, &exit_code);
    add_bench_command(app, &exit_code);
    add_tune_command(app, &exit_code);
    add_plan_command(app, &exit_code);
    add_doctor_command(app, &exit_code);
    try {
      app.parse(argc, argv);
    } catch (const CLI::RequiredError& error) {
      // The only requirement is a command.
      print_error(fmt::format("ferry: {}; give one of demo, bench, tune, plan, doctor, or run ferry --help\n",
                              argc > 1 ? fmt::format("{} is not a command", argv[1]) : "no command was given"));
      return kExitUsage;
    } catch (const CLI::ExtrasError& error) {
      // The exception's own text has the arguments backwards.
      const std::vector<std::string> extras = app.remaining(true);
      std::string command = "ferry";
      for (const CLI::App* given : app.get_subcommands()) command += " " + given->get_name();
      print_error(fmt::format("{0}: {1} is not an argument that it takes; {0} --help lists those\n", command,
                              extras.empty() ? error.what() : extras.front()));
      return kExitUsage;
    } catch (const CLI::ParseError& error) {
      std::ostringstream help;
      std::ostringstream complaint;
      const bool asked_for_help = app.exit(error, help, complaint) == 0;
      print_error(complaint.str());
      if (ferry::Status status = print(stdout, help.str()); !status) return report_failure("", status, kExitFailed);
      return asked_for_help ? kExitOk : kExitUsage;
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
