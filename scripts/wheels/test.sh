#!/usr/bin/env bash
# Checks the wheels in build/wheels and uses them as their users do: scripts/wheels/test.sh
# Installs them, without the network, into a virtual environment whose PATH has no compiler. $PYTHON names another
# Python than the one that built them; where it has torch, ranks also exchange tensors through both packages.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

readonly wheels=$PWD/build/wheels tools=$PWD/build/wheel-tools examples=$PWD/examples
readonly most_bytes=$((60 * 1000 * 1000))
version=$(cat VERSION)
readonly version ferry_wheel=$wheels/ferry_ep-$version-cp312-abi3-manylinux_2_28_x86_64.whl
python=${PYTHON:-$tools/venv/bin/python}
python=$("$python" -c 'import sys; print(sys.executable)')

fail() {
  printf 'wheels: %s\n' "$*" >&2
  exit 1
}

expect() { # what, expected, observed
  if [[ $2 != "$3" ]]; then fail "$1: expected \"$2\", observed \"$3\""; fi
}

scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
deep_ep_wheel=$(echo "$wheels"/deep_ep-*-py3-none-any.whl)
for wheel in "$ferry_wheel" "$deep_ep_wheel"; do
  [[ -f $wheel ]] || fail "there is no $wheel; scripts/wheels.sh builds it"
  if (($(stat --format=%s "$wheel") > most_bytes)); then fail "$wheel has more than $most_bytes bytes"; fi
done

# Auditwheel names the oldest platform that has all symbols of the files.
shown=$(PATH=$tools/venv/bin:$PATH "$tools/venv/bin/python" -m auditwheel show "$ferry_wheel" | tr '\n' ' ')
minor=$(sed -nE 's/.*consistent with the following platform tag: "manylinux_2_([0-9]+)_x86_64".*/\1/p' <<<"$shown")
((${minor:-99} <= 28)) || fail "auditwheel does not confirm manylinux_2_28_x86_64: $shown"

"$tools/venv/bin/python" -m zipfile -e "$ferry_wheel" "$scratch/content"
module=$scratch/content/ferry/_native.abi3.so
command=$scratch/content/ferry_ep-$version.data/scripts/ferry
for file in "$module" "$command"; do
  [[ -f $file ]] || fail "the wheel lacks $file"
  others=$(objdump --private-headers "$file" | sed -n 's/^ *NEEDED *//p' |
    grep -vE '^(lib(c|m|dl|rt|pthread|gcc_s)\.so\.[0-9]+|ld-linux-x86-64\.so\.2)$' || true)
  expect "other libraries that $(basename "$file") needs" "" "$others"
done
expect "symbols that the module shows" "PyInit__native ferry_segment_alloc ferry_segment_free" \
  "$(nm --dynamic --defined-only --format=just-symbols "$module" | sort | xargs)"
# Weak symbols may be absent; the linker leaves all others of no library to Python.
unknown=$(nm --dynamic --undefined-only "$module" | awk '$1 == "U" && $2 !~ /@/ && $2 !~ /^_?Py/ { print $2 }')
expect "symbols of the module that neither Python nor a library has" "" "$unknown"

# Only what the virtual environment has is on PATH: neither a compiler nor another ferry.
venv=$scratch/venv
"$python" -m venv "$venv"
site_packages=$(echo "$venv"/lib/python3.*/site-packages)
# Packages of that Python, torch among them, come after those of the virtual environment.
"$python" -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])' >"$site_packages/base.pth"
in_venv() {
  (cd "$scratch" && env -i HOME="$scratch" PATH="$venv/bin" VIRTUAL_ENV="$venv" "$@")
}
in_venv python -m pip install -q --no-index --disable-pip-version-check "$ferry_wheel" "$deep_ep_wheel"

read -r name observed _ < <(in_venv ferry --version)
expect "ferry --version" "ferry $version" "$name $observed"
in_venv ferry demo
in_venv ferry doctor
exit_code=0
complaint=$(in_venv ferry walk 2>&1) || exit_code=$?
expect "exit code of an unknown command" 2 $exit_code
expect "complaint about it" "ferry: walk is not a command" "${complaint%%;*}"
in_venv python - "$version" <<'PYTHON'
import importlib.metadata
import importlib.util
import pathlib
import sys

files = importlib.metadata.files("ferry-ep")
module = next(file for file in files if file.name == "_native.abi3.so").locate()
spec = importlib.util.spec_from_file_location("ferry._native", module)
native = importlib.util.module_from_spec(spec)
spec.loader.exec_module(native)
print("ferry._native of", importlib.metadata.version("ferry-ep"), "under Python", sys.version.split()[0])
PYTHON

if ! in_venv python -c 'import torch' 2>/dev/null; then
  printf 'wheels: ok, except that %s has no torch: "import ferry" and the exchanges were not run\n' "$python"
  exit
fi
in_venv python -c 'import ferry, deep_ep'
for example in 04_moe_layer 05_migrating_from_deep_ep; do
  in_venv CUDA_VISIBLE_DEVICES= OMP_NUM_THREADS=1 python -m torch.distributed.run --standalone --nproc-per-node 4 \
    "$examples/$example.py"
done
echo 'wheels: ok, with exchanges of tensors between ranks'
