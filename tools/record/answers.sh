# shellcheck shell=sh disable=SC2154
# Parts of the record that ask models what only some policies are asked: sourced by record.sh, which sets device, out, short and count.
# With a GPU by estimate, as tasks-*-short is 224 answers and at most 7 minutes: paired-* (128 prompts of 2K and 128 of 8K, read once and
# answered twice) 1.5 minutes, beside three others on an H200, more of long_copy, whose answers have hundreds of bytes; dtype-* (192) 6;
# question-seen (16 for each of 8 policies) 4; recall-* and psa-* under 1.

# Baselines that came later: against dense attention and the default in parts of their own.
later='full;sluice;double_sparsity;adamas;vattention;snapkv;adakv;pyramidkv'
[ "$device" = host ] && later="$later;infinigen"  # A model on a GPU rehearses no queries.
later=${RECORD_POLICIES:-$later}

# What LFPS's tables, its expansion and its bypass earn, on real attention.
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
# Tasks whose answers are held against those of dense attention, and near memory of a recall cache, percent.
paired='kv multi table near_keys turns count long_copy'
rooms='0 10 20 30 40 60'
[ "$device" = host ] && pairs=32 || pairs=128
pairs=${RECORD_PAIRS:-$pairs}
# Likewise of 32,000 tokens, with a GPU by estimate 60 seconds each: 128 prompts that are read once and answered twice.
paired_long='niah multikey kv multi table near_keys turns count'
far=${RECORD_FAR-"--far 2048 --far-shape llama-3.1-8b"}
# What gains where everything lies near, of which decode-near-all-* has the times; answers are the same wherever it lies.
near_policies='full;sluice;quest;twilight;tactic | int4;exact | int4 | top_k=max(64, 2%)'

answers_parts() {
  for task in niah multikey kv; do echo "later-$task"; done
  echo question-seen
  for task in $paired; do echo "paired-$task"; done
  for task in $paired_long; do echo "paired-32000-$task"; done
  echo near-accuracy # 180 at most: 96 answers; of the second model's two other tasks the testbed has none
  # 270 at most each: 144 answers
  [ -z "${RECORD_SECOND:-}" ] || for length in 2K 8K; do echo "near-accuracy-second-$length"; done
  for type in bf16 fp8_e4m3; do echo "dtype-$type"; done
  for room in $rooms; do echo "recall-$room"; done
  for placement in hybrid stream; do echo "psa-$placement"; done
  echo history
  echo tactic
  echo targets
  echo estimates
  for length in ${RECORD_TEXT_LENGTHS:-8K 32K}; do echo "text-$length"; done
}

# pairs NAME TASK LENGTHS: answers of the default beside those of dense attention. They are the same wherever tokens lie, and both policies
# read a prompt that lies near once.
pairs() {
  # shellcheck disable=SC2086 # Options.
  eval_tasks "$1" "$2" "$3" "$pairs" 0 "full;sluice" --paired --near 100% --page-tokens 32 $far
}

# near_accuracy NAME MODEL TASKS LENGTHS
near_accuracy() {
  "$sluice" eval --model "$2" --device "$device" --tasks "$3" --lengths "$4" --count "$count" --seed "${RECORD_SEED:-4242}" --audit 4 \
    --policies "$near_policies" -o json --output "$out/$1.json"
}

# A part that answers_parts names.
measure_answers() {
  rest=${1#*-}
  case $1 in
    later-*) eval_tasks "$1" "$rest" "$short" "$count" 8 "$later" ;;
    question-seen) eval_tasks "$1" kv "$short" "$count" 8 "$later" --decode-prompt 1 ;;
    paired-32000-*) pairs "$1" "${rest#*-}" "${RECORD_LONG:-32000}" ;;
    paired-*) pairs "$1" "$rest" "$short" ;;
    near-accuracy) near_accuracy "$1" "$model" kv "$short" ;;
    near-accuracy-second-*) near_accuracy "$1" "$RECORD_SECOND" kv,multi,table "${1##*-}" ;;
    dtype-*) eval_tasks "$1" niah,multikey,kv "$short" "$count" 8 "full;sluice;lfps;topk" --kv-dtype "$rest" ;;
    recall-*) eval_tasks "$1" niah,kv "$sweep_length" 1 1 "arkvale:dense=0;psa" --placement stream --near "$rest%" ;;
    psa-*) eval_tasks "$1" kv "${short%%,*}" 4 1 psa --placement "$rest" ;;
    history) eval_tasks "$1" niah,kv "$short" "$count" 4 "${RECORD_POLICIES:-$ablation}" ;;
    tactic) eval_tasks "$1" niah,kv "$sweep_length" 2 1 "${RECORD_POLICIES:-$targets}" ;;
    targets) eval_tasks "$1" kv "${short%%,*}" "${RECORD_PAIRS:-32}" 4 "${RECORD_POLICIES:-$answers}" ;;
    estimates) eval_tasks "$1" niah,kv "$sweep_length" "${RECORD_SWEEP_COUNT:-4}" 4 "${RECORD_POLICIES:-$estimates}" ;;
    text-*)
      cat "$root"/docs/*.md >"$out/text.txt"
      eval_tasks "$1" "" "$short" "${RECORD_TEXTS:-4}" 8 "${RECORD_POLICIES:-$reading}" --text "$out/text.txt" \
        --text-lengths "$rest" --text-tokens "${RECORD_TEXT_TOKENS:-257}"
      ;;
    *) return 1 ;;
  esac
}
