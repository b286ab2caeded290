#!/usr/bin/env bash
# The adapter for TensorRT-LLM with the real engine: doctor, tokens with and without the adapter, MTP, throughput.
# For a container that has tensorrt_llm and a GPU; see docs/trtllm.md. Arguments: the record's file, or nothing,
# then options of bench/trtllm_proof.py, --model first of all. PYTHON names the interpreter.
set -euo pipefail
cd "$(dirname "$0")/.."
export PYTHONSAFEPATH=1

out="bench/results/gpu-trtllm-gpu-$(date +%F).json"
if [[ $# -gt 0 && "$1" != --* ]]; then
    out="$1"
    shift
fi
"${PYTHON:-python3}" bench/trtllm_proof.py "$out" "$@"
