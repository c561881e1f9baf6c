#!/bin/sh
# Regenerates the plot and the tables of README's comparisons, of policies and of ways to prefill:
# tools/record.sh DIR [host|cuda]
# Takes about a quarter of an hour with a GPU, hours without. Needs a build (tools/test.sh makes one).
set -eu

out=${1:?usage: tools/record.sh DIR [host|cuda]}
device=${2:-host}
root=$(cd "$(dirname "$0")/.." && pwd)
sluice="$root/build/release/tools/cli/sluice"
[ -x "$sluice" ] || { echo "record.sh: $sluice is missing; run tools/test.sh first" >&2; exit 1; }
mkdir -p "$out"

# The presets, and compositions that nobody published.
policies='full;topk;streaming;quest;arkvale;psa;twilight;tactic;magicpig;lfps;sluice;sluice-fast'
policies="$policies;clusters:candidates=1024 | int4 | top_k=max(64, 1%) | near=3%"
policies="$policies;lsh | int4 | top_k=max(64, 1%) | near=3%"
policies="$policies;pages:quest,budget=3072 | int4 | top_p=0.8 | near=5%"

"$sluice" eval --model "$root/tests/data/testbed" --device "$device" --tasks niah,multikey,kv --lengths 2K,8K,32000 \
  --count 8 --audit 8 --policies "$policies" --plot "$out/accuracy.svg" -o json --output "$out/tasks.json"

# How far stop rules and fits keep what they promise, and what equal coverage costs.
sweep='arkvale:budget=512;arkvale:budget=1024;arkvale:budget=2048;arkvale:budget=3072'
sweep="$sweep;psa:mass=0.9;psa;psa:mass=0.98;psa:rule=mean;psa:rule=median"
sweep="$sweep;tactic:mass=0.5;tactic:mass=0.6;tactic:mass=0.7;tactic:mass=0.8;tactic"
sweep="$sweep;pages:quest,budget=8192 | top_k=all | near=0%,sinks=4,recent=0 | dense=2 | page=16;twilight;twilight:mass=0.85"
"$sluice" eval --model "$root/tests/data/testbed" --device "$device" --tasks niah,kv --lengths 8192 --count 4 --audit 4 \
  --policies "$sweep" -o json --output "$out/sweep.json"
"$sluice" eval --tasks "" --needles 1,16 --device "$device" --policies "$policies" -o json --output "$out/needles.json"
if [ "$device" != host ]; then
  for page in 16 32; do
    "$sluice" bench gpu --device "$device" --sections attention --length 32K,128K --placements hybrid,stream --layers 2 \
      --page-tokens "$page" --steps 12 --policies "$policies" -o json --output "$out/layers-$page.json"
  done
fi

# Ways to prefill: what answers cost and whether they stay right, under dense and under sparse decoding.
lengths=2K,8K
[ "$device" = host ] || lengths=2K,8K,16K,32000
"$sluice" eval --model "$root/tests/data/testbed" --device "$device" --tasks niah,multikey,kv --lengths "$lengths" \
  --count 8 --audit 0 --policies full,sluice --prefill full,flexprefill@0.9,flexprefill@0.95,auto \
  -o json --output "$out/prefill-tasks.json"
"$sluice" bench prefill --device "$device" -o json --output "$out/prefill-layer.json"
python3 "$root/tools/record_tables.py" "$out" | tee "$out/tables.md"
