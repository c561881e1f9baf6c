# shellcheck shell=sh disable=SC2154
# Parts of the record that time this machine, whatever it has: sourced by record.sh, which sets sluice, device and out.
# How parts with a GPU were estimated: decode.sh.

core_lengths=${RECORD_CORE_LENGTHS:-4K,8K,16K,32K,64K,128K}
# LFPS: thresholds of its tables, and of its bypass where heads have sinks.
alphas='lfps:alpha=0.1;lfps:alpha=0.2;lfps:alpha=0.3;lfps:alpha=0.4'
bypasses='lfps | bypass=off;lfps | bypass=sink:0.95;lfps | bypass=sink:0.9;lfps;lfps | bypass=sink:0.8'
bypasses="$bypasses;lfps | bypass=sink:0.75;lfps | bypass=sink:0.7"

if [ "$device" = host ]; then
  plan_lengths=${RECORD_PLAN_LENGTHS:-1K,4K} plan_layers=${RECORD_PLAN_LAYERS:-4} plan_short=2K
  cluster_lengths=${RECORD_CLUSTER_LENGTHS:-2K,8K}
  ablation_lengths=${RECORD_ABLATION_LENGTHS:-8K} ablation_layers=4
  serve="--random-weights tiny --threads 2 --kv-size 4M --host-size 12M --prompt 800 --answer 32 --batch 16
    --prefill-chunk 256 --tbt-limit 100 --queue-limit 0.5"
  serve_rates="--rates 5,10,20,30,40,60,80 --seconds 6" serve_long="--rates 5,10,20,30,40,60,80 --seconds 15"
  serve_low="--rates 2,5,10,20,30,40,60 --seconds 15"
else
  plan_lengths=${RECORD_PLAN_LENGTHS:-4K,16K,64K,128K} plan_layers=${RECORD_PLAN_LAYERS:-32} plan_short=32K
  cluster_lengths=${RECORD_CLUSTER_LENGTHS:-32K,64K,128K}
  ablation_lengths=${RECORD_ABLATION_LENGTHS:-32K,128K} ablation_layers=8
  serve="--random-weights llama-3.1-8b --kv-size 4G --host-size 12G --prompt 8K --answer 128 --batch 16
    --prefill-chunk 1K --tbt-limit 100 --queue-limit 2"
  serve_rates="--rates 0.5,1,1.5,2,2.5,3,4 --seconds 7" serve_long="--rates 1.5,2,2.5,3,4,5 --seconds 15"
  serve_low="--rates 0.5,1,1.5,2,2.5,3 --seconds 15"
fi
[ -z "${RECORD_SERVE:-}" ] || serve=$RECORD_SERVE serve_rates='' serve_long='' serve_low=''
[ "$device" = host ] && threads='1 2' || threads='1 16'
threads=${RECORD_THREADS:-$threads}

speed_parts() {
  for what in together apart alpha bypass; do echo "core-$what"; done
  for budget in 64 128 256 512 1024 2048; do echo "core-k-$budget"; done
  echo core-kernels
  echo core-kernels-fp8
  echo cpu-batches
  echo cpu-ragged
  for number in $threads; do echo "cpu-threads-$number"; done # 30 each: a layer of 128K tokens, chosen from in three ways
  echo cpu-engine          # 120 with 16 cores: twelve engines, of 128K tokens four layers
  echo plan
  echo serve               # --seconds of arrivals at each rate, half as much again at most, three runs by bisection, and 3 for each engine
  echo serve-papers        # 150: as serve-default, policies of papers; 113 for three of them on an H200
  echo serve-default       # 95 on an H200: three rates each of dense attention and the default, 15 s of arrivals
  echo clusters            # 6 on an H200
  echo ablation            # 70 [b]: eight layers; exact top-k of 128K tokens takes the CPU 7 ms a layer
}

# core NAME LENGTHS POLICIES [option...]: attention of one layer on one core.
core() {
  name=$1 lengths=$2 named=$3
  shift 3
  "$sluice" bench cpu --threads 1 --sections attention --steps 12 --length "$lengths" --policies "$named" "$@" \
    -o json --output "$out/$name.json"
}

# The engine by itself, without near memory: by the default, and attending everything in place.
engine_alone() {
  whole=$1
  alone() {
    name=$1
    shift
    "$sluice" bench gpu --device host --sections attention --near 0 --policies sluice --steps 8 --warm-up 2 "$@" \
      -o json --output "$out/$name.json"
  }
  alone "$whole" --length 8K,32K --layers 8 --dense-tokens 0
  alone "$whole-all" --length 8K,32K --layers 8 --dense-tokens 256K
  alone "$whole-128K" --length 128K --layers 4 --dense-tokens 0
  alone "$whole-128K-all" --length 128K --layers 4 --dense-tokens 256K
}

# The machine as it is measured, configurations that are timed on it, and what the plan makes of each.
plan() {
  timed() {
    name=$1
    shift
    "$sluice" bench gpu --device "$device" --sections attention --steps 12 --warm-up 64 "$@" \
      -o json --output "$out/plan-$name.json"
  }
  "$sluice" doctor --machine "$out/plan-machine.json" >/dev/null
  timed length --policies sluice --length "$plan_lengths" --layers "$plan_layers"
  timed rows --policies sluice --length "$plan_short" --rows 4,8 --layers 8
  timed policies --policies "quest;sluice | far=max(4096, 0.5%)" --placements hybrid,stream --length "$plan_short" \
    --layers "$plan_layers"
  timed fp8 --policies sluice --length "$plan_short" --kv-dtype fp8_e4m3 --layers 8
  "$sluice" plan --machine "$out/plan-machine.json" --measured "$out/plan-length.json" "$out/plan-rows.json" \
    "$out/plan-policies.json" "$out/plan-fp8.json" -o json --output "$out/plan.json"
  "$sluice" plan --machine "$out/plan-machine.json" --length 4K,8K,16K,32K,64K,128K,256K,512K \
    --policies "sluice;quest;twilight;lfps" --plot "$out/plan.svg" >"$out/plan.txt"
}

# What history, the bypass of heads and near memory earn where the CPU chooses and what it chooses crosses the link: the
# papers' policies, which candidates come from history, and heads whose softmax lies on the sinks.
ablation() {
  whole=$1 of_history="history | int4 | top_k=max(64, 1%)"
  pipeline() {
    name=$1
    shift
    "$sluice" bench gpu --device "$device" --sections pipeline --prefetch on,off --layers "$ablation_layers" --steps 12 \
      --warm-up 48 "$@" -o json --output "$out/$name.json"
  }
  pipeline "$whole" --length "$ablation_lengths" --policies "lfps;topk;psa"
  pipeline "$whole-sources" --length "${ablation_lengths%%,*}" \
    --policies "$of_history;history+pages${of_history#history};pages${of_history#history}"
  pipeline "$whole-sinks" --length "${ablation_lengths%%,*}" --pattern uniform \
    --sinks 0.5,0.72,0.78,0.83,0.88,0.92,0.97,0.99 \
    --policies "lfps;lfps | bypass=off;topk | bypass=sink:0.85;topk"
}

# serve_long NAME RATES POLICIES: in windows of 15 s.
serve_long() {
  # shellcheck disable=SC2086 # Options.
  "$sluice" bench serve --device "$device" $serve $2 --bisect --policies "$3" -o json --output "$out/$1.json"
}

# A part that speed_parts names.
measure_speed() {
  case $1 in
    core-together) core "$1" "$core_lengths" "topk;lfps" ;;
    # As LFPS is defined: no query heads that share keys.
    core-apart) core "$1" "$core_lengths" "topk;lfps" --q-heads 8 --kv-heads 8 ;;
    # With budgets for which exact top-k of what is proposed chooses, or does not.
    core-k-*) core "$1" "$core_lengths" "topk;lfps" --q-heads 8 --kv-heads 8 --budget "${1#core-k-}" ;;
    core-alpha) core "$1" "$core_lengths" "$alphas" ;;
    core-bypass)
      core "$1" "${core_lengths%%,*}" "$bypasses" --pattern uniform --sinks 0.5,0.72,0.78,0.83,0.88,0.92,0.97,0.99
      ;;
    core-kernels) "$sluice" bench cpu --threads 1 --sections kernels -o json --output "$out/$1.json" ;;
    core-kernels-fp8)
      "$sluice" bench cpu --threads 1 --sections kernels --dtype fp8_e4m3 -o json --output "$out/$1.json"
      ;;
    cpu-batches)
      "$sluice" bench cpu --threads 2 --sections attention --policies "topk;lfps" --steps 8 --length "${RECORD_CPU_BATCH:-8K}" \
        --rows 1,8 -o json --output "$out/$1.json"
      ;;
    cpu-ragged)
      "$sluice" bench cpu --threads 2 --sections attention --policies "topk;lfps" --steps 8 --length "${RECORD_CPU_RAGGED:-32K}" \
        --ragged 1K --rows 8 -o json --output "$out/$1.json"
      ;;
    cpu-threads-*)
      "$sluice" bench cpu --threads "${1##*-}" --sections attention,kernels --policies "topk;lfps" \
        --length "${RECORD_THREADS_LENGTH:-128K}" -o json --output "$out/$1.json"
      ;;
    cpu-engine) engine_alone "$1" ;;
    plan) plan ;;
    ablation) ablation "$1" ;;
    # PSA's experiment: the highest rate that each method holds, with the same device memory for keys and values.
    serve)
      # shellcheck disable=SC2086 # Options.
      "$sluice" bench serve --device "$device" $serve $serve_rates --bisect --policies "dense;sluice;hybrid/psa;stream/psa;arkvale;topk" \
        -o json --output "$out/$1.json"
      ;;
    # The same of longer windows.
    serve-default) serve_long "$1" "$serve_long" "dense;sluice" ;;
    serve-papers) serve_long "$1" "$serve_low" "stream/psa;arkvale;topk;hybrid/psa | int4" ;;
    clusters)
      "$sluice" bench prefill --device "$device" --structures vertical_slash --gammas "" --clusters 32 \
        --length "$cluster_lengths" --chunk 128K --repeat 3 -o json --output "$out/$1.json"
      ;;
    *) return 1 ;;
  esac
}
