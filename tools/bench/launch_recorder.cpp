#include "bench/launch_recorder.hpp"

namespace ferry::tools {

namespace {

thread_local CallLaunches* current = nullptr;

void record(const KernelLaunch& launch) {
  if (current == nullptr) return;
  if (current->num_launches < current->launches.size()) current->launches[current->num_launches] = launch;
  ++current->num_launches;
}

}  // namespace

LaunchRecorder::LaunchRecorder(CallLaunches* record_of_call) {
  current = record_of_call;
  observe_launches(record);  // never removed, because other ranks of the process may still record when this one is done
}

LaunchRecorder::~LaunchRecorder() { current = nullptr; }

}  // namespace ferry::tools
