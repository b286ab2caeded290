#!/usr/bin/env bash
# compute-sanitizer over the small set of GPU tests; the record goes to the file named, or to a new one.
# Needs a GPU, CUDA's compute-sanitizer and pytest; PYTHON names the interpreter.
set -euo pipefail
cd "$(dirname "$0")/.."
export PYTHONSAFEPATH=1

out="${1:-bench/results/gpu-sanitizer-gpu-$(date +%F).json}"
"${PYTHON:-python3}" bench/gpu_tests.py --sanitizer "$out" "${@:2}"
