#!/usr/bin/env bash
# All tests marked `gpu`; the record goes to the file named, or to a new one. More arguments go to pytest.
# Needs a GPU, pytest and pytest-xdist; PYTHON names the interpreter.
set -euo pipefail
cd "$(dirname "$0")/.."
export PYTHONSAFEPATH=1 OMP_NUM_THREADS=1

out="${1:-bench/results/gpu-tests-gpu-$(date +%F).json}"
workers="${WORKERS:-$(($(nproc) - 1))}"
"${PYTHON:-python3}" bench/gpu_tests.py "$out" -q -n "$workers" --dist worksteal -p no:cacheprovider "${@:2}"
