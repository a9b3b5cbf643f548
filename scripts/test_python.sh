#!/usr/bin/env bash
# Builds the Python packages, installs them into a virtual environment of their own and runs their tests there:
# scripts/test_python.sh [--install | --test] [pytest arguments...]
# --install  only installs; --test  only runs the tests of the installed packages
# Where this machine's Python has torch, nanobind, scikit-build-core, setuptools, numpy and pytest, only JAX is
# downloaded, for the tests that need it.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

readonly environment=build/python-tests
install=yes test=yes
case ${1-} in
  --install) test=no && shift ;;
  --test) install=no && shift ;;
esac

fail() {
  printf 'test_python: %s\n' "$*" >&2
  exit 1
}

run_tests() {
  "$environment/bin/python" -m pytest "$@"
}

if [[ $install == no ]]; then
  run_tests "$@"
  exit
fi

# Written last, so that an installation that was interrupted, or made for other requirements, is repeated.
readonly installed=$environment/installed.txt
if ! cmp -s python/requirements-test.txt "$installed"; then
  rm -rf "$environment"
  if python3 -c 'import torch, nanobind, scikit_build_core, setuptools, numpy, pytest' 2>/dev/null; then
    python3 -m venv --system-site-packages "$environment"
  else
    python3 -m venv "$environment" ||
      fail "python3 -m venv failed; Debian and Ubuntu have it in the package python3-venv"
    "$environment/bin/python" -m pip install -qq --requirement python/requirements-test.txt ||
      fail "pip could not install python/requirements-test.txt"
  fi
  # JAX is about 90 MB. Without it the tests that need it are skipped and say so.
  "$environment/bin/python" -c 'import jax' 2>/dev/null ||
    "$environment/bin/python" -m pip install -qq --requirement python/requirements-jax.txt ||
    printf 'test_python: pip could not install python/requirements-jax.txt\n' >&2
  cp python/requirements-test.txt "$installed"
fi

# With the settings of preset release ccache has most of the library already; packaging.add_subdirectory builds with
# {fmt} compiled in. Where no GPU runs it, CUDA code would only make this build longer.
settings=(--config-settings=cmake.define.FERRY_FMT_HEADER_ONLY=OFF --config-settings=cmake.define.FERRY_WERROR=ON)
if ! nvidia-smi -L >/dev/null 2>&1; then settings+=(--config-settings=cmake.define.FERRY_CUDA=OFF); fi
"$environment/bin/python" -m pip install -qq --no-build-isolation --no-deps --force-reinstall "${settings[@]}" . ||
  fail "pip install failed; python3-dev (Python.h) is needed to build, and what scripts/setup.sh build installs"
# Setuptools would also install modules that an earlier version left in the build folder.
rm -rf build/deep_ep
mkdir -p build/deep_ep
cp -r python/deep_ep/pyproject.toml python/deep_ep/deep_ep python/deep_ep/deep_ep_cpp.py build/deep_ep
"$environment/bin/python" -m pip install -qq --no-build-isolation --no-deps --force-reinstall build/deep_ep ||
  fail "pip install of python/deep_ep failed; its build needs setuptools 70.1 or newer"
if [[ $test == yes ]]; then run_tests "$@"; fi
