#!/usr/bin/env bash
# What a machine with one GPU has to prove, in under 10 minutes: the kernels are right there, and what they cost.
#     scripts/gpu_check.sh [directory for the logs, default: gpu_check]
# Uses the python of the environment (PYTHON=...); needs torch with CUDA, Triton, numpy and pytest, nothing of Megatron or SGLang.
set -uo pipefail
cd "$(dirname "$0")/.."
out=${1:-gpu_check}; python=${PYTHON:-python}; mkdir -p "$out"; status=0

check() {   # name, seconds, command...
    local name=$1 limit=$2; shift 2
    echo "== $name"
    timeout "$limit" "$@" 2>&1 | tee "$out/$name.log"
    local code=${PIPESTATUS[0]}
    [ "$code" -eq 0 ] || { echo "FAILED: $name (exit $code)"; status=1; }
}

"$python" -c 'import torch; assert torch.cuda.is_available(), "no CUDA device"; print(torch.__version__, torch.cuda.get_device_name())' || exit 2
check kernels 200 "$python" -m pytest -q -p no:cacheprovider --noconftest tests/logprobs/gpu_kernels.py
check logprob_bf16 120 "$python" benchmarks/logprob.py
check logprob_fp32 120 "$python" benchmarks/logprob.py --dtype float32 --tokens 4096
exit $status
