"""The wheel: every file of the packages under its mapped name, nothing else, and it imports."""

import os
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
LAYERS = ("core", "kernels", "adapters", "cli")
SHIPPED = ("*.py", "py.typed", "*.json", "*.cu", "*.cuh")
IMPORTED = (
    "replayssm.core",
    "replayssm.kernels",
    "replayssm.kernels.torch_backend",
    "replayssm.kernels.cuda_backend.build",
    "replayssm.adapters.transformers",
    "replayssm.cli.main",
)


def shipped_files() -> set[str]:
    """Names that the wheel must have, from what lies in the checkout."""
    return {
        f"replayssm/{path.relative_to(ROOT).as_posix()}"
        for layer in LAYERS
        for pattern in SHIPPED
        for path in (ROOT / layer).rglob(pattern)
    }


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel built without network from a copy: a `build/` left in the checkout would leak in."""
    source = tmp_path_factory.mktemp("source")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    for layer in LAYERS:
        ignore = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / layer, source / layer, ignore=ignore)
    target = tmp_path_factory.mktemp("wheel")
    pip("wheel", "--no-build-isolation", "--wheel-dir", target, source)
    (built,) = target.glob("*.whl")
    return built


def pip(command: str, *arguments: str | Path) -> None:
    result = subprocess.run(
        [sys.executable, "-m", "pip", command, "--no-deps", "--no-index", *arguments],
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stdout + result.stderr


def test_wheel_has_each_file_and_no_other(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = {name for name in archive.namelist() if not name.endswith("/")}
    packaged = {name for name in names if ".dist-info/" not in name}
    expected = shipped_files()
    assert packaged == expected, (
        f"missing: {sorted(expected - packaged)}; unexpected: {sorted(packaged - expected)}"
    )


def test_wheel_is_pure_and_carries_the_licence(wheel: Path) -> None:
    assert wheel.name.endswith("-py3-none-any.whl")
    with zipfile.ZipFile(wheel) as archive:
        top = {name.split("/")[0] for name in archive.namelist()}
        licences = [name for name in archive.namelist() if name.endswith("licenses/LICENSE")]
        metadata = next(name for name in archive.namelist() if name.endswith("/METADATA"))
        text = archive.read(metadata).decode()
    assert top == {"replayssm", metadata.split("/")[0]}
    assert len(licences) == 1
    assert "License-Expression: Apache-2.0" in text
    for extra in ("transformers", "sglang", "trtllm", "flashinfer", "cuda", "triton", "plot", "dev"):
        assert f"Provides-Extra: {extra}\n" in text


def test_wheel_imports_without_the_checkout(wheel: Path, tmp_path: Path) -> None:
    target = tmp_path / "site"
    pip("install", "--target", target, wheel)
    # `-S` leaves .pth files unread, and with them any editable install; the dependencies' folder
    # is put on the path by hand.
    paths = sysconfig.get_paths()
    search = [os.environ.get("PYTHONPATH"), str(target), paths["purelib"], paths["platlib"]]
    script = (
        "import importlib, sys\n"
        "for name in sys.argv[1:]:\n"
        "    print(name, importlib.import_module(name).__file__)\n"
        "assert callable(sys.modules['replayssm.cli.main'].app)\n"
        "build = sys.modules['replayssm.kernels.cuda_backend.build']\n"
        "for config in (build.StepConfig, build.SmallConfig):\n"
        "    assert 'replay_step' in build.source(config)\n"
    )
    result = subprocess.run(
        [sys.executable, "-S", "-c", script, *IMPORTED],
        cwd=tmp_path,
        env={
            **os.environ,
            "PYTHONSAFEPATH": "1",
            "PYTHONPATH": os.pathsep.join(entry for entry in search if entry),
        },
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    for line in result.stdout.splitlines():
        name, file = line.split(maxsplit=1)
        assert Path(file).is_relative_to(target), f"{name} came from {file}"
