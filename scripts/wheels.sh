#!/usr/bin/env bash
# Builds the wheels of ferry-ep and deep_ep into build/wheels: scripts/wheels.sh [--test | --missing]
# --test     afterwards installs them into a virtual environment of their own and uses them (scripts/wheels/test.sh)
# --missing  only looks for nvcc and Python, and exits with 1 if this machine lacks one of them
# Needs Python 3.12 or newer with its headers: $PYTHON, or else the newest of python3.12 and later. docs/wheels.md says
# how the wheels are made.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

readonly wheels=$PWD/build/wheels tools=$PWD/build/wheel-tools objects=$PWD/build/wheel-objects
readonly platform=manylinux_2_28_x86_64

fail() {
  printf 'wheels: %s\n' "$*" >&2
  exit 1
}

# A module for the stable ABI of 3.12 serves later versions too, except builds without the GIL.
serves() { # python
  "$1" - 2>/dev/null <<'PYTHON'
import pathlib, sys, sysconfig

header = pathlib.Path(sysconfig.get_paths()["include"], "Python.h")
sys.exit(not (sys.version_info >= (3, 12) and header.exists() and not sysconfig.get_config_var("Py_GIL_DISABLED")))
PYTHON
}

find_python() {
  local candidate
  if [[ -n ${PYTHON-} ]]; then
    serves "$PYTHON" || fail "PYTHON is $PYTHON, which is not Python 3.12 or newer with its headers and the GIL"
    echo "$PYTHON"
    return
  fi
  for candidate in python3 python3.14 python3.13 python3.12 "${PYENV_ROOT:-$HOME/.pyenv}"/versions/3.*/bin/python3; do
    if serves "$candidate"; then
      echo "$candidate"
      return
    fi
  done
  fail "Python 3.12 or newer with its headers was not found; name one in PYTHON"
}

# Licences of the code that the wheel holds beside Ferry's, from where each package of this system keeps its own.
collect_licenses() { # folder
  local package nanobind runtime
  rm -rf "$1"
  mkdir -p "$1"
  for package in libssl-dev libfmt-dev libspdlog-dev libcli11-dev nlohmann-json3-dev; do
    cp "/usr/share/doc/$package/copyright" "$1/$package.txt"
  done
  cp "/usr/share/doc/gcc-$(g++ -dumpversion)-base/copyright" "$1/libstdc++.txt"
  cp /usr/share/common-licenses/Apache-2.0 "$1/Apache-2.0.txt"
  nanobind=$(find "$tools/venv" -path '*nanobind-*.dist-info/licenses/LICENSE')
  cp "$nanobind" "$1/nanobind.txt"
  # Only CUDA that was installed from Python wheels has it in a place of its own.
  runtime=$(dirname "$(dirname "$(readlink -f "$nvcc")")")
  find "$runtime" -ipath '*cuda_runtime-*/license*.txt' -exec cp {} "$1/cuda-runtime.txt" \;
}

case "$*" in
  '' | --test | --missing) ;;
  *)
    sed -n '2,6s/^# \?//p' "$0"
    exit 2
    ;;
esac
PATH+=:/usr/local/cuda/bin
nvcc=$(command -v nvcc) || fail "nvcc was not found: the wheel has the CUDA backend"
if [[ $(uname -m) != x86_64 ]]; then fail "this machine is $(uname -m); wheels are made on x86_64 only"; fi
python=$(find_python)
if [[ ${1-} == --missing ]]; then exit; fi
scripts/setup.sh test

# Written last, so that an installation that was interrupted, or made for another Python, is repeated.
wanted=$(echo "$python" && cat python/requirements-wheels.txt)
if [[ "$(cat "$tools/installed.txt" 2>/dev/null)" != "$wanted" ]]; then
  rm -rf "$tools/venv"
  "$python" -m venv "$tools/venv"
  "$tools/venv/bin/python" -m pip install -qq --requirement python/requirements-wheels.txt ||
    fail "pip could not install python/requirements-wheels.txt"
  printf '%s\n' "$wanted" >"$tools/installed.txt"
fi
python=$tools/venv/bin/python
scripts/wheels/toolchain.sh "$python" "$tools/link"
collect_licenses "$tools/licenses"

# Compiled by the compiler and with the settings of preset release, so that ccache has the objects, and linked with the
# libraries of the oldest system that the tag names. The linker of a program also checks shared libraries: libgcc_s of
# this system needs the C library of this system, and that of a user's system finds its own.
link_flags="-B$tools/link/ -L$tools/link -static-libstdc++ -Wl,--allow-shlib-undefined"
export CC=cc CXX=c++
# Ninja does not see changes of the libraries in that folder.
rm -rf "$tools/linked" "$wheels" "$objects/python/_native.abi3.so" "$objects/tools/ferry"
mkdir -p "$wheels"
"$python" -m pip wheel -q --no-build-isolation --no-deps --wheel-dir "$tools/linked" . \
  --config-settings=build-dir="$objects" \
  --config-settings=wheel.py-api=cp312 \
  --config-settings=cmake.define.FERRY_CUDA=ON \
  --config-settings=cmake.define.FERRY_UCX=ON \
  --config-settings=cmake.define.FERRY_TOOLS=ON \
  --config-settings=cmake.define.FERRY_WERROR=ON \
  --config-settings=cmake.define.FERRY_FMT_HEADER_ONLY=OFF \
  --config-settings=cmake.define.FERRY_PYTHON_LICENSES="$tools/licenses" \
  --config-settings=cmake.define.OPENSSL_USE_STATIC_LIBS=ON \
  --config-settings=cmake.define.fmt_DIR="$tools/link" \
  --config-settings=cmake.define.CMAKE_EXE_LINKER_FLAGS="$link_flags" \
  --config-settings=cmake.define.CMAKE_MODULE_LINKER_FLAGS="$link_flags" ||
  fail "the build of ferry-ep failed"
# Names the platform, and refuses if a file needs more than it offers.
said=$(PATH=$tools/venv/bin:$PATH "$python" -m auditwheel repair --plat "$platform" --only-plat --wheel-dir "$wheels" \
  "$tools"/linked/ferry_ep-*.whl 2>&1) || fail "auditwheel refuses $platform: $said"

# Setuptools would also package modules that an earlier version left in the build folder.
rm -rf "$tools/deep_ep"
mkdir -p "$tools/deep_ep"
cp -r python/deep_ep/pyproject.toml python/deep_ep/deep_ep python/deep_ep/deep_ep_cpp.py LICENSE "$tools/deep_ep"
"$python" -m pip wheel -q --no-build-isolation --no-deps --wheel-dir "$wheels" "$tools/deep_ep" ||
  fail "the build of deep_ep failed"
(cd "$wheels" && du -h --apparent-size -- *.whl)
if [[ ${1-} == --test ]]; then scripts/wheels/test.sh; fi
