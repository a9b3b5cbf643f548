#!/usr/bin/env bash
# Checks that libferry.so exports only the public interface: check_symbols.sh libferry.so include/ferry
set -euo pipefail

symbols=$(nm --dynamic --defined-only --demangle "$1" | sed -E 's/^[0-9a-f]* [A-Za-z] //')

# Exported names are directly in ferry::, or are the type information and vtables of its classes. Lower-case namespaces
# inside are private.
foreign=$(grep -vE '^ferry_[a-z0-9_]+$|^((typeinfo|typeinfo name|vtable) for )?ferry::(\(|[A-Za-z_0-9:~<>]+)' <<<"$symbols" || true)
private=$(grep -E '(^|for )ferry::([a-z][a-z0-9_]*|\(anonymous namespace\))::' <<<"$symbols" || true)
if [[ -n $foreign$private ]]; then
  printf '%s exports symbols outside its public interface:\n%s\n%s\n' "$1" "$foreign" "$private"
  exit 1
fi

for name in 'ferry::version()' 'ferry::Group::create(' 'ferry::Group::dispatch(' 'typeinfo for ferry::Bootstrap'; do
  if ! grep -qF "$name" <<<"$symbols"; then
    printf '%s does not export %s\n' "$1" "$name"
    exit 1
  fi
done
# Exported C functions are exactly those that the headers declare.
declared=$(cat "$2"/*.h | grep -oE '^FERRY_C_API [^(]*' | grep -oE 'ferry_[a-z0-9_]+$' | sort)
if ! difference=$(diff <(printf '%s\n' "$declared") <(grep -E '^ferry_[a-z0-9_]+$' <<<"$symbols" | sort)); then
  printf '%s and the headers of the C interface differ (< declared, > exported):\n%s\n' "$1" "$difference"
  exit 1
fi
printf '%s exports %d symbols, all of the public interface\n' "$1" "$(wc -l <<<"$symbols")"
