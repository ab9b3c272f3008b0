"""The build hook: what it asks pip for, and what it does when compilation fails. Hatchling is a stand-in here."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
REQUIREMENT = "ziglang==1"


class BuildHookInterface:
    def __class_getitem__(cls, _: object) -> type:
        return cls

    def __init__(self, target_name: str) -> None:
        self.root, self.target_name = str(ROOT), target_name
        self.warnings: list[str] = []
        self.app = SimpleNamespace(display_warning=self.warnings.append)


class NoCompiler(Exception):
    pass


class FakeBuilder:
    """In place of build.py on a machine without a compiler."""

    BuildError = NoCompiler

    def __init__(self, error: NoCompiler | None = None) -> None:
        self._error = error

    def build_requirements(self) -> list[str]:
        return [REQUIREMENT]

    def build(self) -> Path:
        if self._error is not None:
            raise self._error
        return Path("_native.so")


@pytest.fixture
def hook_module(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    name = "hatchling.builders.hooks.plugin.interface"
    interface = ModuleType(name)
    interface.BuildHookInterface = BuildHookInterface  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, name, interface)
    for setting in ("OUTPACE_NATIVE", "PIP_NO_INDEX", "UV_NO_INDEX", "UV_OFFLINE"):
        monkeypatch.delenv(setting, raising=False)
    spec = importlib.util.spec_from_file_location("outpace_hatch_build", ROOT / "hatch_build.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def hook(module: ModuleType, monkeypatch: pytest.MonkeyPatch, error: NoCompiler | None = None, target="wheel") -> Any:
    monkeypatch.setattr(module, "_load_builder", lambda path: FakeBuilder(error))
    return module.NativeBuildHook(target)


def test_a_wheel_asks_for_what_its_compilation_needs(hook_module, monkeypatch):
    assert hook(hook_module, monkeypatch).dependencies() == [REQUIREMENT]
    assert hook(hook_module, monkeypatch, target="sdist").dependencies() == []


def test_the_real_build_file_can_be_loaded_by_path(hook_module, monkeypatch):
    builder = hook_module._load_builder(ROOT / "outpace/backends/native/build.py")
    monkeypatch.setattr(builder, "find_system_compiler", lambda: None)
    monkeypatch.setattr(builder, "zig_target", lambda: "x86_64-linux-gnu")
    assert builder.build_requirements() == [builder.ZIG_REQUIREMENT]


def test_nothing_is_asked_for_if_the_library_is_not_wanted(hook_module, monkeypatch):
    monkeypatch.setenv("OUTPACE_NATIVE", "0")
    assert hook(hook_module, monkeypatch).dependencies() == []


@pytest.mark.parametrize("setting", ["PIP_NO_INDEX", "UV_NO_INDEX", "UV_OFFLINE"])
def test_without_an_index_the_compiler_is_asked_for_only_if_required(hook_module, monkeypatch, setting):
    monkeypatch.setenv(setting, "1")
    assert hook(hook_module, monkeypatch).dependencies() == []
    monkeypatch.setenv("OUTPACE_NATIVE", "1")
    assert hook(hook_module, monkeypatch).dependencies() == [REQUIREMENT]
    monkeypatch.delenv("OUTPACE_NATIVE")
    monkeypatch.setenv(setting, "0")
    assert hook(hook_module, monkeypatch).dependencies() == [REQUIREMENT]


def test_a_failed_compilation_gives_a_package_without_the_library(hook_module, monkeypatch):
    data: dict[str, Any] = {"artifacts": []}
    made = hook(hook_module, monkeypatch, NoCompiler("no working C++ compiler was found"))
    made.initialize("standard", data)
    assert data == {"artifacts": []}
    assert made.warnings == ["Outpace is installed without its native backend: no working C++ compiler was found"]


def test_a_failed_compilation_fails_the_build_if_the_library_is_required(hook_module, monkeypatch):
    monkeypatch.setenv("OUTPACE_NATIVE", "1")
    with pytest.raises(NoCompiler):
        hook(hook_module, monkeypatch, NoCompiler("no")).initialize("standard", {"artifacts": []})


def test_a_compiled_library_is_in_the_wheel_of_its_platform(hook_module, monkeypatch):
    data: dict[str, Any] = {"artifacts": []}
    hook(hook_module, monkeypatch).initialize("standard", data)
    assert data["artifacts"] == ["/outpace/backends/native/_native.so"]
    assert data["pure_python"] is False and data["tag"].startswith("py3-none-")


def test_ziglang_is_no_requirement_of_the_installed_package():
    assert "ziglang" not in (ROOT / "pyproject.toml").read_text()
