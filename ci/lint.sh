#!/usr/bin/env bash
# Style, formatting and types. Needs the environment that `make` sets up.
set -euo pipefail
cd "$(dirname "$0")/.."
export PYTHONSAFEPATH=1

bin="${VENV:-.venv}/bin"
"$bin/ruff" check .
"$bin/ruff" format --check .
"$bin/clang-format" --dry-run -Werror kernels/cuda_backend/*.cu* tests/kernels/emulator/*.hpp
"$bin/mypy"
