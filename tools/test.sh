#!/usr/bin/env bash
# Builds everything and runs the tests; arguments go to ctest, as in `tools/test.sh -L concurrent`. Tests labelled `slow`
# take minutes each and run only if the arguments name that label.
# ctest's summary comes last, and below it how many tests were skipped, by reason: those of the GPU where there is none.
# Exit codes: 0 none failed; else as tools/bootstrap.sh or ctest.
set -euo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")/.."
tools/bootstrap.sh --preset release
code=0
exclude=(-LE '^slow$')
if [[ " $* " == *" slow "* ]]; then exclude=(); fi
ctest --preset release --parallel "$(nproc)" --no-tests=error ${exclude[@]+"${exclude[@]}"} "$@" || code=$?
# What the skipped tests printed; absent if ctest did not get as far as running any.
log=build/release/Testing/Temporary/LastTest.log
if [[ -r "$log" ]]; then
  sed -n 's/^skipped: //p' "$log" | sort | uniq -c | while read -r count reason; do
    printf 'test: %s tests skipped: %s\n' "$count" "$reason"
  done
fi
exit "$code"
