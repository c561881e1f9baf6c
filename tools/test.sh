#!/usr/bin/env bash
# Builds and runs tests. See usage().
set -euo pipefail

usage() {
  cat <<'TEXT'
usage: tools/test.sh [--all | --nightly] [ARGUMENT...]

Builds the library and the tests labelled `quick`, some of every room that take seconds, and runs them: minutes on two
cores.
  --all        builds everything and runs all tests but those labelled `nightly`, see CONTRIBUTING.md
  --nightly    these, too
  ARGUMENT...  of ctest, as in `tools/test.sh -L concurrent`: builds everything, and runs what they choose. Tests
               labelled `nightly` run only if the arguments name that label
ctest's summary comes last, and below it how many tests were skipped, by reason: those of the GPU where there is none.
Exit codes: 0 none failed; else as tools/bootstrap.sh or ctest.
TEXT
}

cd "$(dirname "${BASH_SOURCE[0]}")/.."
case ${1:-} in
  -h | --help) usage; exit 0 ;;
  "") targets=(--target quick_tests) chosen=(-L quick) ;;
  *)
    targets=() chosen=(-LE nightly)
    if [[ " $* " == *nightly* ]]; then chosen=(); fi
    if [[ "$1" == --all || "$1" == --nightly ]]; then shift; fi
    ;;
esac
tools/bootstrap.sh --preset release ${targets[@]+"${targets[@]}"}
code=0
ctest --preset release --parallel "$(nproc)" --no-tests=error ${chosen[@]+"${chosen[@]}"} "$@" || code=$?
# What the skipped tests printed; absent if ctest did not get as far as running any.
log=build/release/Testing/Temporary/LastTest.log
if [[ -r "$log" ]]; then
  sed -n 's/^skipped: //p' "$log" | sort | uniq -c | while read -r count reason; do
    printf 'test: %s tests skipped: %s\n' "$count" "$reason"
  done
fi
exit "$code"
