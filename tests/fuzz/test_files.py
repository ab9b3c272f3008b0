"""A short run of the fuzzer of model files. `python -m tests.fuzz.files` is the long one."""

from __future__ import annotations

import random
from collections import Counter
from pathlib import Path

import pytest

from tests.fuzz.files import SECONDS, TARGETS, available, trials
from tests.fuzz.jail import Jail
from tests.tiny_folder import write_folder
from tests.tiny_gguf import write_model

COUNT = 40


def test_hostile_files_run_or_are_refused_with_one_sentence(tmp_path):
    kinds: Counter[str] = Counter()
    for trial in trials(0, range(COUNT), tmp_path):
        kinds[trial.outcome.kind] += 1
        assert trial.outcome.is_fine, f"{trial.target.name}, --seed 0 --only {trial.number}: {trial.outcome}"
    assert kinds["ran"] and kinds["refused"] > COUNT // 3  # the changes matter, and do not always break a file


def test_files_without_harm_run_to_the_end(tmp_path):
    """Otherwise a fuzzer never reaches what a file can break later: a folder's prompt was too long for its context."""
    with Jail(tmp_path / "cache", SECONDS) as jail:
        outcomes = {"gguf": jail.attempt("gguf", write_model(tmp_path / "llama.gguf", "llama"))}
        if any(target.backend == "torch" for target in available()):
            (tmp_path / "folder").mkdir()
            outcomes["folder"] = jail.attempt("folder", write_folder(tmp_path / "folder"), "torch")
    assert {outcome.kind for outcome in outcomes.values()} == {"ran"}, outcomes


@pytest.mark.parametrize("target", available(), ids=lambda target: target.name)
def test_a_file_depends_only_on_the_seed(tmp_path, target):
    def content(folder: Path) -> list[bytes]:
        folder.mkdir(exist_ok=True)
        written = target.write(random.Random("1 2"), folder)
        return [each.read_bytes() for each in sorted(written.iterdir())] if written.is_dir() else [written.read_bytes()]

    assert content(tmp_path / "a") == content(tmp_path / "b")
    assert {each.kind for each in TARGETS} == {"gguf", "folder", "template"}


@pytest.mark.parametrize(
    ("kind", "code"),
    [
        ("abort", "import os; os.abort()"),
        ("hang", "import time; time.sleep(60)"),
        ("traceback", "raise KeyError('x')"),
        ("ugly", "from outpace.errors import ModelError; raise ModelError('no')"),
    ],
)
def test_every_failure_is_seen(tmp_path, kind, code):
    program = f"from tests.fuzz import worker\ndef fail(path):\n    {code}\nworker.try_template = fail\nworker.main()"
    with Jail(tmp_path / "cache", 2.0, ("-c", program)) as jail:
        assert jail.attempt("template", tmp_path).kind == kind
        assert jail.attempt("template", tmp_path).kind == kind  # by a new worker if need be
