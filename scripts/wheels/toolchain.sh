#!/usr/bin/env bash
# Prepares the libraries that wheels are linked with: scripts/wheels/toolchain.sh python folder
# The system's GCC compiles the wheels, but this system's C library is newer than manylinux_2_28 allows. Zig, a Python
# wheel, makes stubs of all its libraries with the symbols of glibc 2.28; -L and -B with the folder link with these.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"

readonly python=$1 folder=$2 glibc=2.28 zig_version=0.17.1
# Written last, so that an interrupted run is repeated.
readonly made=$folder/made-by.txt
made_by=$(cat toolchain.sh glibc.c fmt.cpp fmt-config.cmake | sha256sum)
if [[ "$(cat "$made" 2>/dev/null)" == "$made_by" ]]; then exit; fi

rm -rf "$folder"
mkdir -p "$folder"
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
"$python" -m pip install -qq --no-deps --target "$scratch/zig" "ziglang==$zig_version"

# Zig keeps the stubs, the start-up code and the static part of the C library of each program it links.
printf 'int main(void) { return 0; }\n' >"$scratch/main.c"
export ZIG_GLOBAL_CACHE_DIR=$scratch/cache ZIG_LOCAL_CACHE_DIR=$scratch/cache
"$scratch/zig/ziglang/zig" build-exe -target "x86_64-linux-gnu.$glibc" -lc -OReleaseFast -fno-compiler-rt \
  -fno-ubsan-rt "-femit-bin=$scratch/main" "$scratch/main.c"
copy() { # name in Zig's cache, name here
  local found
  found=$(find "$scratch/cache" -name "$1")
  if [[ ! -f $found ]]; then
    printf 'wheels: Zig %s has not made one %s but: %s\n' "$zig_version" "$1" "${found:-none}" >&2
    exit 1
  fi
  cp "$found" "$folder/$2"
}
copy crt1.o Scrt1.o # position-independent
copy libc.so.6 libc.so.6
copy libc_nonshared.a libc_nonshared.a
copy libld.so.2 ld-linux-x86-64.so.2
copy libm.so.6 libm.so
copy libpthread.so.0 libpthread.so
copy libdl.so.2 libdl.so
copy librt.so.1 librt.so

gcc -std=c11 -O2 -Wall -Wextra -Werror -fPIC -c glibc.c -o "$scratch/glibc.o"
ar rcs "$folder/libglibc_newer.a" "$scratch/glibc.o"
# The parts are separate libraries before glibc 2.34, so builds that do not name them must still find their symbols.
cat >"$folder/libc.so" <<'SCRIPT'
GROUP(libc.so.6 libc_nonshared.a libglibc_newer.a
      AS_NEEDED(libpthread.so libdl.so librt.so libm.so ld-linux-x86-64.so.2))
SCRIPT

g++ -std=c++20 -O2 -fPIC -fvisibility=hidden -c fmt.cpp -o "$scratch/fmt.o"
ar rcs "$folder/libfmt.a" "$scratch/fmt.o"
cp fmt-config.cmake "$folder"
printf '%s\n' "$made_by" >"$made"
