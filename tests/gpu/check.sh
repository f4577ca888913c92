#!/bin/sh
# Checks and measures everything on the GPU of this machine, in eight minutes at most; without one it says so and succeeds.
#   tests/gpu/check.sh [folder for the figures, default $OUT or .]        CHECK_DRY=1: tiny sizes in the interpreter instead
# Writes check.json there.  Needs torch, triton, transformers and pytest only, and nothing installed of pagestream itself.
set -eu
cd "$(dirname "$0")/../.."
out="${1:-${OUT:-.}}"
mkdir -p "$out" build/typing
ln -sfn ../.. build/typing/pagestream
PYTHONPATH="$PWD/build/typing${PYTHONPATH:+:$PYTHONPATH}"
TRITON_DEFAULT_FP_FUSION="${TRITON_DEFAULT_FP_FUSION:-1}"
export PYTHONPATH TRITON_DEFAULT_FP_FUSION
python="${PYTHON:-python3}"
if [ -n "${CHECK_DRY:-}" ]; then
    TRITON_INTERPRET=1 "$python" tests/gpu/end_to_end.py --dry --json "$out/check.json"
    exit 0
fi
if ! "$python" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())'; then
    echo "no GPU here: nothing to check"
    exit 0
fi
"$python" -c 'import torch, triton; print(torch.cuda.get_device_name(), "torch", torch.__version__, "triton", triton.__version__)'
# Numbers first: a fast wrong kernel is worth nothing.  Each part has its share of the time, so that the last one is reached.
timeout 150 "$python" -m pytest tests/gpu -q -p no:cacheprovider --noconftest -o addopts=--import-mode=importlib
timeout 170 "$python" -m pagestream.kernels.bench --json "$out/kernels.json" ${CHECK_QUICK:+--quick} || echo "kernels.bench did not finish"
timeout 155 "$python" tests/gpu/end_to_end.py --json "$out/check.json" --kernels "$out/kernels.json"
