# shellcheck shell=sh disable=SC2154
# Parts of the record that ask models which were trained for a question (tools/train): sourced by record.sh, which sets device, out, sluice
# and first. They are there where the models are named:
#   RECORD_HELD=DIR   held out: no policy was chosen by it        train.py --seed 3
#   RECORD_SINKS=DIR  its idle heads look at the first token      train.py --sinks 0.03 --kv-heads 2 --seed 11
#   RECORD_HEADS=...  directories of models with other groups     train.py --kv-heads 8 --seed 12, --kv-heads 1 --seed 13
# Behind each in seconds what it took beside seven others on two H200.

harder='near_keys turns count multi table'
# Of harder tasks: what a device chooses, what the CPU does, and baselines that came later.
by_device='full;sluice;twilight;quest;tactic | int4;exact | int4 | top_k=max(64, 2%);sluice | top_k=max(64, 4%)'
by_cpu='full;psa;lfps;topk;arkvale;magicpig;double_sparsity;vattention;streaming'
by_later='full;adamas;adakv;snapkv;pyramidkv'
thresholds='full;lfps | bypass=off'
for share in 0.99 0.95 0.9 0.85 0.8 0.75 0.7; do thresholds="$thresholds;lfps | bypass=sink:$share"; done
for share in 0.99 0.95 0.85 0.7; do thresholds="$thresholds;lfps | bypass=sink:$share,check=on"; done
with_sinks='full;sluice;quest;twilight;tactic;psa;topk;arkvale;magicpig;streaming;snapkv'
by_group='full;sluice;quest;twilight;tactic;psa;lfps | bypass=off;topk;arkvale;magicpig;double_sparsity;streaming'

trained_parts() {
  if [ -n "${RECORD_HELD:-}" ]; then
    for task in $harder; do echo "harder-device-$task"; done # 134 to 196
    for task in $harder; do echo "harder-cpu-$task"; done    # 216 to 337
    for task in $harder; do echo "harder-later-$task"; done  # 138 to 170 beside four others on one
  fi
  if [ -n "${RECORD_SINKS:-}" ]; then
    for task in niah multikey kv; do
      for length in 2K 8K; do echo "bypass-$task-$length"; done # 28 to 82 without the checked ones
      echo "sinks-$task"                                        # 95 to 102
    done
  fi
  for directory in ${RECORD_HELD:-} ${RECORD_HEADS:-}; do
    for task in kv multi table; do echo "group-$task-${directory##*/}"; done # 151 to 171
  done
}

# trained NAME MODEL TASK LENGTHS AUDIT POLICIES [option...]
trained() {
  name=$1 directory=$2 task=$3 lengths=$4 audit=$5 named=$6
  shift 6
  "$sluice" eval --model "$directory" --device "$device" --tasks "$task" --lengths "$lengths" --count 32 --audit "$audit" \
    --policies "$named" "$@" -o json --output "$out/$name.json"
}

# directory_of NAME: of the models of group-*, whose name ends with it.
directory_of() {
  for directory in ${RECORD_HELD:-} ${RECORD_HEADS:-}; do
    case $1 in *"-${directory##*/}") echo "$directory" && return ;; esac
  done
}

# A part that trained_parts names.
measure_trained() {
  rest=${1#*-} seed=${RECORD_SEED:-}
  case $1 in
    harder-device-*) harder "$1" "${rest#*-}" "$by_device" ;;
    harder-later-*) harder "$1" "${rest#*-}" "$by_later" ;;
    harder-cpu-*) harder "$1" "${rest#*-}" "$by_cpu" ;;
    bypass-*) trained "$1" "$RECORD_SINKS" "${rest%-*}" "${rest##*-}" 4 "$thresholds" --seed "${seed:-4242}" ;;
    sinks-*) trained "$1" "$RECORD_SINKS" "$rest" 8K 4 "$with_sinks" --seed "${seed:-4242}" ;;
    group-*) trained "$1" "$(directory_of "$1")" "${rest%%-*}" 8K 4 "$by_group" --seed "${seed:-4242}" ;;
    *) return 1 ;;
  esac
}

# harder NAME TASK POLICIES: 32 prompts of 32,000 tokens, beside dense attention, by the far budget that an 8B model has.
harder() {
  trained "$1" "$RECORD_HELD" "$2" "${RECORD_LONG:-32000}" 0 "$3" --seed "${seed:-777}" --paired --far 2048 --far-shape llama-3.1-8b
}
