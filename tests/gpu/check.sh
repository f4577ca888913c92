#!/bin/sh
# Checks and measures the kernels on the GPU of this machine; on a machine without one it says so and succeeds.
#   tests/gpu/check.sh [folder for the figures, default $OUT or .]
# About six minutes on a large GPU.  Needs torch, triton and pytest only, and nothing installed of pagestream itself.
set -eu
cd "$(dirname "$0")/../.."
out="${1:-${OUT:-.}}"
mkdir -p "$out" build/typing
ln -sfn ../.. build/typing/pagestream
PYTHONPATH="$PWD/build/typing${PYTHONPATH:+:$PYTHONPATH}"
TRITON_DEFAULT_FP_FUSION="${TRITON_DEFAULT_FP_FUSION:-1}"
export PYTHONPATH TRITON_DEFAULT_FP_FUSION
python="${PYTHON:-python3}"
if ! "$python" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())'; then
    echo "no GPU here: nothing to check"
    exit 0
fi
"$python" -c 'import torch, triton; print(torch.cuda.get_device_name(), "torch", torch.__version__, "triton", triton.__version__)'
# Numbers first: a fast wrong kernel is worth nothing.
"$python" -m pytest tests/gpu -q -p no:cacheprovider --noconftest -o addopts=--import-mode=importlib
"$python" -m pagestream.kernels.bench --json "$out/kernels.json" ${CHECK_QUICK:+--quick}
