#!/usr/bin/env bash
# scripts/lint.sh check [part...]   format, prose, shell, links, tables, python and names, or the parts given: all_names
#                                   too, which takes by far the longest; reports everything, changes nothing
# scripts/lint.sh format            formats the C++ and Python files in place
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

readonly ruff_version=0.17.5
jobs=$(nproc)
num_failed=0

# Files of the project by pattern: committed and new ones that exist and that git does not ignore.
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

# Names of the C++ code (.clang-tidy has the rules). Preset lint has no precompiled headers, because clang-tidy cannot
# read those of GCC. Files that are compiled together are read as one: most of the time goes into the headers they
# share.
tidy() { # base commit, or nothing for all files
  cmake --preset lint --log-level=WARNING >/dev/null || return 1
  scripts/changed_units.py build/lint/compile_commands.json "$@" |
    xargs --no-run-if-empty -P "$jobs" -n 1 clang-tidy --quiet -p build/lint \
      2> >(grep -vE '^[0-9]+ warnings? .*(generated|treated)' >&2)
}

# Code that has changed since commit $FERRY_LINT_BASE, or else within the day before the last commit.
check_names() {
  local base=${FERRY_LINT_BASE-}
  if [[ -z $base ]]; then base=$(git rev-list -1 --before=$(($(git log -1 --format=%ct) - 86400)) HEAD); fi
  tidy ${base:+"$base"}
}

check_all_names() {
  tidy
}

# Comments and documents are plain English: CONTRIBUTING.md, Style.
check_prose() {
  local refused=0
  check_comments || refused=1
  check_documents || refused=1
  return $refused
}

# Functions of awk that both checks use.
# shellcheck disable=SC2016 # awk expands $0
readonly prose_rules='
  function refuse(rule) {
    printf "%s:%d: %s\n  %s\n", FILENAME, FNR, rule, $0
    refused = 1
  }
  function refuse_persons() {
    if (tolower($0) ~ /(^|[^a-z])(no|any)body([^a-z]|$)/) {
      refuse("a person where there is none: name the rank, thread or block")
    }
  }'

check_comments() {
  # shellcheck disable=SC2016 # awk expands $0
  project_files '*.cpp' '*.hpp' '*.c' '*.h' '*.cu' '*.cuh' '*.py' '*.pyi' '*.sh' '*.cmake' '*CMakeLists.txt' |
    LC_ALL=C.UTF-8 xargs awk "$prose_rules"'
      FNR == 1 { commented = 0 }
      /(\/\/[\/!]?<?|#) *Of[ ,]/ { refuse("a comment that begins with \"Of\": begin with a noun or a verb") }
      { refuse_persons() }
      /\/\/[\/!]<? *What / && commented { refuse("a description that begins with \"What\": begin with a noun or a verb") }
      /\/\// { commented = 1 } # the first comment describes the file
      END { exit refused }'
}

# Text of documents, without code. Headings and questions may begin with "What".
check_documents() {
  # shellcheck disable=SC2016 # awk expands $0
  project_files '*.md' |
    LC_ALL=C.UTF-8 xargs awk "$prose_rules"'
      FNR == 1 { in_code = 0; begins = 1 }
      /^ *```/ { in_code = !in_code; begins = 1; next }
      in_code { next }
      /^ *$/ { begins = 1; next }
      {
        is_item = $0 ~ /^ *([-*]|[0-9]+\.) /
        text = $0
        gsub(/^ *([-*]|[0-9]+\.)? *\**/, "", text)
        if (begins || is_item) {
          if (text ~ /^Of[ ,]/) refuse("a paragraph that begins with \"Of\": begin with a noun or a verb")
          if (text ~ /^What / && text !~ /\?/) refuse("a paragraph that begins with \"What\": begin with a noun or a verb")
        }
        gsub(/`[^`]*`/, "")
        refuse_persons()
        begins = 0
      }
      END { exit refused }'
}

check_shell() {
  { project_files '*.sh'; echo .ci/run; } | xargs shellcheck
}

# Relative links in the documents lead to files and headings that exist.
check_links() {
  project_files '*.md' | xargs scripts/check_links.py
}

# Tables of the documents are those of the recorded results.
check_tables() {
  benchmarks/tables.py --check
}

# Another version of ruff would find other things, so its number is fixed; Debian has no package of it.
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
    if ((${#parts[@]} == 0)); then parts=(format prose shell links tables python names); fi
    for part in "${parts[@]}"; do
      if [[ $(type -t "check_$part") != function ]]; then
        printf 'lint: no part "%s": format, prose, shell, links, tables, python, names, all_names\n' "$part" >&2
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
