#!/bin/sh
# The comparison of record: measures, and makes the tables of docs/benchmarks.md's comparisons.
set -eu

usage() {
  cat <<'END'
usage: tools/lab/record.sh DIR [host|cuda[:N]] [option...]     all parts, then tables.md from them
       tools/lab/record.sh DIR --merge [option...]             tables.md from the parts that DIR holds
       tools/lab/record.sh --list [host|cuda[:N]]              the parts
  --part N       only part N, a number or a name of the list, which leaves NAME.json in DIR, and in NAME.seconds what it took;
                 no tables
  --sluice PATH  the command, else $SLUICE, else build/release/tools/cli/sluice
A part is meant to take at most 7 minutes on an H200 with 16 cores, and tables name those that took longer; without a GPU it may
take an hour.
Smaller runs, to try it out (with their defaults; lists of words are parts of their own):
RECORD_THREADS="1 16" (1 2 without a GPU) RECORD_THREADS_LENGTH=128K RECORD_CORE_LENGTHS=4K,8K,16K,32K,64K,128K
RECORD_MEMORY="8G 16G 32G 64G" (64G needs more than 80 GB) RECORD_ABLATION_LENGTHS=32K,128K (8K without a GPU)
RECORD_PLAN_LENGTHS=4K,16K,64K,128K (1K,4K without a GPU) RECORD_PLAN_LAYERS=32 (4) RECORD_PREFILL_LAYER=4K,...
RECORD_PATTERN_LENGTHS=128K (8K without a GPU) RECORD_FLEX_LENGTH=128K (8K without a GPU)
RECORD_CLUSTER_LENGTHS=32K,64K,128K (2K,8K without a GPU) RECORD_PROMPT_TOKENS=32700
RECORD_SERVE="--random-weights llama-3.1-8b --kv-size 4G ..." (see speed.sh; a tiny model without a GPU)
RECORD_PYTHON=python3 (models of transformers are parts where it has the package, torch and a GPU; compare-* measures what attention
kernels it has)
Models that others have trained, of which real-* are parts: RECORD_REAL="NAME=DIR ..." RECORD_REAL_TASKS="NAME=FILE ..."
(real.sh says which).
END
}

fail() {
  echo "record.sh: error: $1" >&2
  exit "${2:-2}"
}

root=$(cd "$(dirname "$0")/../.." && pwd)
out='' device='' part='' action=all
sluice=${SLUICE:-$root/build/release/tools/cli/sluice}
while [ $# -gt 0 ]; do
  case $1 in
    --part | --sluice)
      [ $# -ge 2 ] || fail "$1 needs a value; see --help"
      case $1 in
        --part) part=$2 action=part ;;
        --sluice) sluice=$2 ;;
      esac
      shift
      ;;
    --merge) action=merge ;;
    --list) action=list ;;
    -h | --help) usage && exit 0 ;;
    -*) fail "unknown option '$1'; see --help" ;;
    host | cuda | cuda:*) device=$1 ;;
    *)
      [ -z "$out" ] || fail "'$1' is no device; have host, cuda, cuda:N"
      out=$1
      ;;
  esac
  shift
done
# Names of parts depend on the device; a record of a host alone says `host` when it is merged, too.
case $action in
  merge | list) device=${device:-cuda} ;;
  *) device=${device:-host} ;;
esac

# shellcheck disable=SC2034 # Files of ideas read it.
python=${RECORD_PYTHON:-python3}

# Each idea has a file with its parts, IDEA_parts, a name a line, and with what measures one of them, measure_IDEA.
ideas='prompts speed decode compare models real'
for idea in $ideas; do
  # shellcheck disable=SC1090 # Named above.
  . "$root/tools/lab/record/$idea.sh"
done

# Every part with its idea, a line each, in the order in which tables show them. A part's name is also that of its file.
catalogue=$(for idea in $ideas; do "${idea}_parts" | sed "s/\$/ $idea/"; done)
parts() {
  echo "$catalogue" | sed 's/ .*//'
}

# skip NAME WHY: of a part that this machine cannot measure, which is no reason to stop.
skip() {
  skipped=yes
  echo "record.sh: $1 is skipped: $2" >&2
}

# measure NAME: what it took is left beside its results, in NAME.seconds.
measure() {
  rm -f "$out/$1.seconds"
  idea=$(echo "$catalogue" | awk -v wanted="$1" '$1 == wanted { print $2; exit }')
  skipped='' began=$(date +%s)
  "measure_$idea" "$1"
  [ -z "$skipped" ] || return 0
  seconds=$(($(date +%s) - began))
  echo "$seconds" >"$out/$1.seconds"
  echo "record.sh: $1 took $seconds s" >&2
}

# Number or name to name.
part_name() {
  parts | awk -v wanted="$1" '$0 == wanted || NR == wanted { print; exit }'
}

merge() {
  # shellcheck disable=SC2046 # Names have no blanks.
  python3 "$root/tools/lab/record/tables.py" "$out" $(parts) >"$out/tables.md.new" || return
  mv "$out/tables.md.new" "$out/tables.md"
  cat "$out/tables.md"
}

if [ "$action" = list ]; then
  parts | awk '{ print NR, $0 }'
  exit 0
fi
[ -n "$out" ] || { usage >&2 && exit 2; }
[ "$action" = merge ] || [ -x "$sluice" ] || fail "'$sluice' is missing; run tools/test.sh first, or give --sluice PATH" 1
mkdir -p "$out"
case $action in
  part)
    name=$(part_name "$part")
    [ -n "$name" ] || fail "there is no part '$part'; see --list"
    measure "$name"
    ;;
  all)
    for name in $(parts); do
      echo "record.sh: $name" >&2
      measure "$name"
    done
    merge
    ;;
  merge) merge ;;
esac
