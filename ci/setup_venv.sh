#!/usr/bin/env bash
# Creates .venv (or the folder given) with pinned dependencies and a strict editable install.
# Called by the Makefile when pyproject.toml, the constraints or this script have changed.
set -euo pipefail
cd "$(dirname "$0")/.."

venv="${1:-.venv}"
"${PYTHON:-python3}" -m venv "$venv"
pip=("$venv/bin/python" -m pip --disable-pip-version-check --quiet install)

# torch comes first, by its exact version: resolved later, through a range, it may be another build.
"${pip[@]}" -c ci/constraints.txt torch==2.13.0
# The build backend lives in the environment, so that relinking and the wheel test need no network.
"${pip[@]}" -c ci/constraints.txt setuptools wheel
"${pip[@]}" -c ci/constraints.txt --no-build-isolation \
    --config-settings editable_mode=strict -e '.[transformers,plot,triton,dev]'
