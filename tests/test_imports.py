"""Checks which package may import which; the folder listing is the architecture.

Imports under `if TYPE_CHECKING` do not count: they do not run.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
BASICS = {"core", "config", "errors"}
BACKEND_PARTS = {"backends.base", "backends.logits", "backends.memory"}
ONE_BACKEND = BASICS | BACKEND_PARTS | {"decoding", "kv", "models"}
SPECULATION = {
    "speculation.joining",
    "speculation.proposers",
    "speculation.costs",
    "speculation.policy",
    "speculation.session",
}

ALLOWED: dict[str, set[str]] = {
    "core": set(),
    "errors": set(),
    "stacks": set(),
    "structured": {"errors"},
    "config": {"errors", "structured"},
    "metrics": {"core"},
    "backends.base": {"core"},
    "backends.logits": set(),
    "backends.memory": set(),
    "backends.curve": {"core", "backends.base"},
    "decoding": BASICS | {"backends.base", "stacks", "structured"},
    "kv": {"backends.base"},
    "models": {"errors", "backends.base", "stacks", "structured"},
    "backends.native": ONE_BACKEND,
    "backends.torch": ONE_BACKEND,
    "backends.llamacpp": ONE_BACKEND,
    "backends": ONE_BACKEND | {"backends.native", "backends.torch", "backends.llamacpp"},
    "speculation.proposers": BASICS | {"backends.base", "decoding", "kv", "speculation.costs"},
    "speculation.costs": BASICS | {"backends.base", "decoding", "speculation.proposers", "outpace"},
    "speculation.policy": BASICS | {"decoding", "speculation.costs", "speculation.proposers"},
    "speculation.joining": {"core", "decoding", "speculation.proposers"},
    "speculation.session": {
        "core",
        "speculation.costs",
        "speculation.joining",
        "speculation.policy",
        "speculation.proposers",
    },
    "engine": BASICS | SPECULATION | {"backends.base", "decoding", "kv", "metrics"},
    "llm": BASICS | SPECULATION | {"backends", "decoding", "engine", "models"},
    "outpace": BASICS | {"llm", "structured"},
    "programs": BASICS | {"decoding", "kv", "llm", "models", "structured"},
    "server": BASICS
    | {"backends.base", "decoding", "engine", "llm", "metrics", "models", "outpace", "structured", "web"},
    "web": set(),
    "batch": BASICS | {"backends.base", "engine", "server"},
    "ray": BASICS | {"batch", "engine", "llm", "models", "outpace", "server"},
    "training": BASICS | {"backends.base", "backends.torch", "bench", "models"},
    "plan": BASICS
    | SPECULATION
    | {
        "backends",
        "backends.base",
        "backends.memory",
        "backends.native",
        "bench",
        "decoding",
        "models",
        "outpace",
        "web",
    },
    "bench": BASICS | SPECULATION | {"engine", "llm", "models", "outpace", "ray", "speculation", "web"},
}
ENTRY_POINTS = {"cli", "commands", "serve", "__main__"}  # may import any package


def package_of(module: str) -> str:
    """`backends` and `speculation` have packages inside; the top level is `outpace`."""
    parts = module.split(".")[1:]
    if not parts:
        return "outpace"
    return ".".join(parts[: 2 if parts[0] in ("backends", "speculation") else 1])


def imported(tree: ast.AST) -> Iterator[str]:
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test):
            continue
        if isinstance(node, ast.Import):
            yield from (name.name for name in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            for name in node.names:
                inner = f"{node.module}.{name.name}"
                path = ROOT.joinpath(*inner.split("."))
                yield inner if path.is_dir() or path.with_suffix(".py").is_file() else node.module
        yield from imported(node)


def modules() -> dict[str, ast.Module]:
    found = {}
    for path in sorted((ROOT / "outpace").rglob("*.py")):
        name = ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
        found[name] = ast.parse(path.read_text(encoding="utf-8"))
    return found


def refused(module: str, tree: ast.AST) -> list[str]:
    """Imports of this module that its package does not allow."""
    package = package_of(module)
    if package in ENTRY_POINTS:
        return []
    others = {package_of(name): name for name in imported(tree) if name.partition(".")[0] == "outpace"}
    return [name for other, name in others.items() if other != package and other not in ALLOWED[package]]


MODULES = modules()


def test_every_package_is_known():
    assert {package_of(module) for module in MODULES} - ENTRY_POINTS - {"speculation"} == set(ALLOWED)


@pytest.mark.parametrize("module", MODULES)
def test_a_module_imports_only_what_its_package_may(module: str):
    assert not refused(module, MODULES[module])


@pytest.mark.parametrize(
    ("module", "line"),
    [
        ("outpace.core", "from outpace.config import SamplingParams"),
        ("outpace.backends.native.runner", "from outpace.backends.torch import runner"),
        ("outpace.backends.torch.runner", "def load():\n    from outpace.engine.engine import Engine"),
        ("outpace.speculation.policy.policy", "import outpace.engine.scheduler"),
        ("outpace.kv.cache", "from outpace.models import hub"),
        ("outpace.plan.measure", "def run():\n    from outpace.engine.engine import Engine"),
        ("outpace.plan.html", "from outpace.server.app import create_app"),
    ],
)
def test_an_import_that_goes_the_wrong_way_is_found(module: str, line: str):
    assert refused(module, ast.parse(line))
