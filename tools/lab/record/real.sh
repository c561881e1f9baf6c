# shellcheck shell=sh disable=SC2154
# Parts of the record that hold policies against dense attention on models that others have trained: sourced by record.sh, which sets
# python, root, sluice, device and out. They are there where the models are named, as tools/models.sh makes them:
#   RECORD_REAL="NAME=DIR ..."         texts of 8,000 and 30,000 tokens, as long as the model takes
#   RECORD_REAL_TASKS="NAME=FILE ..."  and answers to tasks of `python -m sluice eval --make-tasks`
# real-text-prompts-* reads prompts by FlexPrefill, and real-text-bypass-* is about LFPS's bypass of heads.
# What the CPU chooses is decoded token by token: fewer tokens and prompts are asked of it.

real_by_device='full;sluice;exact | int4 | top_k=128;twilight;quest;streaming'
real_by_cpu='full;tactic;psa;lfps;vattention;magicpig'
real_bypasses='lfps | bypass=off;lfps;lfps | bypass=0.85,check=on;lfps:variance=off,growth=off'
real_prompts='full;flexprefill@0.6+lines;flexprefill@0.9;flexprefill@0.9+lines;flexprefill@0.95;flexprefill@0.95+lines;flexprefill@0.98'

real_parts() {
  for each in ${RECORD_REAL:-}; do
    for who in device cpu prompts bypass; do echo "real-text-$who-${each%%=*}"; done
  done
  for each in ${RECORD_REAL_TASKS:-}; do
    for who in device cpu; do echo "real-answers-$who-${each%%=*}"; done
  done
}

# named NAME LIST...: what a list has behind NAME=.
named() {
  wanted=$1
  shift
  for each in "$@"; do
    [ "${each%%=*}" != "$wanted" ] || echo "${each#*=}"
  done
}

# search NAME [option...]
search() {
  name=$1
  shift
  lines=$out/$name.lines
  rm -f "$lines"
  "$python" "$root/tools/lab/benchmarks/search.py" --out "$lines" --option answer_timeout_ms=20000 \
    --device "$([ "$device" = host ] && echo cpu || echo "$device")" "$@" >/dev/null
  python3 "$root/tools/lab/record/lines.py" "$lines" "$("$sluice" --version)" >"$out/$name.json.new"
  mv "$out/$name.json.new" "$out/$name.json"
  rm "$lines"
}

# A part that real_parts names.
measure_real() {
  case $1 in
    *-device-*) policies=$real_by_device scored=128 asked=96 ;;
    *-prompts-*) policies=full scored=128 ;;
    *-bypass-*) policies=$real_bypasses scored=64 ;;
    *) policies=$real_by_cpu scored=64 asked=24 ;;
  esac
  model_name=${1#real-*-*-}
  # shellcheck disable=SC2086 # Lists of words.
  case $1 in
    real-text-*)
      case $1 in
        *-prompts-*) set -- "$1" --prefill "$real_prompts" ;;
        *-bypass-*) set -- "$1" --audit ;;
      esac
      search "$@" --model "$model_name=$(named "$model_name" $RECORD_REAL)" --text prose --text code --tokens 8000,30000 \
        --score "$scored" --policies "$policies"
      ;;
    real-answers-*)
      search "$1" --model "$model_name=$(named "$model_name" $RECORD_REAL)" --tasks "$model_name=$(named "$model_name" $RECORD_REAL_TASKS)" \
        --prompts "$asked" --policies "$policies"
      ;;
    *) return 1 ;;
  esac
}
