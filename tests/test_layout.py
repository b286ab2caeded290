"""The layout's traps: bare names that must not resolve to our folders, the mapping, the types."""

import os
import subprocess
import sys
import tomllib
from importlib.util import find_spec
from pathlib import Path

import pytest

import replayssm.core

ROOT = Path(__file__).resolve().parents[1]
LAYERS = ("core", "kernels", "adapters", "cli")
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
STRICT = "__editable__" in str(replayssm.core.__file__)

# Prints, for each name, the file and the folders it would be imported from, if any.
WHERE = """
import importlib.util, sys
for name in sys.argv[1:]:
    spec = importlib.util.find_spec(name)
    places = [spec.origin, *(spec.submodule_search_locations or ())] if spec else []
    print(name, *[place for place in places if place], sep="\\t")
"""


def packages_on_disk() -> dict[str, str]:
    """Import name of each package of the checkout, and its folder."""
    folders = (
        init.parent.relative_to(ROOT).as_posix()
        for layer in LAYERS
        for init in (ROOT / layer).rglob("__init__.py")
    )
    return {f"replayssm.{folder.replace('/', '.')}": folder for folder in folders}


def ours(places: list[str]) -> list[str]:
    """Those of `places` that lie in this checkout's own folders, the environment excepted."""
    folders = [ROOT / folder for folder in (*LAYERS, "tests", "bench", "examples")]
    return [place for place in places if any(Path(place).resolve().is_relative_to(f) for f in folders)]


def find(names: list[str], cwd: Path, **environment: str) -> dict[str, list[str]]:
    """Where a fresh interpreter, started in `cwd` with `-c`, would import `names` from."""
    printed = subprocess.run(
        [sys.executable, "-c", WHERE, *names],
        cwd=cwd,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    rows = (line.split("\t") for line in printed.splitlines())
    return {name: places for name, *places in rows}


BARE_NAMES = ["adapters", "bench", "cli", "core", "kernels", "sglang", "tests", "transformers"]


@pytest.mark.parametrize("cwd", [ROOT, ROOT / "adapters"], ids=["root", "adapters"])
def test_bare_names_are_not_ours(cwd: Path) -> None:
    found = find(BARE_NAMES, cwd, PYTHONSAFEPATH="1")
    assert {name: ours(places) for name, places in found.items() if ours(places)} == {}
    assert found["transformers"]


def test_the_trap_is_real() -> None:
    """Without the safe path the checkout's folders do shadow: the test above tests something."""
    found = find(["core", "kernels"], ROOT, PYTHONSAFEPATH="")
    assert ours(found["core"])
    assert ours(found["kernels"])


def test_an_installed_kernels_package_is_not_hidden(tmp_path: Path) -> None:
    """PyPI's `kernels`, which engines import, is seldom installed here: one of that name serves."""
    installed = tmp_path / "kernels" / "__init__.py"
    installed.parent.mkdir()
    installed.touch()
    found = find(["kernels"], ROOT, PYTHONSAFEPATH="1", PYTHONPATH=str(tmp_path))
    assert found["kernels"][0] == str(installed)


def test_transformers_imports_from_the_root_as_the_real_one() -> None:
    printed = subprocess.run(
        [sys.executable, "-c", "import transformers; print(transformers.__file__)"],
        cwd=ROOT,
        env={**os.environ, "PYTHONSAFEPATH": "1"},
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    assert not ours([printed.strip()])


# pytest's importlib mode names test modules `tests.core.test_policy`, so `tests` is there.
@pytest.mark.parametrize("name", sorted({*BARE_NAMES} - {"tests"}))
def test_bare_names_are_not_ours_under_pytest(name: str) -> None:
    spec = find_spec(name)
    places = [spec.origin, *(spec.submodule_search_locations or ())] if spec else []
    assert not ours([place for place in places if place]), (
        f"{name} would be imported from {places}: the checkout's root is on sys.path. "
        "Set PYTHONSAFEPATH=1, or start `pytest` rather than `python -m pytest`."
    )


def test_every_package_on_disk_is_mapped() -> None:
    setuptools = PYPROJECT["tool"]["setuptools"]
    on_disk = packages_on_disk()
    assert setuptools["package-dir"] == on_disk
    assert sorted(setuptools["packages"]) == sorted(on_disk)


def test_every_package_is_typed() -> None:
    untyped = [f for f in packages_on_disk().values() if not (ROOT / f / "py.typed").is_file()]
    assert untyped == [], "add an empty py.typed to these folders"


def test_every_top_package_is_type_checked() -> None:
    on_disk = packages_on_disk()
    top = {name for name in on_disk if name.rpartition(".")[0] not in on_disk}
    assert set(PYPROJECT["tool"]["mypy"]["packages"]) == top


def test_namespace_packages_stay_namespaces() -> None:
    """An `__init__` there would hide what other distributions add under `replayssm`."""
    assert not (ROOT / "adapters/__init__.py").exists()
    assert not (ROOT / "__init__.py").exists()
    assert not (ROOT / "replayssm").exists()


def test_type_checker_follows_the_mapping(tmp_path: Path) -> None:
    if os.environ.get("EXPECT_STRICT") == "1":
        assert STRICT, f"expected a strict editable install, found {replayssm.core.__file__}"
    if not STRICT:
        pytest.skip("needs `pip install --config-settings editable_mode=strict -e .`")
    snippet = tmp_path / "snippet.py"
    snippet.write_text(
        "from replayssm.core.policy import capacity\n"
        "rows: int = capacity(16, 4)\n"
        "wrong: int = capacity('sixteen', 4)\n"
    )
    # The project's configuration and cache: what `make lint` has analysed is not analysed again.
    options = ["--config-file", ROOT / "pyproject.toml", "--cache-dir", ROOT / ".mypy_cache"]
    result = subprocess.run(
        [sys.executable, "-m", "mypy", *options, "--no-error-summary", snippet],
        cwd=tmp_path,
        env={**os.environ, "PYTHONSAFEPATH": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    errors = [line for line in result.stdout.splitlines() if ": error: " in line]
    assert len(errors) == 1, result.stdout + result.stderr
    assert 'snippet.py:3: error: Argument 1 to "capacity"' in errors[0]
