#!/usr/bin/env bash
# Builds README, docs/ and the references of C++, C and Python as a static site. See usage().
set -euo pipefail
export LC_ALL=C.UTF-8

usage() {
  cat <<'TEXT'
usage: tools/lab/site.sh OUT

Writes the site to the directory OUT, of which all that it does not write is removed if it is a site already; another
directory that is not empty is refused. Begin with OUT/index.html; the search works where a web server gives the pages
out, as in `python3 -m http.server --directory OUT`. Needs what tools/python_env.sh makes, and no network.
A broken link, a missing page or one that no menu has is an error.
Exit codes: 0 ok, 1 the pages are at fault, 2 wrong usage, or something is missing.
TEXT
}

fail() {
  printf 'site: error: %s\n' "$*" >&2
  exit 2
}

main() {
  case "${1:-}" in
    -h | --help) usage; exit 0 ;;
    "" | -*) fail "name the directory that the site is written to; see --help" ;;
  esac
  [[ $# -eq 1 ]] || fail "one directory, and no more; see --help"
  local root out base="${XDG_CACHE_HOME:-$HOME/.cache}/sluice"
  root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
  out=$(realpath -m "$1")
  # MkDocs empties the directory.
  if [[ -e "$out" && ! -e "$out/objects.inv" && -n "$(ls -A "$out")" ]]; then
    fail "$out has something else in it; name a new directory"
  fi
  local needed='import material, mkdocs, mkdocstrings_handlers.python'
  PYTHONPATH="$base/site" "$base/venv/bin/python" -c "$needed" 2>/dev/null ||
    fail "MkDocs is not in $base/site; once, with the network: tools/python_env.sh"
  # In the same words in every terminal, and without advertisements.
  NO_COLOR=1 NO_MKDOCS_2_WARNING=1 PYTHONDONTWRITEBYTECODE=1 PYTHONPATH="$base/site" "$base/venv/bin/python" -m mkdocs \
    build --strict --config-file "$root/tools/lab/site/mkdocs.yml" --site-dir "$out"
}

main "$@"
