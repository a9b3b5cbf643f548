#!/usr/bin/env bash
# Installs the Debian or Ubuntu packages that a job needs: scripts/setup.sh build|test|lint|docs
# Uses neither the network nor root's rights where they are installed already. Reads no input.
set -euo pipefail

readonly min_cmake_version=3.25 # presets version 6 and add_test working as CMakeLists.txt expects
readonly supported="Debian 12 and Ubuntu 24.04"

# Entries are package:part. The part that must exist is a command, wherever it was installed from; a header that the
# compiler finds; import:module or python:header.h of python3; or libfuzzer, which clang++ links into fuzz targets.
readonly build_packages=(g++:g++ cmake:cmake ninja-build:ninja git:git libfmt-dev:fmt/format.h libssl-dev:openssl/hmac.h
  libspdlog-dev:spdlog/logger.h libcli11-dev:CLI/CLI.hpp nlohmann-json3-dev:nlohmann/json.hpp libucx-dev:ucp/api/ucp.h)
# ccache is optional. It compiles the library once for the tests and the Python package, and makes a second build short.
readonly test_packages=(ccache:ccache libgtest-dev:gtest/gtest.h libgmock-dev:gmock/gmock.h binutils:nm python3:python3
  pkgconf:pkg-config
  python3-venv:import:ensurepip python3-dev:python:Python.h clang:clang++ libclang-rt-dev:libfuzzer iproute2:ip
  libopenmpi-dev:mpicc openmpi-bin:mpirun libsodium-dev:sodium.h)
# The number of clang-format is fixed because another version would format some lines differently.
readonly lint_packages=(clang-format-14:clang-format-14 clang-tidy:clang-tidy shellcheck:shellcheck)
readonly docs_packages=(doxygen:doxygen python3:python3 python3-venv:import:ensurepip)

fail() {
  printf 'setup: %s\n' "$*" >&2
  exit 1
}

has_package() {
  [[ "$(dpkg-query --show --showformat='${db:Status-Status}' "$1" 2>/dev/null)" == installed ]]
}

has_header() {
  command -v g++ >/dev/null && printf '#include <%s>\n' "$1" | g++ -std=c++20 -E -x c++ - >/dev/null 2>&1
}

has_python_header() {
  [[ -e "$(python3 -c 'import sysconfig; print(sysconfig.get_paths()["include"])' 2>/dev/null)/$1" ]]
}

# The package without a version follows the package clang; a clang++ from elsewhere may have its own libFuzzer.
has_libfuzzer() {
  printf '#include <cstddef>\nextern "C" int LLVMFuzzerTestOneInput(const unsigned char*, std::size_t) { return 0; }\n' |
    clang++ -fsanitize=fuzzer,address,undefined -x c++ - -o /dev/null 2>/dev/null
}

# Sets missing_packages and missing_parts from "package:part" arguments.
find_missing() {
  missing_packages=()
  missing_parts=()
  local entry package part
  for entry in "$@"; do
    package=${entry%%:*}
    part=${entry#*:}
    case $part in
      import:*) python3 -c "import ${part#import:}" 2>/dev/null && continue ;;
      libfuzzer) has_libfuzzer && continue ;;
      python:*) has_python_header "${part#python:}" && continue ;;
      *.h | *.hpp)
        if [[ $have_dpkg == yes ]]; then
          has_package "$package" && continue
        else
          has_header "$part" && continue
        fi
        ;;
      *) command -v "$part" >/dev/null && continue ;;
    esac
    missing_packages+=("$package")
    missing_parts+=("$part")
  done
}

require_cmake_version() {
  local version
  version=$(cmake --version | sed -n '1s/^cmake version //p')
  if [[ "$(printf '%s\n' "$min_cmake_version" "$version" | sort --version-sort | head -n 1)" != "$min_cmake_version" ]]; then
    fail "cmake is $version at $(command -v cmake); $min_cmake_version or newer is needed ($supported have it)"
  fi
}

case ${1-} in
  build) wanted=("${build_packages[@]}") ;;
  test) wanted=("${build_packages[@]}" "${test_packages[@]}") ;;
  lint) wanted=("${build_packages[@]}" "${test_packages[@]}" "${lint_packages[@]}") ;;
  docs) wanted=("${docs_packages[@]}") ;;
  *) fail "usage: scripts/setup.sh build|test|lint|docs" ;;
esac

have_dpkg=no
if command -v dpkg-query >/dev/null && command -v apt-get >/dev/null; then have_dpkg=yes; fi

find_missing "${wanted[@]}"
if ((${#missing_packages[@]} > 0)); then
  if [[ $have_dpkg == no ]]; then
    fail "missing: ${missing_parts[*]}. Install them with this system's package manager and try again" \
      "($supported are installed by this script; there the packages are ${missing_packages[*]})"
  fi
  if ((EUID != 0)); then
    printf 'setup: missing: %s\nInstall with:\n' "${missing_packages[*]}" >&2
    printf '  sudo apt-get update && sudo apt-get install -y --no-install-recommends %s\n' "${missing_packages[*]}" >&2
    exit 1
  fi
  printf 'setup: installing %s\n' "${missing_packages[*]}"
  export DEBIAN_FRONTEND=noninteractive
  apt-get update -qq </dev/null || fail "apt-get update failed; is the network there?"
  apt-get install -qq -y --no-install-recommends "${missing_packages[@]}" </dev/null >/dev/null ||
    fail "apt-get could not install ${missing_packages[*]}; $supported have all of them"
  find_missing "${wanted[@]}"
  if ((${#missing_packages[@]} > 0)); then fail "installed, yet still not found: ${missing_parts[*]}"; fi
fi
if [[ $1 != docs ]]; then require_cmake_version; fi
