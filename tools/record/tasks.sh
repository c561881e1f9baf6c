# shellcheck shell=sh disable=SC2154
# Parts of the record that compare all presets, and compositions that nobody published: answers, needles, time of a layer.
# Sourced by record.sh, which sets sluice, model, device, out, short and count.

presets='full;topk;streaming;quest;arkvale;psa;twilight;tactic;magicpig;lfps;sluice'
presets="$presets;clusters:candidates=1024 | int4 | top_k=max(64, 1%)"
presets="$presets;lsh | int4 | top_k=max(64, 1%)"
presets="$presets;pages:quest,budget=3072 | int4 | top_p=0.8"
policies=${RECORD_POLICIES:-$presets}

# The table of quality: presets that are audited, and those that came later.
known='full;sluice;twilight;quest;psa;tactic;lfps;streaming;topk;arkvale;magicpig'
since='vattention;double_sparsity;adamas;adakv;snapkv;pyramidkv'
asked=${RECORD_QUALITY:-32}
# The prompts that the table has been asked, unless others are wanted, which eval_tasks names.
[ -n "${RECORD_SEED:-}" ] && first='' || first='--seed 4242'

# How far stop rules and fits keep what they promise, and what equal coverage costs.
sweep='arkvale:budget=512;arkvale:budget=1024;arkvale:budget=2048;arkvale:budget=3072;arkvale:budget=4096'
sweep="$sweep;psa:mass=0.9;psa;psa:mass=0.98;psa:rule=mean;psa:rule=median"
sweep="$sweep;tactic:mass=0.5;tactic:mass=0.6;tactic:mass=0.7;tactic:mass=0.8;tactic"
sweep="$sweep;pages:quest,budget=8192 | top_k=all | near=0%,sinks=4,recent=0 | dense=2 | page=16;twilight;twilight:mass=0.85"

layer_lengths=${RECORD_LAYER_LENGTHS:-32K 128K}

tasks_parts() {
  for task in niah multikey kv; do
    echo "tasks-$task-short"
    echo "tasks-$task-long"
  done
  for task in niah multikey kv; do # 90 to 180 each, beside four others on an H200
    for length in 2K 8K; do echo "quality-$task-$length"; done
    echo "quality-later-$task"
  done
  echo sweep
  echo needles-1
  echo needles-16
  if [ "$device" != host ]; then
    for length in $layer_lengths; do echo "layers-16-$length"; done
  fi
}

# A part that tasks_parts names.
measure_tasks() {
  rest=${1#*-}
  case $1 in
    tasks-*-short) eval_tasks "$1" "${rest%-short}" "$short" "$count" 8 "$policies" ;;
    tasks-*-long) eval_tasks "$1" "${rest%-long}" "${RECORD_LONG:-32000}" "$count" 8 "$policies" ;;
    quality-later-*)
      # shellcheck disable=SC2086 # An option and its value.
      eval_tasks "$1" "${1##*-}" "$short" "$asked" 0 "${RECORD_POLICIES:-$since}" $first
      ;;
    quality-*)
      # shellcheck disable=SC2086
      eval_tasks "$1" "${rest%-*}" "${rest##*-}" "$asked" 4 "${RECORD_POLICIES:-$known}" $first
      ;;
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
    *) return 1 ;;
  esac
}
