#!/usr/bin/env bash
# Everything that needs a GPU, in under ten minutes: build, GPU tests, memory checker, benchmarks.
#
#     bench/gpu_check.sh             on a machine with a GPU, torch with CUDA, Triton and nvcc; nothing is downloaded
#     bench/gpu_check.sh --dry-run   the same parts as far as a CPU goes: emulator, interpreter, toy shapes
#
# Each part has a time limit of its own and fails alone. Printed last: failures with the end of their output, then
# one short table. OUT (default ./gpu_check_out) gets gpu_check.json, gpu_check.log, bench.json and bench.html.
# PYTHON names the interpreter (default python3), GPU_CHECK_SECONDS the limit for everything
# (default 570; 3600 for a dry run, where two shared cores emulate every kernel).
set -u
cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit 2

dry=no
case "${1:-}" in
  "") ;;
  --dry-run) dry=yes ;;
  *) echo "usage: bench/gpu_check.sh [--dry-run]" >&2; exit 2 ;;
esac
out=${OUT:-$PWD/gpu_check_out}
python=${PYTHON:-python3}
total=${GPU_CHECK_SECONDS:-$([ "$dry" = yes ] && echo 3600 || echo 570)}
logs=$(mktemp -d)
trap 'rm -rf "$logs"' EXIT
mkdir -p "$out"
[ -n "${OUT:-}" ] || echo '*' >"$out/.gitignore"
rm -f "$out"/gpu_check.json "$out"/gpu_check.log "$out"/bench.json "$out"/bench.html
names=() states=() times=() reasons=()

record() { # name state seconds reason
  names+=("$1") states+=("$2") times+=("$3")
  reasons+=("$(printf %s "$4" | tr -d '"\\' | tr -c '[:print:]' ' ' | cut -c 1-160)")
  printf '%-10s %-5s %4s s  %s\n' "$1" "$2" "$3" "${reasons[-1]}" >&2
}

# A part: name, seconds, command. Status 77 means skipped, with the reason on its last line.
part() {
  local name=$1 limit=$2 start=$SECONDS code last state
  shift 2
  ((limit > total - SECONDS)) && limit=$((total - SECONDS))
  if ((limit < 1)); then
    record "$name" FAIL 0 "not run: the $total s for everything are used up"
    return
  fi
  timeout --kill-after=5 "$limit" "$@" >"$logs/$name" 2>&1
  code=$?
  last=$(grep -v '^[[:space:]]*$' "$logs/$name" | tail -n 1)
  case $code in
    0) state=ok ;;
    77) state=skip ;;
    124 | 137) state=FAIL last="stopped at its limit of $limit s" ;;
    *) state=FAIL last="exit status $code: $last" ;;
  esac
  record "$name" "$state" $((SECONDS - start)) "$last"
}

# compute-sanitizer over the driver. The caching allocator would hide an access past the end of a tensor.
sanitizer() { # tool, then the driver's arguments
  local tool=$1 code
  shift
  if [ "$dry" = yes ]; then
    "$python" bench/gpu_driver.py --device cpu "$@" && echo "driver only: compute-sanitizer needs a GPU"
    return
  fi
  PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --tool "$tool" --error-exitcode 9 --print-limit 20 \
    "$python" bench/gpu_driver.py --device cuda "$@" >"$logs/sanitizer" 2>&1
  code=$?
  cat "$logs/sanitizer"
  if grep -q "Device not supported" "$logs/sanitizer"; then
    echo "compute-sanitizer: device not supported on this machine"
    return 77
  fi
  return $code
}
export -f sanitizer
export python dry logs

if [ "$dry" = yes ]; then
  part machine 120 "$python" -m pyops info
  part build 900 env PYOPS_CUDA=0 "$python" setup.py build_ext --inplace
  part tests 2400 "$python" -m pytest -q -m "gpu or not slow" tests/cuda tests/triton
  part memcheck 60 bash -c 'sanitizer memcheck --only directions --only step --only tubal'
  part racecheck 60 bash -c 'sanitizer racecheck --only directions --only step --only tubal'
  part bench 700 "$python" -m pyops bench --tiny --rounds 1 --no-memory --out "$out"
  part triton 60 bash -c 'sanitizer memcheck --only polar'
  part attention 120 bash -c 'sanitizer memcheck --only attention'
  part boxes 90 bash -c 'sanitizer memcheck --only boxes'
else
  part machine 20 nvidia-smi --query-gpu=name,driver_version,memory.total --format=csv,noheader
  part build 150 env PYOPS_CUDA=1 "$python" -m pip install --no-build-isolation --no-deps --editable .
  part tests 150 "$python" -m pytest -q -m gpu tests
  part memcheck 60 bash -c 'sanitizer memcheck --only directions --only step --only tubal'
  part racecheck 60 bash -c 'sanitizer racecheck --only directions --only step --only tubal'
  part bench 200 "$python" -m pyops bench --quick --device cuda --out "$out"
  # last: these compile every Triton kernel again
  part triton 90 bash -c 'sanitizer memcheck --only polar'
  part attention 120 bash -c 'sanitizer memcheck --only attention'
  part boxes 90 bash -c 'sanitizer memcheck --only boxes'
fi

failed=0
{
  printf '{"dry_run": %s, "seconds": %d, "parts": [' "$([ "$dry" = yes ] && echo true || echo false)" "$SECONDS"
  for i in "${!names[@]}"; do
    ((i)) && printf ', '
    printf '{"name": "%s", "state": "%s", "seconds": %d, "reason": "%s"}' \
      "${names[i]}" "${states[i]}" "${times[i]}" "${reasons[i]}"
  done
  printf ']}\n'
} >"$out/gpu_check.json.part" && mv "$out/gpu_check.json.part" "$out/gpu_check.json"
for name in "${names[@]}"; do
  printf '===== %s\n' "$name"
  [ -f "$logs/$name" ] && cat "$logs/$name"
done >"$out/gpu_check.log"

for i in "${!names[@]}"; do
  if [ "${states[i]}" = FAIL ]; then
    failed=1
    printf '\n===== FAIL %s: %s\n' "${names[i]}" "${reasons[i]}"
    [ -f "$logs/${names[i]}" ] && tail -n 40 "$logs/${names[i]}"
  fi
done
if [ -s "$out/bench.html" ]; then
  printf '\n===== benchmarks\n'
  grep -v '^written: ' "$logs/bench" | tail -n 40
fi
printf '\n%-10s %-5s %6s  %s\n' part state s reason
for i in "${!names[@]}"; do
  printf '%-10s %-5s %6d  %s\n' "${names[i]}" "${states[i]}" "${times[i]}" "${reasons[i]}"
done
exit $failed
