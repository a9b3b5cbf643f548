#!/usr/bin/env bash
# scripts/lint.sh check [part...]   format, shell scripts, links of the documentation, Python, names (by far the longest);
#                                   reports all, changes nothing
# scripts/lint.sh format            formats the C++ and Python files in place
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

readonly ruff_version=0.17.5
jobs=$(nproc)
num_failed=0

# Files of the project by pattern: committed ones and new ones, less what git ignores or somebody has just removed.
project_files() {
  local file
  git ls-files --cached --others --exclude-standard -- "$@" | sort -u | while IFS= read -r file; do
    if [[ -f $file ]]; then printf '%s\n' "$file"; fi
  done
}

check() { # name command...
  local name=$1
  shift
  if "$@"; then
    printf '%-8s ok\n' "$name"
  else
    printf '%-8s FAILED\n' "$name"
    num_failed=$((num_failed + 1))
  fi
}

check_format() {
  local said unformatted
  if ! said=$(project_files '*.cpp' '*.hpp' '*.c' '*.h' '*.cu' '*.cuh' | xargs clang-format-14 --dry-run -Werror 2>&1); then
    unformatted=$(sed -n 's/: error: code should be clang-formatted.*//p' <<<"$said" | cut -d: -f1 | sort | uniq -c)
    printf '%s\n' "places that \"make format\" would change:" "${unformatted:-none; clang-format failed: $said}"
    return 1
  fi
  # clang-format leaves comments alone.
  if project_files '*.cpp' '*.hpp' '*.c' '*.h' '*.cu' '*.cuh' | LC_ALL=C.UTF-8 xargs grep -nHE '^.{121,}'; then
    echo 'lines longer than 120 columns'
    return 1
  fi
}

# Names only (.clang-tidy says which). Preset lint has no precompiled headers: those of GCC are nothing to clang-tidy, and
# without them files that do not include what they use are an error here. Those that are compiled together are read, and
# so count, as one: most of the time goes into what they include.
check_names() {
  local folder=build/lint
  cmake --preset lint --log-level=WARNING >/dev/null || return 1
  {
    sed -n "s|^ *\"file\": \"$PWD/\($folder/.*/Unity/.*\)\",*$|\1|p" "$folder/compile_commands.json" | sort -u
    comm -12 <(project_files '*.cpp' | sort) \
      <(sed -n "s|^ *\"file\": \"$PWD/\(.*\)\",*$|\1|p" "$folder/compile_commands.json" | sort -u)
  } | xargs -P "$jobs" -n 1 clang-tidy --quiet -p "$folder" 2> >(grep -vE '^[0-9]+ warnings? .*(generated|treated)' >&2)
}

check_shell() {
  { project_files '*.sh'; echo .ci/run; } | xargs shellcheck
}

# Relative links in the documents lead to files that exist.
check_links() {
  local document target broken=0
  while IFS= read -r document; do
    while IFS= read -r target; do
      target=${target%%#*}
      if [[ -n $target && $target != *://* && $target != mailto:* && ! -e "$(dirname "$document")/$target" ]]; then
        printf '%s: link to %s, which does not exist\n' "$document" "$target"
        broken=1
      fi
    done < <(grep -oE '\]\([^) ]+\)' "$document" | sed -E 's/^\]\((.*)\)$/\1/')
  done < <(project_files '*.md')
  return $broken
}

# By number: another version would find other things. Debian has no package of it.
find_ruff() {
  ruff=build/ruff/bin/ruff
  if [[ "$("$ruff" --version 2>/dev/null)" != "ruff $ruff_version" ]]; then
    rm -rf build/ruff
    python3 -m venv build/ruff && build/ruff/bin/python -m pip install -qq "ruff==$ruff_version"
  fi
}

check_python() {
  local files
  files=$(project_files '*.py' '*.pyi')
  if [[ -z $files ]]; then return 0; fi
  find_ruff
  xargs "$ruff" check --quiet <<<"$files" && xargs "$ruff" format --quiet --check <<<"$files"
}

case ${1-} in
  check)
    parts=("${@:2}")
    if ((${#parts[@]} == 0)); then parts=(format shell links python names); fi
    for part in "${parts[@]}"; do
      if [[ $(type -t "check_$part") != function ]]; then
        printf 'lint: no part "%s": format, shell, links, python, names\n' "$part" >&2
        exit 2
      fi
      check "$part" "check_$part"
    done
    exit $((num_failed > 0))
    ;;
  format)
    project_files '*.cpp' '*.hpp' '*.c' '*.h' '*.cu' '*.cuh' | xargs clang-format-14 -i
    find_ruff
    project_files '*.py' '*.pyi' | xargs "$ruff" format --quiet
    ;;
  *)
    echo 'usage: scripts/lint.sh check [part...] | format' >&2
    exit 2
    ;;
esac
