# shellcheck shell=sh disable=SC2154
# Parts of the record that draw what the model's attention is like: sourced by record.sh, which sets python, root, model and out.

# Whether there is a Python that draws the papers' figures.
draws() {
  "$python" -c 'import importlib.util as util, sys
sys.exit(any(util.find_spec(name) is None for name in ("torch", "transformers", "matplotlib")))' 2>/dev/null
}

figures_parts() {
  draws || return 0
  for figure in pages tokens recall heads blocks sparse bits codes tactic selectors; do echo "figure-$figure"; done
}

# A part that figures_parts names, with a picture beside.
measure_figures() {
  # shellcheck disable=SC2086 # Options.
  "$python" "$root/python/benchmarks/paper_figures.py" "${1#figure-}" --model "$model" \
    ${RECORD_FIGURES:---count 2 --steps 24} --svg "$out/$1.svg" >"$out/$1.json.new"
  mv "$out/$1.json.new" "$out/$1.json"
}
