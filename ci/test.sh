#!/usr/bin/env bash
# All checks: lint, types, tests, then the transformers adapter at the oldest version it supports, and the
# SGLang adapter with the real SGLang. Needs the environment that `make` sets up. With COVERAGE=1 the first
# tests take a third longer and end with a table of the lines that none of them ran.
set -euo pipefail
cd "$(dirname "$0")/.."

venv="${VENV:-.venv}"
floor_version=5.19.0
floor="$PWD/$venv/floor"
newest_version="$(sed -n 's/^transformers==//p' ci/constraints.txt)"

export PYTHONSAFEPATH=1
export HF_HUB_OFFLINE=1
# One thread per xdist worker; more would only contend for the same cores.
export OMP_NUM_THREADS=1
# Tests that can run only in a strict editable install must not skip themselves here.
export EXPECT_STRICT=1

ci/lint.sh

echo "== tests, transformers $newest_version"
EXPECT_TRANSFORMERS="$newest_version" \
    "$venv/bin/pytest" -n 2 --dist worksteal ${COVERAGE:+--cov --cov-report=term}

if [ -d tests/adapters/transformers ]; then
    if [ ! -d "$floor/transformers-$floor_version.dist-info" ]; then
        rm -rf "$floor"
        "$venv/bin/python" -m pip --disable-pip-version-check --quiet install \
            --no-deps --target "$floor" "transformers==$floor_version"
    fi
    echo "== the transformers adapter's tests, transformers $floor_version"
    # No trailing colon: an empty entry would put the checkout's root on the path.
    PYTHONPATH="$floor${PYTHONPATH:+:$PYTHONPATH}" EXPECT_TRANSFORMERS="$floor_version" \
        "$venv/bin/pytest" -n 2 --dist worksteal -m "not one_version" tests/adapters/transformers
fi

if [ -d tests/adapters/sglang ]; then
    ci/sglang.sh
fi
