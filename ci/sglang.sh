#!/usr/bin/env bash
# The SGLang adapter's tests, and those of parity, with the real SGLang, on a CPU. Needs the environment that
# `make` sets up, and makes one beside it that has SGLang's own packages in front. Arguments go to pytest.
set -euo pipefail
cd "$(dirname "$0")/.."

venv="${VENV:-.venv}"
base="$(cd "$venv" && pwd)"
own="$base/sglang"
export PYTHONSAFEPATH=1 HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1

if ! cmp -s ci/sglang-requirements.txt "$own/.installed"; then
    rm -rf "$own"
    "$base/bin/python" -m venv "$own"
    packages="$("$own/bin/python" -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])')"
    "$own/bin/python" -m pip --disable-pip-version-check --quiet install --no-deps \
        -r ci/sglang-requirements.txt
    # Read last, so that what is in both comes from this environment.
    shared="$("$base/bin/python" -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])')"
    echo "import site; site.addsitedir('$shared')" > "$packages/zz_shared.pth"
    cp ci/sglang-requirements.txt "$own/.installed"
fi

echo "== the SGLang adapter's tests and those of parity, $(sed -n 's/^sglang==/SGLang /p' ci/sglang-requirements.txt)"
# torchvision has no build for a CPU that fits; see the stand-in.
PYTHONPATH="$PWD/tests/adapters/sglang/stubs" EXPECT_SGLANG=1 \
    "$own/bin/python" -m pytest -n 2 --dist worksteal tests/adapters/sglang tests/parity "$@"
