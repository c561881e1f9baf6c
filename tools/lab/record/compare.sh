# shellcheck shell=sh disable=SC2154
# Parts of the record that hold our kernels against other libraries': sourced by record.sh, which sets python, root, sluice, device and out.
# $python wants torch and a GPU, and has FlashAttention-3 or FlashInfer or not: tools/lab/compare/attention.py names what is not installed.
# Behind each by estimate in seconds: about 20 for each kernel of others, in a process of its own, and ours by [b] of decode.sh.

compare_parts() {
  [ "$device" != host ] || return 0
  echo compare-decode   # 240: five kernels, and four engines of up to 7 GiB
  echo compare-dense    # 180: likewise, dense attention alone
  echo compare-twilight # 240: likewise, with everything near, up to 64 sequences
  echo compare-prefill  # 90: three kernels
}

# compare NAME [option...]: of other libraries beside ours, in one call.
compare() {
  name=$1
  shift
  if ! "$python" -c 'import torch, sys; sys.exit(not torch.cuda.is_available())' 2>/dev/null; then
    skip "$name" "'$python' has no torch that sees a GPU; set RECORD_PYTHON"
    return
  fi
  "$python" "$root/tools/lab/compare/attention.py" "$@" --sluice "$sluice" -o json --output "$out/$name.json"
}

# A part that compare_parts names.
measure_compare() {
  case $1 in
    compare-decode)
      compare "$1" decode 8x32K 32x8K 4x128K 16x1K-128K \
        --options "--policies sluice --placements hybrid,near --steps 12 --warm-up 48 --layers 4"
      ;;
    compare-dense) compare "$1" decode 8K 4x8K 32x8K 40x8K 32K 8x32K 128K 4x128K 16x1K-128K ;;
    compare-twilight)
      compare "$1" decode 8K 4x8K 16x8K 64x8K 32K 4x32K 16x32K \
        --options "--policies 'twilight;quest' --placements near --steps 12 --warm-up 8 --layers 2"
      ;;
    compare-prefill) compare "$1" prefill 4K 16K 64K 128K --rounds 5 ;;
    *) return 1 ;;
  esac
}
