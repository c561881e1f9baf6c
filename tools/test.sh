#!/usr/bin/env bash
# Builds everything and runs the tests; arguments go to ctest, as in `tools/test.sh -L concurrent`.
# ctest's summary comes last. Exit codes: 0 all passed; else as tools/bootstrap.sh or ctest.
set -euo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")/.."
tools/bootstrap.sh --preset release
exec ctest --preset release --parallel "$(nproc)" --no-tests=error "$@"
