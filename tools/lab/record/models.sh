# shellcheck shell=sh disable=SC2154
# Parts of the record that time models of transformers: sourced by record.sh, which sets python, root, device and out.
# They are there where $python has the package and torch sees a GPU. Behind each in seconds what it takes by estimate, from the times of docs/benchmarks.md:
# the model is drawn in about 20, and a part is its prompts and tokens.

models() {
  "$python" -c 'import importlib.util as util, sys
if any(util.find_spec(name) is None for name in ("sluice", "torch", "transformers")): sys.exit(1)
import torch
sys.exit(not torch.cuda.is_available())' 2>/dev/null
}

models_parts() {
  [ "$device" != host ] && models || return 0
  echo model-generate-32K   # 40: three caches, prompts 2 each, 22 tokens of 24, 53 and 123 ms
  echo model-generate-128K  # 90: prompts 14 and 34, 22 tokens of 30 and 600 ms
  echo model-logits-8K      # 60: four passes, one in float32 with twice the weights
  echo model-logits-32K     # 150: likewise; eager attention of 32K
  echo model-loop           # 60: 9 requests with graphs and without, which are captured in 20
  echo model-loop-32K       # 45: one request
  echo model-beside         # 120: a prompt of 130,000 in 37 with each of two slowdowns, and 20 to compile
}

# lines NAME SCRIPT [option...]: a benchmark that prints a line of JSON for each result.
lines() {
  name=$1 script=$2
  shift 2
  "$python" "$root/tools/lab/benchmarks/$script.py" "$@" >"$out/$name.lines"
  python3 "$root/tools/lab/record/lines.py" "$out/$name.lines" "$("$sluice" --version)" >"$out/$name.json.new"
  mv "$out/$name.json.new" "$out/$name.json"
  rm "$out/$name.lines"
}

# A part that models_parts names.
measure_models() {
  case $1 in
    model-generate-32K)
      lines "$1" generate --tokens 32K --caches device,sluice,offloaded --chunk 16K --steps 12 --warm-up 10 --json
      ;;
    model-generate-128K)
      lines "$1" generate --tokens 128K --caches sluice,offloaded --chunk 16K --steps 12 --warm-up 10 --json
      ;;
    model-logits-8K) lines "$1" logits --tokens 8K ;;
    model-logits-32K) lines "$1" logits --tokens 32K --steps 32 ;;
    model-loop) lines "$1" serve --concurrency 1,8 --prompt 2K --answer 48 --rounds 1 --graphs on,off --json ;;
    model-loop-32K) lines "$1" serve --concurrency 1 --prompt 32K --answer 64 --rounds 1 --graphs on --json ;;
    model-beside) lines "$1" beside --compile --slowdowns 1.9,2 ;;
    *) return 1 ;;
  esac
}
