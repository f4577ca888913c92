#!/bin/sh
# Checks and measures everything on the GPU of this machine, in eight minutes at most; without one it says so and succeeds.
#   tests/gpu/check.sh [folder for the figures, default $OUT or .]        CHECK_DRY=1: tiny sizes in the interpreter instead
# Leaves kernels-*.json, check.json and tests.log there.  Needs torch, triton, transformers and pytest, and nothing of pagestream
# installed.  Every part has a time of its own and goes on after another's failure: the figures of a run are not to be had twice.
set -eu
cd "$(dirname "$0")/../.."
out="${1:-${OUT:-.}}"
mkdir -p "$out" build/typing
out="$(cd "$out" && pwd)"
ln -sfn ../.. build/typing/pagestream
PYTHONPATH="$PWD/build/typing:$PWD${PYTHONPATH:+:$PYTHONPATH}"
TRITON_DEFAULT_FP_FUSION="${TRITON_DEFAULT_FP_FUSION:-1}"
export PYTHONPATH TRITON_DEFAULT_FP_FUSION
python="${PYTHON:-python3}"
if [ -n "${CHECK_DRY:-}" ]; then
    TRITON_INTERPRET=1 "$python" tests/gpu/end_to_end.py --dry --json "$out/check.json"
    exit 0
fi
# All times below, with 3 seconds each for what does not end when told to, come to less than eight minutes.
found=0
look='import sys, torch; torch.cuda.is_available() or sys.exit(1); import triton; print(torch.cuda.get_device_name(), "torch", torch.__version__, "triton", triton.__version__)'
timeout -k 3 25 "$python" -c "$look" || found=$?
if [ "$found" -ge 124 ]; then
    echo "Python did not get as far as to look for a GPU"
    exit 1
elif [ "$found" -ne 0 ]; then
    echo "no GPU here: nothing to check"
    exit 0
fi
status=0
rm -f "$out"/kernels-*.json "$out/check.json"
scratch="$(mktemp -d)"
trap 'rm -rf "$scratch"' EXIT

# Numbers first: a fast wrong kernel is worth nothing.  Most of it is compiling, so many processes share the tests.
echo "== numbers"
count="$(nproc)"
if [ "$count" -gt 12 ]; then count=12; fi
index=0
pids=""
while [ "$index" -lt "$count" ]; do
    CHECK_SHARD="$index/$count" OMP_NUM_THREADS=2 timeout -k 3 120 "$python" -m pytest tests/gpu/test_kernels.py -q -p tests.gpu.shard \
        -p no:cacheprovider --noconftest -o addopts=--import-mode=importlib >"$scratch/tests-$index.log" 2>&1 &
    pids="$pids $!"
    index=$((index + 1))
done
index=0
for pid in $pids; do
    if ! wait "$pid"; then
        status=1
        grep -E '^(FAILED|ERROR|E  )' "$scratch/tests-$index.log" | head -20 || true
    fi
    tail -1 "$scratch/tests-$index.log"
    index=$((index + 1))
done
cat "$scratch"/tests-*.log >"$out/tests.log"

run() {  # name, seconds, command...
    echo "== $1"
    name="$1" limit="$2"
    shift 2
    timeout -k 3 "$limit" "$@" || { status=1; echo "$name did not finish well"; }
}
for part in decode prefill; do
    run "$part" 50 "$python" -m pagestream.kernels.bench --part "$part" --json "$out/kernels-$part.json" ${CHECK_QUICK:+--quick}
done
# With a cache of its own, for the start's time includes the compiling.
run "8B" 115 env TRITON_CACHE_DIR="$scratch/triton" "$python" tests/gpu/end_to_end.py --json "$out/check.json"
for part in variants other; do
    run "$part" 38 "$python" -m pagestream.kernels.bench --part "$part" --json "$out/kernels-$part.json" ${CHECK_QUICK:+--quick}
done
run "goals" 10 "$python" tests/gpu/goals.py "$out"
exit "$status"
