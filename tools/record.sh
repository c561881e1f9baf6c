#!/bin/sh
# The comparison of record: measures, and makes the tables and the plot of docs/benchmarks.md's comparisons.
set -eu

usage() {
  cat <<'END'
usage: tools/record.sh DIR [host|cuda[:N]] [option...]     all parts, then tables.md and accuracy.svg from them
       tools/record.sh DIR --merge [option...]             tables.md and accuracy.svg from the parts that DIR holds
       tools/record.sh --list [host|cuda[:N]]              the parts
  --part N       only part N, a number or a name of the list, which leaves NAME.json in DIR; no tables
  --sluice PATH  the command, else $SLUICE, else build/release/tools/cli/sluice
  --model DIR    the model, else $MODEL, else tests/data/testbed
A part takes at most 7 minutes on an H200 with 16 cores; without a GPU it may take an hour.
Smaller runs, to try it out: RECORD_SHORT=2K,8K RECORD_LONG=32000 RECORD_COUNT=8 RECORD_POLICIES=...
RECORD_SWEEP_LENGTH=8192 RECORD_SWEEP_COUNT=4 RECORD_TEXT_LENGTHS="8K 32K" RECORD_TEXT_TOKENS=257 RECORD_TEXTS=4
RECORD_NEEDLE_TOKENS=128K RECORD_NEEDLE_STEPS=8
RECORD_LAYER_LENGTHS="32K 128K" RECORD_LAYER_STEPS=12 RECORD_PREFILL_LENGTHS="2K,8K 16K 32000" RECORD_PREFILL_LAYER=4K,...
RECORD_ABLATION_LENGTHS=32K,128K (8K without a GPU) RECORD_CORE_LENGTHS=4K,8K,16K,32K,64K,128K RECORD_PLAN_LENGTHS=4K,16K,64K,128K (1K,4K without a GPU) RECORD_PLAN_LAYERS=32 (4)
RECORD_PATTERN_LENGTHS=128K (8K without a GPU)
RECORD_PYTHON=python3 (figures of the papers are parts where it has torch, transformers and matplotlib, models of transformers
where it has the package, too, and torch a GPU)
RECORD_FIGURES="--count 2 --steps 24" RECORD_PAIRS=32 RECORD_FLEX_LENGTH=128K (8K without a GPU)
RECORD_CLUSTER_LENGTHS=32K,64K,128K (2K,8K without a GPU) RECORD_PROMPT_TOKENS=32700
RECORD_SERVE="--random-weights llama-3.1-8b --kv-size 4G ..." (see the script; a tiny model without a GPU)
(here with their defaults; lists of words are parts of their own).
END
}

fail() {
  echo "record.sh: error: $1" >&2
  exit "${2:-2}"
}

root=$(cd "$(dirname "$0")/.." && pwd)
out= device= part= action=all
sluice=${SLUICE:-$root/build/release/tools/cli/sluice}
model=${MODEL:-$root/tests/data/testbed}
while [ $# -gt 0 ]; do
  case $1 in
    --part | --sluice | --model)
      [ $# -ge 2 ] || fail "$1 needs a value; see --help"
      case $1 in
        --part) part=$2 action=part ;;
        --sluice) sluice=$2 ;;
        --model) model=$2 ;;
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

# The presets, and compositions that nobody published.
presets='full;topk;streaming;quest;arkvale;psa;twilight;tactic;magicpig;lfps;sluice'
presets="$presets;clusters:candidates=1024 | int4 | top_k=max(64, 1%)"
presets="$presets;lsh | int4 | top_k=max(64, 1%)"
presets="$presets;pages:quest,budget=3072 | int4 | top_p=0.8"
policies=${RECORD_POLICIES:-$presets}

# How far stop rules and fits keep what they promise, and what equal coverage costs.
sweep='arkvale:budget=512;arkvale:budget=1024;arkvale:budget=2048;arkvale:budget=3072;arkvale:budget=4096'
sweep="$sweep;psa:mass=0.9;psa;psa:mass=0.98;psa:rule=mean;psa:rule=median"
sweep="$sweep;tactic:mass=0.5;tactic:mass=0.6;tactic:mass=0.7;tactic:mass=0.8;tactic"
sweep="$sweep;pages:quest,budget=8192 | top_k=all | near=0%,sinks=4,recent=0 | dense=2 | page=16;twilight;twilight:mass=0.85"

# Baselines that came later: against dense attention and the default in parts of their own.
later='full;sluice;double_sparsity;adamas;vattention;snapkv;adakv;pyramidkv'
[ "$device" = host ] && later="$later;infinigen"  # A model on a GPU rehearses no queries.
later=${RECORD_POLICIES:-$later}

# LFPS: thresholds of its tables, and of its bypass where heads have sinks.
alphas='lfps:alpha=0.1;lfps:alpha=0.2;lfps:alpha=0.3;lfps:alpha=0.4'
bypasses='lfps | bypass=off;lfps | bypass=sink:0.95;lfps | bypass=sink:0.9;lfps;lfps | bypass=sink:0.8'
bypasses="$bypasses;lfps | bypass=sink:0.75;lfps | bypass=sink:0.7"
# What its tables, its expansion and its bypass earn, on real attention.
ablation='lfps;lfps:expand=off;lfps:tables=vertical;lfps:tables=slash;lfps:tables=vertical,expand=off'
ablation="$ablation;lfps:tables=slash,expand=off;lfps | bypass=off;sluice;history | int4 | top_k=max(64, 1%)"
ablation="$ablation;history+pages | int4 | top_k=max(64, 1%);pages | int4 | top_k=max(64, 1%)"
targets='tactic:mass=0.5;tactic:mass=0.6;tactic:mass=0.7;tactic:mass=0.8;tactic'
answers='full;quest;tactic;tactic:mass=0.8;tactic:mass=0.7;tactic:mass=0.5;twilight;twilight:mass=0.85'
reading='full;sluice;twilight;tactic;quest;psa;lfps;streaming'
# Twilight: by keys and by copies of 4 bits, without a selector before; and which of the best copies find.
always='near=0%,sinks=4,recent=0 | dense=2'
estimates="exact | top_p=0.85 | $always;exact | int4 | top_p=0.85 | $always;exact | top_p=0.95 | $always"
estimates="$estimates;exact | int4 | top_p=0.95 | $always;exact | top_k=128 | $always;exact | int4 | top_k=128 | $always"
estimates="$estimates;exact | hadamard | top_k=128 | $always;exact | channels=16 | top_k=128 | $always"
chunks='1024 2048 4096 8192'
# Prompts by other papers: StreamingLLM and MInference with about as many blocks as FlexPrefill computes at gamma 0.9 of a prompt of
# 8K tokens, and with their own sizes, which are for longer ones.
others='streaming@512+1024,minference@vertical_slash:1280+1280,minference@block_sparse:1280'
others="$others,minference@best:1280+1280+512+1024+1280"
papers_own='streaming@1024+8192,minference,minference@block_sparse,minference@best'
# Tasks whose answers are held against those of dense attention, and near memory of a recall cache, percent.
paired='kv multi table near_keys turns count long_copy'
rooms='0 10 20 30 40 60'

core_lengths=${RECORD_CORE_LENGTHS:-4K,8K,16K,32K,64K,128K}

layer_lengths=${RECORD_LAYER_LENGTHS:-32K 128K}
if [ "$device" = host ]; then
  prefill_lengths=${RECORD_PREFILL_LENGTHS:-2K,8K}
  plan_lengths=${RECORD_PLAN_LENGTHS:-1K,4K} plan_layers=${RECORD_PLAN_LAYERS:-4} plan_short=2K
  flex_length=${RECORD_FLEX_LENGTH:-8K} most='1024 2048 4096' patterns="$others"
  cluster_lengths=${RECORD_CLUSTER_LENGTHS:-2K,8K}
  ablation_lengths=${RECORD_ABLATION_LENGTHS:-8K} ablation_layers=4
  serve="--random-weights tiny --threads 2 --kv-size 4M --host-size 12M --prompt 800 --answer 32 --batch 16
    --prefill-chunk 256 --rates 5,10,20,30,40,60,80 --seconds 6 --tbt-limit 100 --queue-limit 0.5"
else
  prefill_lengths=${RECORD_PREFILL_LENGTHS:-2K,8K 16K 32000}
  plan_lengths=${RECORD_PLAN_LENGTHS:-4K,16K,64K,128K} plan_layers=${RECORD_PLAN_LAYERS:-32} plan_short=32K
  flex_length=${RECORD_FLEX_LENGTH:-128K} most='8192 16384 32768' patterns="$papers_own"
  cluster_lengths=${RECORD_CLUSTER_LENGTHS:-32K,64K,128K}
  ablation_lengths=${RECORD_ABLATION_LENGTHS:-32K,128K} ablation_layers=8
  serve="--random-weights llama-3.1-8b --kv-size 4G --host-size 12G --prompt 8K --answer 128 --batch 16
    --prefill-chunk 1K --rates 0.5,1,1.5,2,2.5,3,4 --seconds 7 --tbt-limit 100 --queue-limit 2"
fi
serve=${RECORD_SERVE:-$serve}

. "$root/tools/record/speed.sh"
. "$root/tools/record/models.sh"

# What parts take with a GPU is at most 7 minutes by what they were split by, none newly timed: tasks-*-short is 224 answers of 14 policies. By that
# paired-* (128 answers) takes 4 minutes, more of long_copy, whose answers have hundreds of bytes; dtype-* (192) 6; question-seen (16 for each of
# 8 policies) 4; recall-* and psa-* under 1; flex-* a half each, as prefill-layer-* has longer prompts. Others: record/speed.sh, record/models.sh.

# One name a line, in the order in which tables show them. A name is also that of the part's file.
parts() {
  for task in niah multikey kv; do
    echo "tasks-$task-short"
    echo "tasks-$task-long"
  done
  echo sweep
  echo needles-1
  echo needles-16
  if [ "$device" != host ]; then
    for length in $layer_lengths; do echo "layers-16-$length"; done
  fi
  for lengths in $prefill_lengths; do echo "prefill-tasks-$lengths"; done
  for lengths in $prefill_lengths; do echo "prefill-others-$lengths"; done
  echo prefill-papers
  echo prefill-text
  for structure in vertical_slash query_aware uniform; do echo "prefill-layer-$structure"; done
  for structure in vertical_slash query_aware; do echo "prefill-patterns-$structure"; done
  for size in $chunks; do echo "prefill-chunk-$size"; done
  # Query blocks do not choose together on a GPU.
  [ "$device" != host ] || for way in row chunk; do echo "prefill-by-$way"; done
  for gammas in low high; do echo "flex-gamma-$gammas"; done
  for budget in 128 1024 2048; do echo "flex-budget-$budget"; done
  for budget in $most; do echo "flex-most-$budget"; done
  for tau in 0 0.1 0.2 0.3; do echo "flex-tau-$tau"; done
  for task in niah multikey kv; do echo "later-$task"; done
  echo question-seen
  for task in $paired; do echo "paired-$task"; done
  for type in bf16 fp8_e4m3; do echo "dtype-$type"; done
  for room in $rooms; do echo "recall-$room"; done
  for placement in hybrid stream; do echo "psa-$placement"; done
  echo history
  echo tactic
  echo targets
  echo estimates
  for length in ${RECORD_TEXT_LENGTHS:-8K 32K}; do echo "text-$length"; done
  for what in together apart alpha bypass; do echo "core-$what"; done
  speed_parts
  models_parts
  if draws; then
    for figure in pages tokens recall heads blocks sparse bits codes tactic selectors; do echo "figure-$figure"; done
  fi
}

# Whether there is a Python that draws the papers' figures.
python=${RECORD_PYTHON:-python3}
draws() {
  "$python" -c 'import importlib.util as util, sys
sys.exit(any(util.find_spec(name) is None for name in ("torch", "transformers", "matplotlib")))' 2>/dev/null
}

# eval_tasks NAME TASKS LENGTHS COUNT AUDIT POLICIES [option...]
eval_tasks() {
  name=$1 tasks=$2 lengths=$3 count=$4 audit=$5 named=$6
  shift 6
  "$sluice" eval --model "$model" --device "$device" --tasks "$tasks" --lengths "$lengths" --count "$count" \
    --audit "$audit" --policies "$named" "$@" -o json --output "$out/$name.json"
}

# by_query_blocks NAME [option...]: heads that are all query-aware.
by_query_blocks() {
  name=$1
  shift
  eval_tasks "$name" niah,kv "$sweep_length" "$count" 0 full --tau 1 --min-budget 128 \
    --prefill flexprefill@0.7,flexprefill@0.9,flexprefill@0.95 "$@"
}

# flex NAME [option...]: FlexPrefill on one layer of a prompt.
flex() {
  name=$1
  shift
  "$sluice" bench prefill --device "$device" --length "$flex_length" --repeat 1 "$@" -o json --output "$out/$name.json"
}

measure() {
  short=${RECORD_SHORT:-2K,8K}
  count=${RECORD_COUNT:-8}
  sweep_length=${RECORD_SWEEP_LENGTH:-8192}
  rest=${1#*-}
  case $1 in
    tasks-*-short) eval_tasks "$1" "${rest%-short}" "$short" "$count" 8 "$policies" ;;
    tasks-*-long) eval_tasks "$1" "${rest%-long}" "${RECORD_LONG:-32000}" "$count" 8 "$policies" ;;
    sweep) eval_tasks "$1" niah,kv "$sweep_length" "${RECORD_SWEEP_COUNT:-4}" 4 "${RECORD_POLICIES:-$sweep}" ;;
    needles-*)
      "$sluice" eval --tasks "" --needles "$rest" --needle-tokens "${RECORD_NEEDLE_TOKENS:-128K}" \
        --needle-steps "${RECORD_NEEDLE_STEPS:-8}" --device "$device" --policies "$policies" \
        -o json --output "$out/$1.json"
      ;;
    layers-*)
      "$sluice" bench gpu --device "$device" --sections attention --length "${rest#*-}" --placements hybrid,stream \
        --layers 2 --steps "${RECORD_LAYER_STEPS:-12}" --policies "$policies" \
        -o json --output "$out/$1.json"
      ;;
    # Ways to prefill: what answers cost and whether they stay right, under dense and under sparse decoding.
    prefill-tasks-*)
      eval_tasks "$1" niah,multikey,kv "${rest#tasks-}" "$count" 0 full,sluice \
        --prefill full,flexprefill@0.9,flexprefill@0.95,auto
      ;;
    # Baselines of FlexPrefill: which blocks others keep, what that costs, and whether answers stay right.
    prefill-others-*)
      eval_tasks "$1" niah,multikey,kv "${rest#others-}" "$count" 0 full --prefill "full,flexprefill@0.9,$others"
      ;;
    prefill-papers)
      eval_tasks "$1" niah,multikey,kv "${RECORD_LONG:-32000}" "$count" 0 full --prefill "full,flexprefill@0.95,$papers_own"
      ;;
    # Answers after dense decoding hardly tell ways to prefill apart: how well the rest of a text is foreseen.
    prefill-text)
      cat "$root"/docs/*.md >"$out/text.txt"
      eval_tasks "$1" "" "$short" "${RECORD_TEXTS:-4}" 0 full --prefill "full,flexprefill@0.9,flexprefill@0.95,$others,$papers_own" \
        --text "$out/text.txt" --text-lengths "${RECORD_PREFILL_TEXT:-8K}" --text-tokens 129
      ;;
    prefill-patterns-*)
      "$sluice" bench prefill --device "$device" --length "${RECORD_PATTERN_LENGTHS:-$flex_length}" --repeat 3 \
        --structures "${rest#patterns-}" --gammas 0.9,0.95 --others "$patterns" -o json --output "$out/$1.json"
      ;;
    prefill-layer-*)
      "$sluice" bench prefill --device "$device" --structures "${rest#layer-}" \
        ${RECORD_PREFILL_LAYER:+--length "$RECORD_PREFILL_LAYER"} -o json --output "$out/$1.json"
      ;;
    # FlexPrefill: queries that stand for those of a whole prompt or of a chunk, and query blocks that choose for
    # themselves or together.
    prefill-chunk-*)
      eval_tasks "$1" niah,kv "$sweep_length" "$count" 0 full --prefill flexprefill@0.95 \
        --prefill-chunk "${rest#chunk-}"
      ;;
    prefill-by-row) by_query_blocks "$1" ;;
    prefill-by-chunk) by_query_blocks "$1" --flattened ;;
    history) eval_tasks "$1" niah,kv "$short" "$count" 4 "${RECORD_POLICIES:-$ablation}" ;;
    tactic) eval_tasks "$1" niah,kv "$sweep_length" 2 1 "${RECORD_POLICIES:-$targets}" ;;
    targets) eval_tasks "$1" kv "${short%%,*}" "${RECORD_PAIRS:-32}" 4 "${RECORD_POLICIES:-$answers}" ;;
    estimates) eval_tasks "$1" niah,kv "$sweep_length" "${RECORD_SWEEP_COUNT:-4}" 4 "${RECORD_POLICIES:-$estimates}" ;;
    text-*)
      cat "$root"/docs/*.md >"$out/text.txt"
      eval_tasks "$1" "" "$short" "${RECORD_TEXTS:-4}" 8 "${RECORD_POLICIES:-$reading}" --text "$out/text.txt" \
        --text-lengths "$rest" --text-tokens "${RECORD_TEXT_TOKENS:-257}"
      ;;
    flex-gamma-low) flex "$1" --structures vertical_slash,query_aware --gammas 0.7,0.8,0.85 ;;
    flex-gamma-high) flex "$1" --structures vertical_slash,query_aware --gammas 0.9,0.95,0.97 ;;
    flex-budget-*) flex "$1" --structures vertical_slash --gammas 0.9 --min-budget "${rest#budget-}" ;;
    flex-most-*) flex "$1" --structures query_aware,uniform --gammas 0.95 --max-budget "${rest#most-}" ;;
    flex-tau-*) flex "$1" --structures query_aware --gammas 0.95 --tau "${rest#tau-}" ;;
    question-seen) eval_tasks "$1" kv "$short" "$count" 8 "$later" --decode-prompt 1 ;;
    paired-*)
      eval_tasks "$1" "$rest" "$short" "${RECORD_PAIRS:-32}" 0 "full;sluice" --paired --far 2048 \
        --far-shape llama-3.1-8b
      ;;
    dtype-*) eval_tasks "$1" niah,multikey,kv "$short" "$count" 8 "full;sluice;lfps;topk" --kv-dtype "$rest" ;;
    recall-*) eval_tasks "$1" niah,kv "$sweep_length" 1 1 "arkvale:dense=0;psa" --placement stream --near "$rest%" ;;
    psa-*) eval_tasks "$1" kv "${short%%,*}" 4 1 psa --placement "$rest" ;;
    later-*) eval_tasks "$1" "$rest" "$short" "$count" 8 "$later" ;;
    core-together) core "$1" "$core_lengths" "topk;lfps" ;;
    # As LFPS is defined: no query heads that share keys.
    core-apart) core "$1" "$core_lengths" "topk;lfps" --q-heads 8 --kv-heads 8 ;;
    core-alpha) core "$1" "$core_lengths" "$alphas" ;;
    core-bypass)
      core "$1" "${core_lengths%%,*}" "$bypasses" --pattern uniform --sinks 0.5,0.72,0.78,0.83,0.88,0.92,0.97,0.99
      ;;
    # What the model's attention is like, with a picture beside.
    figure-*)
      # shellcheck disable=SC2086 # Options.
      "$python" "$root/python/benchmarks/paper_figures.py" "${1#figure-}" --model "$model" \
        ${RECORD_FIGURES:---count 2 --steps 24} --svg "$out/$1.svg" >"$out/$1.json.new"
      mv "$out/$1.json.new" "$out/$1.json"
      ;;
    model-*) measure_model "$1" ;;
    *) measure_speed "$1" ;;
  esac
}

# Number or name to name.
part_name() {
  parts | awk -v wanted="$1" '$0 == wanted || NR == wanted { print; exit }'
}

merge() {
  # shellcheck disable=SC2046 # Names have no blanks.
  python3 "$root/tools/record/tables.py" "$out" $(parts) >"$out/tables.md.new" || return
  mv "$out/tables.md.new" "$out/tables.md"
  cat "$out/tables.md"
  set --
  for name in $(parts); do
    case $name in tasks-* | later-*) [ ! -f "$out/$name.json" ] || set -- "$@" "$out/$name.json" ;; esac
  done
  [ $# -gt 0 ] || return 0
  if [ -x "$sluice" ]; then
    "$sluice" plot --output "$out/accuracy.svg" "$@"
  else
    echo "record.sh: accuracy.svg is not drawn: '$sluice' is missing; give --sluice PATH" >&2
  fi
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
