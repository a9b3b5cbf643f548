#!/usr/bin/env bash
# Builds the documentation site into build/docs/html/VERSION: scripts/docs.sh [--install | --build]
# --install  only installs the packages of docs/requirements.txt into build/docs-venv; --build  only builds the site
# Any warning of Doxygen or of Sphinx ends it with an error. Nothing of the library is compiled.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

readonly environment=build/docs-venv
install=yes build=yes
case ${1-} in
  --install) build=no ;;
  --build) install=no ;;
  '') ;;
  *) printf 'usage: scripts/docs.sh [--install | --build]\n' >&2 && exit 2 ;;
esac

fail() {
  printf 'docs: %s\n' "$*" >&2
  exit 1
}

# Written last, so that an installation that was interrupted, or made for other requirements, is repeated.
readonly installed=$environment/installed.txt
if [[ $install == yes ]] && ! cmp -s docs/requirements.txt "$installed"; then
  rm -rf "$environment"
  python3 -m venv "$environment" ||
    fail "python3 -m venv failed; Debian and Ubuntu have it in the package python3-venv"
  "$environment/bin/python" -m pip install -qq --requirement docs/requirements.txt ||
    fail "pip could not install docs/requirements.txt"
  cp docs/requirements.txt "$installed"
fi
if [[ $build == no ]]; then exit 0; fi

scripts/pictures.py --check || fail "the pictures are out of date: run scripts/pictures.py"
version=$(<VERSION)
readonly html=build/docs/html/$version headers=build/docs/include
# Pages of files that no longer exist would stay.
rm -rf build/docs/doxygen "$headers" "$html"
mkdir -p "$headers/ferry" build/docs/html

# CMake writes this header when the library is built.
IFS=. read -r major minor patch <<<"$version"
sed -e "s/@PROJECT_VERSION_MAJOR@/$major/; s/@PROJECT_VERSION_MINOR@/$minor/; s/@PROJECT_VERSION_PATCH@/$patch/" \
  -e "s/@PROJECT_VERSION@/$version/" include/ferry/version.hpp.in >"$headers/ferry/version.hpp"

doxygen docs/Doxyfile || fail "Doxygen has warned: see above"
# Doxygen writes private members whatever its settings are.
sed -i '/<sectiondef kind="private-/,/<\/sectiondef>/d' build/docs/doxygen/xml/*.xml
"$environment/bin/sphinx-build" --fail-on-warning --keep-going --fresh-env --quiet --doctree-dir build/docs/doctrees \
  docs "$html" || fail "Sphinx has warned: see above"
printf 'docs: open %s\n' "$PWD/$html/index.html"
