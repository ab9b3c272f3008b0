"""GGUF files on which llama.cpp ends its process: refused with one sentence, and a good file is tried only once."""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from outpace.errors import ModelError
from outpace.models import checked_file, embedded
from outpace.models.checked_file import check_file
from outpace.models.llama_library import installed_library
from tests.fuzz.gguf_bytes import ARRAY, RawGGUF, Value, float32, read_gguf, text, uint32
from tests.fuzz.jail import Jail
from tests.tiny_gguf import write_model

Change = Callable[[RawGGUF], object]


def key(name: str, value: Value) -> Change:
    return lambda raw: raw.set(name, value)


def same_tokens(raw: RawGGUF) -> None:
    tokens = raw.get("tokenizer.ggml.tokens")
    tokens.items = [tokens.items[0]] * len(tokens.items)


EPSILON = "llama.attention.layer_norm_rms_epsilon"
HOSTILE: dict[str, tuple[Change, tuple[str, ...]]] = {
    "one expert": (key("llama.expert_count", uint32(1)), ("auto", "llamacpp")),
    "8 experts": (key("llama.expert_count", uint32(8)), ("auto", "llamacpp")),
    "too many experts": (key("llama.expert_count", uint32(2**32 - 1)), ("auto", "llamacpp")),
    "rope scaling": (key("llama.rope.scaling.type", text("sideways")), ("auto", "llamacpp")),
    "vocabulary llama": (key("tokenizer.ggml.model", text("llama")), ("auto", "llamacpp")),
    "vocabulary none": (key("tokenizer.ggml.model", text("none")), ("auto", "llamacpp")),
    "vocabulary no_vocab": (key("tokenizer.ggml.model", text("no_vocab")), ("auto", "llamacpp")),
    "same tokens": (same_tokens, ("auto", "llamacpp")),
    "epsilon -inf": (key(EPSILON, float32(-math.inf)), ("auto", "llamacpp")),
    "epsilon nan": (key(EPSILON, float32(math.nan)), ("llamacpp",)),
    "epsilon negative": (key(EPSILON, float32(-1.0)), ("auto", "llamacpp")),
    "no layers": (key("llama.block_count", uint32(0)), ("llamacpp",)),
    "4,096 layers": (key("llama.block_count", uint32(4096)), ("llamacpp",)),
    "template not UTF-8": (key("tokenizer.chat_template", text(b"\xff{{ messages }}")), ("auto", "llamacpp")),
    "no tokens": (key("tokenizer.ggml.tokens", Value(ARRAY, element=8)), ("auto", "llamacpp")),
}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory) -> Path:
    return write_model(tmp_path_factory.mktemp("tiny") / "tiny.gguf")


@pytest.fixture(scope="module")
def jail(tmp_path_factory) -> Iterator[Jail]:
    with Jail(tmp_path_factory.mktemp("cache"), seconds=30) as made:
        yield made


@pytest.mark.parametrize(
    ("name", "backend"), [(name, backend) for name, (_, backends) in HOSTILE.items() for backend in backends]
)
def test_a_hostile_file_is_refused_with_a_sentence(jail, tiny, tmp_path, name, backend):
    raw = read_gguf(tiny)
    HOSTILE[name][0](raw)
    outcome = jail.attempt("gguf", raw.write(tmp_path / "hostile.gguf"), backend)
    assert outcome.kind == "refused", outcome.words


def test_the_unchanged_file_runs(jail, tiny, tmp_path):
    path = read_gguf(tiny).write(tmp_path / "same.gguf")
    assert path.read_bytes() == tiny.read_bytes()
    for backend in ("auto", "llamacpp"):
        assert jail.attempt("gguf", path, backend).kind == "ran"


# What is remembered.


@pytest.fixture
def tried(monkeypatch, tmp_path) -> list[str]:
    """The parts that were tried in a child process, in an empty cache."""
    monkeypatch.setenv("OUTPACE_CACHE_DIR", str(tmp_path / "cache"))
    parts: list[str] = []
    real = checked_file._try

    def spy(path: Path, library: Path, part: str) -> bool:
        parts.append(part)
        return real(path, library, part)

    monkeypatch.setattr(checked_file, "_try", spy)
    return parts


def test_a_file_is_tried_once_until_it_changes(tiny, tmp_path, tried):
    path, library = tmp_path / "model.gguf", installed_library()
    path.write_bytes(tiny.read_bytes())
    for _ in range(2):
        check_file(path, library, vocab_only=True)
    assert tried == ["vocabulary"]
    for vocab_only in (False, True, False):
        check_file(path, library, vocab_only=vocab_only)
    assert tried == ["vocabulary", "weights"]  # the weights include the vocabulary
    status = path.stat()
    path.write_bytes(tiny.read_bytes())
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))  # times that a copy may keep
    check_file(path, library, vocab_only=True)
    assert tried == ["vocabulary", "weights", "vocabulary"]


def test_a_refused_file_is_not_remembered(tiny, tmp_path, tried):
    path = read_gguf(tiny).set("llama.expert_count", uint32(1)).write(tmp_path / "hostile.gguf")
    for _ in range(2):
        with pytest.raises(ModelError, match=r"llama\.cpp ends its process .*\(GGML_ASSERT.*\); it is damaged or"):
            check_file(path, installed_library(), vocab_only=False)
    assert len(tried) == 2


def test_a_damaged_list_and_a_full_one(tiny, tmp_path, tried):
    remembered = tmp_path / "cache" / "checked_files.json"
    remembered.parent.mkdir()
    for content in ("[1]", "{", '{"a": 5}'):
        remembered.write_text(content)
        check_file(tiny, installed_library(), vocab_only=True)
    assert len(tried) == 3
    remembered.write_text(json.dumps({str(i): ["vocabulary"] for i in range(5000)}))
    check_file(tiny, installed_library(), vocab_only=True)
    check_file(tiny, installed_library(), vocab_only=True)
    assert len(tried) == 4
    assert len(json.loads(remembered.read_text())) == 2000


def test_a_file_that_llama_cpp_is_never_done_with(tiny, monkeypatch, tried):
    monkeypatch.setattr(checked_file, "_SECONDS", 0.001)
    monkeypatch.setattr(checked_file, "_SECONDS_PER_BYTE", 0.0)
    with pytest.raises(ModelError, match=r"llama\.cpp was not done with it after 0 seconds"):
        check_file(tiny, installed_library(), vocab_only=True)


def test_without_a_child_process_the_file_is_opened_and_the_log_says_so(tiny, monkeypatch, tried, caplog):
    monkeypatch.setattr(sys, "executable", "/no/such/python")
    check_file(tiny, installed_library(), vocab_only=True)
    assert "is opened unchecked, because no child process can be started" in caplog.text
    check_file(tiny, installed_library(), vocab_only=True)
    assert len(tried) == 2  # it did not pass


@pytest.mark.model
def test_the_embedded_model_is_known_by_its_hash(tmp_path, monkeypatch):
    path = embedded.resolve_embedded(embedded.SMOLLM2)
    monkeypatch.setattr(checked_file, "_try", lambda *_: pytest.fail("the embedded model was tried"))
    check_file(path, installed_library(), vocab_only=False)
