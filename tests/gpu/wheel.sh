#!/usr/bin/env bash
# Uses the wheels on a machine with GPUs, without a compiler: tests/gpu/wheel.sh FOLDER [--ranks N]
# FOLDER has the wheels of ferry-ep and deep_ep (build/wheels). N ranks (default 2) exchange on the GPUs, more than one
# on a GPU if need be. The machine's Python, 3.12 or newer ($PYTHON, default python3), has torch.
set -euo pipefail
examples=$(realpath "$(dirname "${BASH_SOURCE[0]}")/../../examples")
readonly examples

usage() {
  sed -n '2,4s/^# \?//p' "$0"
  exit 2
}

fail() {
  printf 'wheel: %s\n' "$*" >&2
  exit 1
}

folder='' num_ranks=2
while (($# > 0)); do
  case $1 in
    --ranks) num_ranks=${2:?--ranks needs a number} && shift 2 ;;
    -*) usage ;;
    *) folder=$1 && shift ;;
  esac
done
[[ -n $folder ]] || usage
shopt -s nullglob
wheels=("$folder"/ferry_ep-*-manylinux_*.whl "$folder"/deep_ep-*.whl)
if ((${#wheels[@]} != 2)); then
  fail "$folder should have a wheel of ferry-ep and one of deep_ep, but has ${wheels[*]:-neither}"
fi
nvidia-smi -L || fail "nvidia-smi finds no GPU"

scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
venv=$scratch/venv
# Python of Ubuntu cannot give the environment a pip without another package; its own pip serves.
"${PYTHON:-python3}" -m venv --system-site-packages --without-pip "$venv"
# The machine's Python may be one of a virtual environment itself, whose packages the new one would not see.
"${PYTHON:-python3}" -c 'import site; print(*site.getsitepackages(), sep="\n")' >"$(echo "$venv"/lib/python3.*/site-packages)/machine.pth"
"$venv/bin/python" -m pip install -q --no-index --no-deps --disable-pip-version-check "${wheels[@]}"
# Only what the virtual environment has is on PATH: no compiler.
in_venv() {
  (cd "$scratch" && PATH=$venv/bin OMP_NUM_THREADS=1 "$@")
}
in_venv python -c 'import torch; print("torch", torch.__version__, "with CUDA", torch.version.cuda)'
in_venv python -c 'import ferry, deep_ep; print(ferry.__file__, deep_ep.__version__)'
in_venv ferry --version
in_venv ferry doctor
in_venv ferry demo --backend cuda --ranks "$num_ranks"
in_venv ferry bench --backend cuda --ranks "$num_ranks" --tokens 1024
# Uses GPUs only where each rank has its own.
in_venv python -m torch.distributed.run --standalone --nproc-per-node "$num_ranks" "$examples/04_moe_layer.py"
in_venv python -m torch.distributed.run --standalone --nproc-per-node "$num_ranks" \
  "$examples/05_migrating_from_deep_ep.py" | tee "$scratch/said"
if (($(grep -c 'on cuda:.*both generations as expected' "$scratch/said") != num_ranks)); then
  fail "the deep_ep example did not end as expected on the GPUs of all ranks"
fi
printf 'wheel: ok\n'
