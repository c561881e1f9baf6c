# shellcheck shell=sh disable=SC2154
# Parts of the record about ways to read a prompt: sourced by record.sh, which sets sluice, device and out.
# With a GPU prefill-layer-* takes at most 7 minutes, flex-* a half each, as prefill-layer-* has longer prompts.

# Prompts by other papers: StreamingLLM and MInference with about as many blocks as FlexPrefill computes at gamma 0.9 of a prompt of
# 8K tokens, and with their own sizes, which are for longer ones.
others='streaming@512+1024,minference@vertical_slash:1280+1280,minference@block_sparse:1280'
others="$others,minference@best:1280+1280+512+1024+1280"
papers_own='streaming@1024+8192,minference,minference@block_sparse,minference@best'
if [ "$device" = host ]; then
  flex_length=${RECORD_FLEX_LENGTH:-8K} most='1024 2048 4096' patterns="$others"
else
  flex_length=${RECORD_FLEX_LENGTH:-128K} most='8192 16384 32768' patterns="$papers_own"
fi

prompts_parts() {
  for structure in vertical_slash query_aware uniform; do echo "prefill-layer-$structure"; done
  for structure in vertical_slash query_aware; do echo "prefill-patterns-$structure"; done
  for gammas in low high; do echo "flex-gamma-$gammas"; done
  for budget in 128 1024 2048; do echo "flex-budget-$budget"; done
  for budget in $most; do echo "flex-most-$budget"; done
  for tau in 0 0.1 0.2 0.3; do echo "flex-tau-$tau"; done
}

# flex NAME [option...]: FlexPrefill on one layer of a prompt.
flex() {
  name=$1
  shift
  "$sluice" bench prefill --device "$device" --length "$flex_length" --repeat 1 "$@" -o json --output "$out/$name.json"
}

# A part that prompts_parts names.
measure_prompts() {
  rest=${1#*-}
  case $1 in
    prefill-patterns-*)
      "$sluice" bench prefill --device "$device" --length "${RECORD_PATTERN_LENGTHS:-$flex_length}" --repeat 3 \
        --structures "${rest#patterns-}" --gammas 0.9,0.95 --others "$patterns" -o json --output "$out/$1.json"
      ;;
    prefill-layer-*)
      "$sluice" bench prefill --device "$device" --structures "${rest#layer-}" \
        ${RECORD_PREFILL_LAYER:+--length "$RECORD_PREFILL_LAYER"} -o json --output "$out/$1.json"
      ;;
    flex-gamma-low) flex "$1" --structures vertical_slash,query_aware --gammas 0.7,0.8,0.85 ;;
    flex-gamma-high) flex "$1" --structures vertical_slash,query_aware --gammas 0.9,0.95,0.97 ;;
    flex-budget-*) flex "$1" --structures vertical_slash --gammas 0.9 --min-budget "${rest#budget-}" ;;
    flex-most-*) flex "$1" --structures query_aware,uniform --gammas 0.95 --max-budget "${rest#most-}" ;;
    flex-tau-*) flex "$1" --structures query_aware --gammas 0.95 --tau "${rest#tau-}" ;;
    *) return 1 ;;
  esac
}
