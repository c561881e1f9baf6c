#!/usr/bin/env bash
# A model answers questions about long texts while its KV cache lives in host memory. See usage().
set -euo pipefail
export LC_ALL=C

usage() {
  cat <<'TEXT'
usage: tools/demo.sh [--real]

Builds the sluice command and lets a small Llama answer two questions about long texts while its KV cache lives in host
memory. Policy `sluice` reads a small share of the cache and must find both answers; `full` reads all of it, `streaming`
only the newest tokens. Then: what to try next.
  --real  builds the library for Python instead, fetches SmolLM2-135M-Instruct (93 MB), a model that others have
          trained, and PyTorch for it (in ~/.cache/sluice), and asks it about Python's own documentation and library
Exit codes: 0 found, 1 not found or failed, 2 wrong usage, or as tools/bootstrap.sh.
TEXT
}

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
readonly root
readonly kModel=$root/tests/data/testbed
readonly kSluice=$root/build/release/tools/cli/sluice
readonly kPolicies=(sluice full streaming)
# One token per byte, so these are bytes.
readonly kPromptTokens=8000
readonly kAnswerTokens=12
# The question is read token by token under the policy, not as part of the prompt's dense prefill.
readonly kQuestionTokens=24
# Generous: a demo on a busy machine shall be slow, not fail.
readonly kTimeoutSeconds=600

# The same texts on every machine: bash's own RANDOM differs between its versions.
state=7
random_below() {
  state=$(((state * 1103515245 + 12345) % 2147483648))
  drawn=$((state / 65536 % $1))
}

# Filler sentences with one fact in them, then the question for it.
write_needle_prompt() {
  local sentences=(
    "The grass is green. " "The sky is blue. " "The sun is yellow. " "Here we go. " "There and back again. "
  )
  local needle=$'\nOne of the special magic values for vivid-otter is: 4815162.\n'
  local question=$'\nQ: What is the special magic value for vivid-otter?\nA:'
  local text="" hidden=0
  while ((${#text} + ${#question} + 22 < kPromptTokens)); do
    if ((!hidden && ${#text} > kPromptTokens / 3)); then
      text+=$needle
      hidden=1
    fi
    random_below ${#sentences[@]}
    text+=${sentences[drawn]}
  done
  printf '%s' "$text$question"
}

# Nothing but key-value pairs, then the question for one of them.
write_pairs_prompt() {
  local text="" key value
  while ((${#text} + 40 < kPromptTokens)); do
    random_below 4096; key=$(printf '%03x' "$drawn")
    random_below 4096; key+=$(printf '%03x' "$drawn")
    random_below 10000; value=$((1000 + drawn % 9000))
    random_below 1000; value+=$(printf '%03d' "$drawn")
    text+="set $key = $value"$'\n'
    if [[ -z "$asked_key" ]] && ((${#text} > kPromptTokens / 3)); then
      asked_key=$key
      asked_value=$value
    fi
  done
  printf '%s' "${text}get $asked_key ->"
}

# Share columns of `sluice run -o csv`, as "tokens near far link bytes" in percent of dense attention; bytes are the sum
# of the three kinds before.
shares() {
  awk -F, '
    function share(name) { return name in column ? $column[name] : 0 }
    function percent(value) { return sprintf("%.1f%%", 100 * value) }
    NR == 1 { for (i = 1; i <= NF; i++) column[$i] = i }
    NR == 2 {
      near = share("near_bytes_share"); far = share("far_bytes_share"); link = share("link_bytes_share")
      print percent(share("attended_share")), percent(near), percent(far), percent(link), percent(near + far + link)
    }' "$1"
}

# bar SHARE CHARACTER: the character once for every 2.5 percent, such as 12.5%.
bar() {
  local tenths=${1%\%} count
  tenths=${tenths/./}
  [[ "$tenths" =~ ^[0-9]+$ ]] || return 0
  count=$(((10#$tenths + 24) / 25))  # What is more than nothing is seen.
  printf "%${count}s" "" | tr ' ' "$2"
}

# picture: a line for each policy of what lies in $work/pictured, "policy near far link".
picture() {
  local policy near far link
  printf '\n  bytes read, near: #, far: =, over the link: -\n'
  while read -r policy near far link; do
    printf '  %-10s |%-42s|\n' "$policy" "$(bar "$near" '#')$(bar "$far" =)$(bar "$link" -)"
  done <"$work/pictured"
  printf '  %-10s  0%%%38s\n' "" "100% of dense attention"
}

# ask PROMPT_FILE EXPECTED: one table row per policy; fails if policy `sluice` does not give the expected answer.
ask() {
  local prompt=$1 expected=$2 policy answer verdict tokens near far link bytes found=1
  : >"$work/pictured"
  printf '\n  %-10s %-12s %7s %17s %12s %12s %12s %12s\n' policy answer "" "tokens attended" "near bytes" "far bytes" \
    "link bytes" "all bytes"
  for policy in "${kPolicies[@]}"; do
    "$kSluice" run --model "$kModel" --prompt-file "$prompt" --policy "$policy" --max-tokens $kAnswerTokens \
      --decode-prompt $kQuestionTokens --dense-tokens 0 --seed 0 --timeout $kTimeoutSeconds \
      -o csv --output "$work/shares.csv" >"$work/answer" || return
    answer=$(head -n 1 "$work/answer" | tr -cd '[:print:]')
    answer=${answer# }
    read -r tokens near far link bytes <<<"$(shares "$work/shares.csv")"
    if [[ "$answer" == "$expected" ]]; then verdict=right; else verdict=wrong; fi
    # `full` attends everything; a policy that does chose nothing.
    if [[ "$tokens" == 100.0% && "$policy" != full ]]; then tokens="all, no choice"; fi
    printf '  %-10s %-12s %7s %17s %12s %12s %12s %12s\n' "$policy" "$answer" "$verdict" "$tokens" "$near" "$far" \
      "$link" "$bytes"
    printf '%s %s %s %s\n' "$policy" "$near" "$far" "$link" >>"$work/pictured"
    if [[ "$policy" == sluice && "$verdict" == wrong ]]; then found=0; fi
  done
  picture
  ((found))
}

if (($# > 1)); then
  printf 'demo: error: one option at most; see --help\n' >&2
  exit 2
fi
case ${1:-} in
  "") ;;
  -h | --help) usage; exit 0 ;;
  --real)
    "$root/tools/bootstrap.sh" --preset release --target sluice_c
    "$root/tools/python_env.sh" --demo
    cache=${XDG_CACHE_HOME:-$HOME/.cache}/sluice
    PYTHONPATH="$root/python" PYTHONDONTWRITEBYTECODE=1 SLUICE_LIBRARY="$root/build/release/capi/libsluice.so" \
      "$cache/venv/bin/python" "$root/tools/demo_real.py" "$cache/models/smollm2"
    exit
    ;;
  *)
    printf "demo: error: unknown option '%s'; see --help\n" "$1" >&2
    exit 2
    ;;
esac

"$root/tools/bootstrap.sh" --preset release --target sluice

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
status=0

write_needle_prompt >"$work/needle.txt"
printf '\nA text of %s tokens hides one fact. "What is the special magic value for vivid-otter?" It is 4815162.\n' \
  "$(wc -c <"$work/needle.txt")"
ask "$work/needle.txt" 4815162 || status=1

asked_key="" asked_value=""
write_pairs_prompt >"$work/pairs.txt"
printf '\n%s pairs of key and value, %s tokens. "get %s": it is %s.\n' \
  "$(grep -c '^set ' "$work/pairs.txt")" "$(wc -c <"$work/pairs.txt")" "$asked_key" "$asked_value"
ask "$work/pairs.txt" "$asked_value" || status=1

printf '\nTokens and bytes are shares of what dense attention reads; each policy chooses, however short the text is. near: device\n'
printf 'memory, also of the 4-bit copies of keys by which the policy sluice chooses; far: host memory, by the CPU; link: host\n'
printf 'memory, by the device. Without a GPU all are memory of this machine.\n'
cat <<TEXT

What to try next, with ${kSluice#"$PWD"/}:
  sluice doctor                     what this machine has, and options to begin with
  sluice policies                   what else decides which tokens are attended; a line of grammar is a new one
  sluice eval --model ${kModel#"$PWD"/} --tasks ${kModel#"$PWD"/}/tasks.jsonl \\
    --policies "full;sluice;streaming"     answers by policy and length
  sluice run --model DIR --prompt-file FILE --policy sluice    a Llama of yours
  tools/demo.sh --real              a model that others have trained, asked about Python's documentation
Models of transformers, and a server: docs/python.md, docs/serving.md. On a GPU: docs/command.md.
TEXT
if ((status)); then
  printf 'demo: error: policy sluice did not give every answer\n' >&2
fi
exit $status
