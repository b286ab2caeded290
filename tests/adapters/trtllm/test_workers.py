"""From the command line to a worker process: the folder, the file, and a model's class that carries both."""

from __future__ import annotations

import os
import pickle
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from replayssm.adapters.trtllm.settings import ENV_CONFIG, Settings, read
from replayssm.cli.main import app
from tests.adapters.trtllm import processes
from tests.adapters.trtllm.generations import DOUBLE, DOUBLES

# As `trtllm-serve` and what it hands its workers: the classes themselves, or in newer releases module names.
LAUNCH = """
import importlib, pickle, sys
from pathlib import Path
folder = Path(sys.argv[1])
sys.path.insert(0, str(folder.parent))
importlib.import_module(folder.name)
from tensorrt_llm._torch.models import modeling_utils as models
export = getattr(models, "export_external_model_modules", None)
sys.stdout.buffer.write(pickle.dumps(models.MODEL_CLASS_MAPPING if export is None else export()))
"""
# As an MPI worker: its path and TRTLLM variables are the launcher's, and it looks up the model it serves.
WORK = """
import pickle, pkgutil, sys
sent = pickle.load(sys.stdin.buffer)
from tensorrt_llm._torch.models import modeling_utils as models
if hasattr(models, "register_external_model_modules"):
    models.register_external_model_modules(sent)
    served = models.get_registered_model_class("Qwen3NextForCausalLM")
else:
    models.MODEL_CLASS_MAPPING.update(sent)
    served = models.MODEL_CLASS_MAPPING["Qwen3NextForCausalLM"]
manager = pkgutil.resolve_name(f"tensorrt_llm._torch.pyexecutor.{sys.argv[1]}")
patched = hasattr(manager.__init__, "_replayssm_original")
print(patched, served.__module__, *sorted(models.MODEL_CLASS_MAPPING))
"""
MANAGER = {
    "g0": "mamba_cache_manager:MambaCacheManager",
    "g2": "mamba_cache_manager:CppMambaHybridCacheManager",
    "g3": "mamba_cache_manager:CppMambaHybridCacheManager",
    "g4": "kv_cache.mamba_cache_manager:CppMambaHybridCacheManager",
    "g4b": "kv_cache.mamba_cache_manager:CppMambaHybridCacheManager",
    "g5": "kv_cache.mamba_cache_manager:MambaHybridCacheManagerV2",
}


def replayssm(*arguments: str | Path) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["trtllm", *map(str, arguments)])
    return result.exit_code, result.output


def run(
    script: str, *arguments: str, stdin: bytes = b"", engine: Path = DOUBLE, **environment: str
) -> subprocess.CompletedProcess[bytes]:
    own = {name: value for name, value in os.environ.items() if not name.startswith("TRTLLM")}
    return processes.run(script, arguments, stdin, engine, {**own, **environment})


@pytest.fixture
def config(tmp_path: Path) -> str:
    path = tmp_path / "adapter.yaml"
    path.write_text("window: 8\nbackend: torch\n")
    return str(path)


def module_dir() -> str:
    status, output = replayssm("module-dir")
    assert status == 0
    return output.strip()


def test_the_folder_puts_one_name_on_the_path() -> None:
    """Its parent goes on the engine's path: nothing there may hide a package of that name."""
    folder = Path(module_dir())
    assert folder.name == "replayssm_trtllm"
    importable = {
        path.name
        for path in folder.parent.iterdir()
        if path.suffix == ".py" or (path.is_dir() and path.name != "__pycache__")
    }
    assert importable == {"__init__.py", "replayssm_trtllm"}


@pytest.mark.parametrize("name", DOUBLES)
def test_workers_are_patched_by_what_the_launcher_sends(
    name: str, config: str, doubles: dict[str, Path]
) -> None:
    """And one that the variable does not reach, as under some launchers, is never silently without replay."""
    engine, ours = doubles[name], "replayssm.adapters.trtllm.served_models"
    launched = run(LAUNCH, module_dir(), engine=engine, **{ENV_CONFIG: config})
    assert launched.returncode == 0, launched.stderr.decode()
    worked = run(WORK, MANAGER[name], stdin=launched.stdout, engine=engine, **{ENV_CONFIG: config})
    assert worked.returncode == 0, worked.stderr.decode()
    models = ["NemotronHForCausalLM", "Qwen3NextForCausalLM"]
    assert worked.stdout.decode().split() == ["True", ours, *models]
    assert f"replayssm: active in TensorRT-LLM {name}, ".encode() in worked.stderr
    if name in ("g3", "g4b"):
        forgotten = run(WORK, MANAGER[name], stdin=launched.stdout, engine=engine)
        assert forgotten.returncode != 0
        assert b"TRTLLM_REPLAYSSM_CONFIG is not set" in forgotten.stderr


def test_a_launch_without_settings_fails() -> None:
    launched = run(LAUNCH, module_dir())
    assert launched.returncode != 0
    assert b"`replayssm trtllm init MODEL` writes one" in launched.stderr


def test_a_launch_where_no_model_is_known_fails(config: str) -> None:
    emptied = "import tensorrt_llm._torch.models.modeling_utils as utils\nimport tensorrt_llm._torch.models\n"
    launched = run(
        f"{emptied}utils.MODEL_CLASS_MAPPING.clear()\n{LAUNCH}", module_dir(), **{ENV_CONFIG: config}
    )
    assert launched.returncode != 0
    assert b"worker processes would decode without the adapter" in launched.stderr


def test_importing_the_adapter_patches_nothing(config: str) -> None:
    imports = "import replayssm.adapters.trtllm.doctor, replayssm.adapters.trtllm.module_dir, sys\n"
    result = run(f"{imports}print('tensorrt_llm' in sys.modules)", **{ENV_CONFIG: config})
    assert result.stdout.split() == [b"False"], result.stderr.decode()


def test_what_prepares_a_models_inputs_is_found_by_its_new_class(config: str) -> None:
    """Or requests with images would become requests of text."""
    before = """
from tensorrt_llm._torch.models.modeling_qwen3_next import Qwen3NextForCausalLM
from tensorrt_llm.inputs.registry import INPUT_PROCESSOR_REGISTRY
INPUT_PROCESSOR_REGISTRY._input_processors_cls_by_model_type[Qwen3NextForCausalLM] = dict
"""
    behind = """
known = INPUT_PROCESSOR_REGISTRY._input_processors_cls_by_model_type
print([(cls.__name__, kind) for cls, kind in known.items() if "replayssm" in cls.__module__])
"""
    launch = LAUNCH.rpartition("sys.stdout")[0]
    launched = run(before + launch + behind, module_dir(), **{ENV_CONFIG: config})
    assert launched.returncode == 0, launched.stderr.decode()
    assert launched.stdout.decode().strip() == "[('Qwen3NextForCausalLM', <class 'dict'>)]"


@pytest.mark.usefixtures("double")
def test_classes_are_the_engines_own_under_another_module(
    config: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(ENV_CONFIG, config)
    from tensorrt_llm._torch.models.modeling_nemotron_h import NemotronHForCausalLM
    from tensorrt_llm._torch.models.modeling_utils import MODEL_CLASS_MAPPING

    from replayssm.adapters.trtllm import served_models

    ours = MODEL_CLASS_MAPPING["NemotronHForCausalLM"]
    assert ours is vars(served_models)["NemotronHForCausalLM"]
    assert ours.__mro__[1] is NemotronHForCausalLM
    assert pickle.loads(pickle.dumps(ours)) is ours


def test_init_writes_the_file_and_prints_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    status, output = replayssm("init", "nvidia/a model")
    assert status == 0
    assert read(tmp_path / "adapter.yaml") == Settings(16, "auto", None, None)
    assert shlex.split(output) == [
        f"{ENV_CONFIG}={tmp_path / 'adapter.yaml'}",
        "trtllm-serve",
        "nvidia/a model",
        "--custom_module_dirs",
        module_dir(),
    ]


def test_init_overwrites_nothing(tmp_path: Path) -> None:
    target = tmp_path / "mine.yaml"
    target.write_text("window: 4")
    status, output = replayssm("init", "model", "--output", target)
    assert (status, target.read_text()) == (2, "window: 4")
    assert "exists: move it away" in output
    status, output = replayssm("init", "model", "--output", tmp_path / "none" / "adapter.yaml")
    assert status == 2
    assert "No such file or directory; name another" in output


# As a worker of another launcher: a folder of packages with the .pth file, then the engine alone.
START = """
import pkgutil, site, sys
site.addsitedir(sys.argv[1])
import tensorrt_llm._torch.models as models
from tensorrt_llm._torch.models.modeling_utils import MODEL_CLASS_MAPPING
manager = pkgutil.resolve_name(f"tensorrt_llm._torch.pyexecutor.{sys.argv[2]}")
patched = hasattr(manager.__init__, "_replayssm_original")
print(patched, type(models.__spec__.loader).__name__, "replayssm.adapters.trtllm" in sys.modules)
"""


@pytest.fixture
def packages(tmp_path: Path) -> str:
    code, line = replayssm("pth")
    assert code == 0
    (tmp_path / "packages").mkdir()
    (tmp_path / "packages" / "replayssm_trtllm.pth").write_text(line)
    return str(tmp_path / "packages")


def test_printing_the_line_watches_nothing_in_this_process(packages: str) -> None:
    assert not [finder for finder in sys.meta_path if type(finder).__module__.startswith("replayssm")]


def test_a_pth_file_activates_it_behind_the_models(
    packages: str, config: str, doubles: dict[str, Path]
) -> None:
    """Also where the models' package imports none of them."""
    done = run(START, packages, MANAGER["g4b"], engine=doubles["g4b"], **{ENV_CONFIG: config})
    assert done.stdout.split() == [b"True", b"SourceFileLoader", b"True"], done.stderr


def test_without_the_variable_a_pth_file_does_nothing(packages: str) -> None:
    done = run(START, packages, MANAGER["g3"])
    assert done.stdout.split() == [b"False", b"SourceFileLoader", b"False"], done.stderr


def test_with_wrong_settings_a_pth_file_ends_the_process(packages: str, tmp_path: Path) -> None:
    wrong = tmp_path / "wrong.yaml"
    wrong.write_text("windows: 8\n")
    done = run(START, packages, MANAGER["g3"], **{ENV_CONFIG: str(wrong)})
    assert done.returncode != 0
    assert b"windows" in done.stderr
