"""L27. The drift checker passes on the interface double and fails on each single mutation of it."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest

from replayssm.adapters.trtllm.contract import Attributes, Call, Function, Name, Target
from replayssm.adapters.trtllm.doctor import examine
from replayssm.adapters.trtllm.drift import differences, find, generation
from replayssm.adapters.trtllm.source import Module, Source
from replayssm.adapters.trtllm.targets import GENERATIONS
from tests.adapters.trtllm.generations import DOUBLES, copy

MODES = [(each.name, mode) for each in GENERATIONS for mode in each.modes]


class Mutation(NamedTuple):
    """One change of the double that the adapter could not work with."""

    target: Target
    what: str
    apply: Callable[[ast.Module], None]


def body(tree: ast.Module, name: str) -> list[ast.AST]:
    """The function, the method or the class of a dotted name; a class comes with its bases in the module."""
    found: list[ast.AST] = [tree]
    for part in name.split("."):
        inside = [node for each in found for node in getattr(each, "body", [])]
        found = [node for node in inside if getattr(node, "name", None) == part]
        for node in found:
            bases = [each.id for each in getattr(node, "bases", []) if isinstance(each, ast.Name)]
            found += [each for each in tree.body if getattr(each, "name", None) in bases]
    return found


def rename(tree: ast.Module, owner: str, name: str) -> None:
    """Rename what a module or class defines, imports, assigns or declares as `name`."""
    for root in body(tree, owner) if owner else [tree]:
        for node in ast.walk(root):
            if isinstance(node, ast.FunctionDef) and node.name == name:
                node.name = f"{name}_of_old"
            elif isinstance(node, ast.alias) and (node.asname or node.name) == name:
                node.asname = f"{name}_of_old"
            elif isinstance(node, ast.Attribute) and node.attr == name:
                node.attr = f"{name}_of_old"
            elif isinstance(node, ast.Name) and node.id == name:
                node.id = f"{name}_of_old"


def rename_parameter(tree: ast.Module, function: str, name: str) -> None:
    for node in body(tree, function)[:1]:
        assert isinstance(node, ast.FunctionDef)
        for argument in (*node.args.args, *node.args.kwonlyargs):
            if argument.arg == name:
                argument.arg = f"{name}_of_old"


def reverse_parameters(tree: ast.Module, function: str) -> None:
    for node in body(tree, function)[:1]:
        assert isinstance(node, ast.FunctionDef)
        first = int(node.args.args[0].arg == "self")
        node.args.args[first:] = node.args.args[first:][::-1]


def calls(tree: ast.Module, target: Call) -> list[ast.Call]:
    return [
        node for root in body(tree, target.inside)[:1] for node in ast.walk(root)
        if isinstance(node, ast.Call) and ast.unparse(node.func) == target.callee
    ]  # fmt: skip


def uncall(tree: ast.Module, target: Call) -> None:
    for node in calls(tree, target):
        node.func = ast.Name("another")


def one_more(tree: ast.Module, target: Call) -> None:
    calls(tree, target)[0].args.append(ast.Constant(0))


def rename_keyword(tree: ast.Module, target: Call, name: str) -> None:
    for keyword in calls(tree, target)[0].keywords:
        if keyword.arg == name:
            keyword.arg = f"{name}_of_old"


def mutations(target: Target) -> Iterator[Mutation]:
    match target:
        case Function():
            owner, _, name = target.name.rpartition(".")
            if not target.optional:
                yield Mutation(target, "gone", lambda tree: rename(tree, owner, name))
            for used in target.uses:
                yield Mutation(
                    target, f"no {used}", lambda tree, used=used: rename_parameter(tree, target.name, used)
                )
            if len([name for name in target.uses if name != "self"]) > 1 and "__init__" not in target.name:
                yield Mutation(target, "reversed", lambda tree: reverse_parameters(tree, target.name))
        case Name() if not target.optional:
            yield Mutation(target, "gone", lambda tree: rename(tree, "", target.name))
        case Attributes():
            for name in target.names:
                yield Mutation(target, f"no {name}", lambda tree, name=name: rename(tree, target.owner, name))
        case Call():
            yield Mutation(target, "not called", lambda tree: uncall(tree, target))
            yield Mutation(target, "one more argument", lambda tree: one_more(tree, target))
            for name in target.keywords:
                yield Mutation(
                    target, f"no {name}", lambda tree, name=name: rename_keyword(tree, target, name)
                )


def label(mutation: Mutation) -> str:
    target = mutation.target
    match target:
        case Function() | Name():
            return f"{target.name}: {mutation.what}"
        case Attributes():
            return f"{target.owner}: {mutation.what}"
        case Call():
            return f"{target.inside} calls {target.callee}: {mutation.what}"


def targets(name: str, mode: str) -> tuple[Target, ...]:
    found = next(each for each in GENERATIONS if each.name == name)
    return (*found.contract(mode, copies=mode == "own"), *(found.trees if mode == "own" else ()))


@pytest.fixture(scope="module", params=DOUBLES)
def source(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Source]:
    """A generation's double, and its name."""
    return request.param, Source(copy(tmp_path_factory.mktemp(request.param), request.param))


def test_every_generation_that_is_decoded_with_has_a_double() -> None:
    assert {name for name, _ in MODES} == set(DOUBLES)


def test_the_double_fits(source: tuple[str, Source]) -> None:
    name, package = source
    found = generation(package)
    assert found is not None
    assert (found.name, found.refused) == (name, "")
    for mode in found.modes:
        assert list(differences(package, targets(name, mode))) == [], mode


def test_each_single_mutation_is_found(source: tuple[str, Source]) -> None:
    """Of each double, for each mode; one failure names all that were missed."""
    name, package = source
    missed, tried = [], 0
    for mode in next(each for each in GENERATIONS if each.name == name).modes:
        contract = targets(name, mode)
        for mutation in (each for target in contract for each in mutations(target)):
            module = find(package, mutation.target.modules)
            assert module is not None
            if into_open_call(module, mutation) or lacking(module, mutation.target):
                continue
            tree = ast.parse(text_of(module))
            mutation.apply(tree)
            tried += 1
            changed = with_module(package, module, tree)
            if not any(each.matters for each in differences(changed, [mutation.target])):
                missed.append(f"{mode}: {label(mutation)}")
    assert not missed
    assert tried > 50


@cache
def text_of(module: Module) -> str:
    """To parse again, which is faster than to copy a tree."""
    return ast.unparse(module._tree)


def into_open_call(module: Module, mutation: Mutation) -> bool:
    """Whether an argument is left out where `**kwargs` may hold it, which nobody can tell."""
    target = mutation.target
    return (
        isinstance(target, Call)
        and mutation.what.startswith("no ")
        and module.calls(target.inside, target.callee)[0].open
    )


def lacking(module: Module, target: Target) -> bool:
    """Whether a target is not there, and need not be."""
    return isinstance(target, Function) and target.optional and module.parameters(target.name) is None


def test_what_releases_may_lack(tmp_path: Path) -> None:
    """The newest double has all of it; a function that is there has to fit."""
    package = Source(copy(tmp_path, "g4b"))
    optional = [
        target for mode in ("own", "borrow") for target in targets("g4b", mode)
        if isinstance(target, (Function, Name)) and target.optional
    ]  # fmt: skip
    assert len(optional) == 2
    for target in optional:
        module = find(package, target.modules)
        assert module is not None
        present = module.binds if isinstance(target, Name) else module.parameters
        assert present(target.name)
        tree = ast.parse(text_of(module))
        owner, _, name = target.name.rpartition(".")
        rename(tree, owner, name)
        assert list(differences(with_module(package, module, tree), [target])) == []


def with_module(package: Source, module: Module, tree: ast.Module) -> Source:
    """The package with another tree in place of a module's."""
    changed = Source(package.root)
    fresh = Module(module.name, tree)
    changed.module = lambda name: fresh if name == module.name else package.module(name)
    return changed


def test_a_module_that_is_gone_is_found(source: tuple[str, Source]) -> None:
    name, package = source
    for mode in next(each for each in GENERATIONS if each.name == name).modes:
        contract = targets(name, mode)
        for modules in {target.modules for target in contract}:
            without = Source(package.root)
            without.module = lambda each, gone=modules: None if each in gone else package.module(each)
            found = [each.where for each in differences(without, contract) if each.matters]
            assert any(" or ".join(modules) in where for where in found), (mode, modules)


def test_what_does_not_matter_is_reported_and_no_failure(tmp_path: Path) -> None:
    root = copy(tmp_path)
    file = root / "_torch/modules/mamba/mamba2_mixer.py"
    file.write_text(file.read_text().replace("lora_params=None,", "lora_params=None, extra=None,"))
    found = [each for each in examine(tmp_path) if "Mamba2Mixer.forward" in each.what]
    assert [(each.fine, "lora_params, extra" in each.detail) for each in found] == [(True, True)]
    assert all(each.fine for each in examine(tmp_path))


MANAGERS = "_torch/pyexecutor/mamba_cache_manager.py"
OLDER = {
    "g1": {MANAGERS: "class PythonMambaCacheManager: ...\n"},
    "g5a": {
        "_torch/pyexecutor/kv_cache/mamba_cache_manager/__init__.py": "_EXPORTS = {}\n",
        "_torch/pyexecutor/kv_cache/mamba_cache_manager/common.py": "class MambaStateUpdateStrategy: ...\n",
        "_torch/modules/mamba/cache_manager.py": "class Mamba2ReplayStateUpdateStrategy: ...\n",
    },
}


@pytest.mark.parametrize("name", OLDER)
def test_other_generations_are_told_apart_and_refused(name: str, tmp_path: Path) -> None:
    for file, text in OLDER[name].items():
        path = tmp_path / "tensorrt_llm" / file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    found = {each.what: each for each in examine(tmp_path)}
    assert not found["generation"].fine
    assert found["generation"].detail.startswith(f"{name}, seen in")
    served = "the open pull request #18843 at 3f4f8081, 1.4.0 release candidates after #18888, 1.4.0"
    assert f"expected {served} release candidates before #18888, 1.3.0rc20" in found["generation"].detail


def test_a_package_without_recurrent_states_is_refused(tmp_path: Path) -> None:
    (tmp_path / "tensorrt_llm/_torch").mkdir(parents=True)
    *_, last = examine(tmp_path)
    assert not last.fine
    assert "none of g0 (1.2), g1" in last.detail


def test_a_folder_without_the_package_is_refused(tmp_path: Path) -> None:
    (found,) = examine(tmp_path)
    assert not found.fine
    assert "--source names the folder of an unpacked wheel" in found.detail


def test_nothing_of_the_package_is_imported(tmp_path: Path) -> None:
    root = copy(tmp_path)
    for file in root.rglob("*.py"):
        file.write_text(file.read_text() + "\nraise SystemExit('imported')\n")
    assert all(each.fine for each in examine(root))
