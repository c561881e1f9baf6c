# shellcheck shell=sh disable=SC2154
# Parts of the record that time decoding on a GPU, and its link: sourced by record.sh, which sets sluice, device and out.
# Behind each part of a GPU, in seconds on an H100 or H200 with 16 cores: what it takes by estimate, and what that is from:
#   [b] `bench gpu` with 8K, 32K and 128K tokens and 32 layers took 50: making the layer's tokens and pinning them, 16 GiB at 128K
#   [d] `bench decode`: 15 GiB of random weights are drawn in 3; a prompt of 128K tokens, 16 GiB, is imported in 10
# Without a letter: what the part took on an H200. The others were not timed as parts; all are bounded by what they were when their tables were made, in calls of at most 7 minutes.

memory=${RECORD_MEMORY:-8G 16G 32G 64G}
every_preset='full;sluice;quest;twilight;streaming;arkvale;psa;lfps;topk;snapkv;adakv;pyramidkv;tactic;infinigen;double_sparsity;adamas'
every_preset="$every_preset;magicpig;vattention;exact | int4 | top_p=0.95;tactic | int4"

decode_parts() {
  [ "$device" != host ] || return 0
  echo decode-default      # 40: eight layers of six lengths, two of 256K and 512K
  echo decode-ten          # 21
  echo decode-link         # 50: three lengths of sixteen layers, four times
  echo decode-default-uniform # 34: likewise, where attention has no pattern
  echo decode-lengths      # 80 [b]: six lengths, of which 64K and 128K are three quarters
  echo decode-256K         # 40 [b]: as 128K with 32 layers
  echo decode-512K         # 40 [b]: likewise
  echo decode-short        # 30 [b]
  for size in 8K 32K; do echo "decode-costs-$size"; done # 53 for 8K, 110 for 32K [b]: 41 and 36 sequences of these lengths, four engines
  echo decode-uniform      # 30 [b]
  echo decode-other        # 60 [b]: four policies
  echo decode-psa          # 60 by that, and eight sequences more
  for what in 32K 128K 64; do # 60 to 90 each, by what parts of them took on an H200
    echo "decode-tactic-$what"
    echo "decode-twilight-$what"
  done
  for what in 8K 32K 64; do echo "decode-tokens-$what"; done # 25 for 32K on an H200, 75 for 8K [d], as many for 64 of 8K
  for policy in sluice tactic; do echo "prompt-$policy"; done # 3 each on an H200
  for way in device stream host; do echo "decode-handover-$way"; done # 40 each [b]
  for batch in 8x32K 32x8K 4x128K ragged; do echo "decode-batch-$batch"; done # 25, and 51 for ragged: as many tokens, two placements
  for what in lengths batch 512K; do echo "decode-near-$what"; done # 26 for lengths, 60 [b]
  for what in 128K 512K 8x512K; do echo "decode-near-all-$what"; done # 109, 49 and 196: 11, 4 and 16 GiB for each of five policies
  echo presets             # 90 [b]: twenty policies, four layers of 8K and 32K tokens
  echo plan-others         # 140 on an H200: 83 for the machine, 54 for 27 configurations
  echo decode-model        # 90 [d]: 2 lengths, 3 methods
  echo decode-model-batch  # 120 [d]: four prompts of 128K, and one at a time for dense attention
  echo decode-pattern      # 16
  echo decode-pattern-batch # 47: a forward of all is audited, 32 GiB of keys
  for size in $memory; do echo "decode-memory-32K-$size"; done # 9 to 25: 16 prompts of 32K at most, 64 GiB of host memory
  for size in $memory; do echo "decode-memory-128K-$size"; done # 6 to 50
  # LFPS end to end, as in its paper a batch of eight, beside what it is made of.
  echo decode-lfps-8K      # 60 [d]: 8 GiB of prompts for each of seven methods
  echo decode-lfps-32K     # 150 [d]: 32 GiB for each of four
  echo decode-drafts       # 120 [d]
  echo link                # 60: `link --quick`, and pinning 8 GiB
}

# decode_layer NAME [option...]: attention of a layer, of the default policy unless an option says otherwise.
decode_layer() {
  name=$1
  shift
  "$sluice" bench gpu --device "$device" --sections attention --steps 12 --warm-up "${warm_up:-96}" "$@" \
    -o json --output "$out/$name.json"
}

# decode_default NAME [option...]: the default policy from 4K to 512K tokens.
decode_default() {
  whole=$1
  shift
  decode_layer "$whole" --policies sluice --length 4K,8K,16K,32K,64K,128K --layers 8 "$@"
  warm_up=64
  decode_layer "$whole-long" --policies sluice --length 256K,512K --layers 2 "$@"
  warm_up=''
}

# decode_link NAME: the same, with far rows of a layer left to the CPU and with a few of them over the link, by turns.
decode_link() {
  whole=$1
  for turn in '' -again; do
    for rows in 0 384; do
      [ $rows = 0 ] && name=$whole-asked$turn || name=$whole$turn
      decode_layer "$name" --policies sluice --length 8K,32K,128K --layers 16 --near 0.035 --link-rows $rows
    done
  done
}

# The headline: ten engines of 32K tokens, built one by one.
decode_ten() {
  decode_layer "$1" --policies sluice --length 32K --layers 32 --repeats 10
}

# decode_model NAME [option...]: tokens of Llama-3.1-8B with random weights.
decode_model() {
  name=$1
  shift
  "$sluice" bench decode --device "$device" "$@" -o json --output "$out/$name.json"
}

decode_batch() {
  case $2 in
    8x32K) shape="--rows 8 --length 32K --layers 8" ;;
    32x8K) shape="--rows 32 --length 8K --layers 8" ;;
    4x128K) shape="--rows 4 --length 128K --layers 4" ;;
    ragged) shape="--rows 16 --length 128K --ragged 1K --layers 4" ;;
  esac
  # shellcheck disable=SC2086 # Options.
  decode_layer "$1" --policies sluice --placements hybrid,near $shape
}

decode_near() {
  case $2 in
    lengths) shape="--length 32K,128K --layers 8" ;;
    batch) shape="--length 32K --rows 8 --layers 8" ;;
    512K) shape="--length 512K --layers 2" ;;
  esac
  # shellcheck disable=SC2086 # Options.
  decode_layer "$1" --policies "twilight;quest;sluice" --placements near $shape
}

# decode_near_all NAME SHAPE: what reads less where everything is near, and chooses on the device.
decode_near_all() {
  case $2 in
    128K) shape="--length 32K,128K --rows 1,8 --layers 2" ;;
    512K) shape="--length 512K --rows 1 --layers 2" ;;
    8x512K) shape="--length 512K --rows 8 --layers 1" ;;
  esac
  # shellcheck disable=SC2086 # Options.
  "$sluice" bench gpu --device "$device" --sections attention --placements near --steps 12 --warm-up 8 \
    --policies "sluice;quest;twilight;tactic | int4;exact | int4 | top_k=max(64, 2%)" $shape -o json --output "$out/$1.json"
}

# What the plan makes of policies, placements, batches and lengths that the machine's file does not have.
plan_others() {
  whole=$1 reports=0
  set --
  other() {
    reports=$((reports + 1))
    "$sluice" bench gpu --device "$device" --sections attention --steps 12 --warm-up 48 "$@" \
      -o json --output "$out/$whole-$reports.json"
  }
  "$sluice" doctor --machine "$out/$whole-machine.json" >/dev/null
  other --policies sluice --placements hybrid,near,stream --length 16K,64K --layers 8
  other --policies "full;streaming;lfps;topk;exact | int4 | top_p=0.95;psa" --length 16K --layers 8
  other --policies "tactic;magicpig;snapkv;double_sparsity" --length 16K --layers 4
  other --policies "quest;twilight" --placements hybrid,near --length 64K --layers 4
  other --policies "quest;sluice" --length 16K --rows 8 --layers 4
  other --policies sluice --length 64K --rows 4 --layers 4
  other --policies "lfps;psa" --placements stream --length 32K --layers 4
  other --policies "full;tactic | int4" --placements near --length 64K --layers 4
  while [ $# -lt $reports ]; do set -- "$@" "$out/$whole-$(($# + 1)).json"; done
  "$sluice" plan --machine "$out/$whole-machine.json" --measured "$@" -o json --output "$out/$whole.json"
}

# decode_batches NAME POLICIES SHAPE: everything near, as Tactic and Twilight were published; 64: most sequences.
decode_batches() {
  case $3 in
    32K) shape="--length 8K,32K --rows 1,4,8,16 --layers 2" ;;
    128K) shape="--length 128K --rows 1,4,16 --layers 1" ;;
    64) shape="--length 8K,32K --rows 64 --layers 1" ;;
  esac
  # shellcheck disable=SC2086 # Options.
  "$sluice" bench gpu --device "$device" --sections attention --placements near --steps 12 --warm-up 8 \
    --policies "$2" $shape -o json --output "$out/$1.json"
}

# decode_tokens NAME LENGTH: whole models with everything near.
decode_tokens() {
  case $2 in
    8K) shape="--length 8K --batch 1,16,32" ;;
    32K) shape="--length 32K --batch 1,8" ;;
    64) shape="--length 8K --batch 64" ;;
  esac
  # shellcheck disable=SC2086 # Options.
  decode_model "$1" --structure narrow_slash $shape --steps 12 --warm-up 8 \
    --methods "dense;near/quest;near/twilight;near/tactic | int4"
}

# prompt NAME POLICY: a prompt's time to its first token, which k-means of its keys is a part of.
prompt() {
  awk -v tokens="${RECORD_PROMPT_TOKENS:-32700}" \
    'BEGIN { srand(1); for (i = 0; i < tokens; ++i) print 1000 + int(rand() * 90000) }' >"$out/prompt.txt"
  "$sluice" run --device "$device" --random-weights llama-3.1-8b --prompt-tokens "$out/prompt.txt" --max-tokens 4 \
    --policy "$2" -o json --output "$out/$1.json" >/dev/null
}

# decode_memory NAME LENGTH-SIZE: sequences in a given device memory.
decode_memory() {
  case $2 in
    32K-*) batches=1,4,16 ;;
    *) batches=1,4 ;;
  esac
  decode_model "$1" --structure narrow_slash --length "${2%-*}" --batch "$batches" --kv-size "${2#*-}" --steps 8 \
    --warm-up 48 --methods "dense;hybrid/sluice"
}

# A part that decode_parts names.
measure_decode() {
  budget="sluice | far=max(4096, 0.5%)"
  case $1 in
    decode-default) decode_default "$1" ;;
    decode-ten) decode_ten "$1" ;;
    decode-link) decode_link "$1" ;;
    decode-default-uniform) decode_default "$1" --pattern uniform ;;
    decode-lengths) decode_layer "$1" --policies sluice --length 4K,8K,16K,32K,64K,128K --layers 32 ;;
    decode-256K) decode_layer "$1" --policies sluice --length 256K --layers 16 ;;
    decode-512K) decode_layer "$1" --policies sluice --length 512K --layers 8 ;;
    decode-short)
      decode_layer "$1" --policies sluice --length 4K,8K,16K,32K --layers 32 --near 1 --dense-tokens 64K
      ;;
    # A layer beyond what it reads; the batches tell the rate at which device memory is read.
    decode-costs-8K) decode_layer "$1" --costs --policies sluice --length 8K --rows 1,8,32 --layers 32 ;;
    decode-costs-32K) decode_layer "$1" --costs --policies sluice --length 32K --rows 1,8 --layers 32 ;;
    decode-tactic-*) decode_batches "$1" "tactic | int4;tactic:mass=0.7 | int4" "${1#decode-tactic-}" ;;
    decode-twilight-*) decode_batches "$1" "twilight;quest;quest:budget=8192" "${1#decode-twilight-}" ;;
    decode-tokens-*) decode_tokens "$1" "${1#decode-tokens-}" ;;
    prompt-tactic) prompt "$1" "tactic | int4" ;;
    prompt-sluice) prompt "$1" sluice ;;
    decode-uniform)
      decode_layer "$1" --policies "sluice;$budget" --length 32K,128K --layers 8 --pattern uniform
      ;;
    decode-other) decode_layer "$1" --policies "sluice;twilight;quest;lfps" --length 32K,128K --layers 4 ;;
    decode-psa)
      decode_layer "$1" --policies "psa | int4;twilight;quest" --placements hybrid,near --length 8K,32K,128K --layers 4
      decode_layer "$1-8" --policies "psa | int4;twilight;quest" --placements hybrid,near --length 32K --rows 8 --layers 4
      ;;
    decode-handover-*)
      decode_layer "$1" --policies sluice --length 32K,128K --layers 32 --handover "${1#decode-handover-}"
      ;;
    decode-batch-*) decode_batch "$1" "${1#decode-batch-}" ;;
    decode-near-all-*) decode_near_all "$1" "${1#decode-near-all-}" ;;
    decode-near-*) decode_near "$1" "${1#decode-near-}" ;;
    presets)
      "$sluice" bench gpu --device "$device" --sections attention --steps 8 --warm-up 24 --layers 4 --length 8K,32K \
        --policies "$every_preset" -o json --output "$out/$1.json"
      ;;
    plan-others) plan_others "$1" ;;
    decode-model)
      decode_model "$1" --length 32K,128K --steps 16 --warm-up 48 --methods "dense;near/sluice;hybrid/$budget"
      ;;
    decode-model-batch)
      decode_model "$1" --length 128K --batch 4 --kv-size 16G --steps 8 --warm-up 24 --methods "dense;hybrid/$budget"
      ;;
    decode-pattern)
      decode_model "$1" --structure narrow_slash --length 32K,128K --steps 16 --warm-up 96 --audit 1 \
        --methods "dense;near/sluice;hybrid/sluice"
      ;;
    decode-pattern-batch)
      decode_model "$1" --structure narrow_slash --length 128K --batch 4 --kv-size 16G --steps 16 --warm-up 128 --audit 1 \
        --methods "dense;hybrid/sluice"
      case " $memory " in
        *" 64G "*)
          decode_model "$1-64G" --structure narrow_slash --length 128K --batch 4 --kv-size 64G --steps 16 --methods dense
          ;;
      esac
      ;;
    decode-memory-*) decode_memory "$1" "${1#decode-memory-}" ;;
    decode-lfps-8K)
      decode_model "$1" --structure narrow_slash --length "${RECORD_LFPS_LENGTH:-8K}" --batch 8 --steps 16 --warm-up 32 --audit 1 \
        --methods "dense;hybrid/sluice;hybrid/lfps;hybrid/lfps | bypass=off;stream/lfps;hybrid/topk;hybrid/quest"
      ;;
    decode-lfps-32K)
      decode_model "$1" --structure narrow_slash --length 32K --batch 8 --steps 8 --warm-up 24 --audit 1 \
        --methods "dense;hybrid/sluice;hybrid/lfps;hybrid/topk"
      ;;
    decode-drafts)
      decode_model "$1" --length 32K,128K --drafts 4 --warm-up 48 --steps 16 --methods "hybrid/sluice;stream/sluice"
      ;;
    link)
      ordinal=${device#cuda}
      ordinal=${ordinal#:}
      "$sluice" link --device "${ordinal:-0}" --quick -o json --output "$out/$1.json"
      "$sluice" link --device "${ordinal:-0}" --sections pinning --pin-gib 8 -o json --output "$out/link-pinning.json"
      ;;
    *) return 1 ;;
  esac
}
