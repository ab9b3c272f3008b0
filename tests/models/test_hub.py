"""Models named as on the hub, with a fake hub client: the requests to it, and the error messages."""

from __future__ import annotations

import builtins
import hashlib
import json
import os
from pathlib import Path
from typing import Any

import pytest

from outpace.errors import ModelError
from outpace.models import hub, hub_check
from outpace.models.resolve import resolve_model
from tests.tiny_gguf import write_model

huggingface_hub = pytest.importorskip("huggingface_hub", reason="huggingface_hub comes with outpace[torch]")
NAME = "owner/some-model"


class Hub:
    """A fake client: returns a folder or fails, and records the requests."""

    def __init__(self, answer: Path | Exception) -> None:
        self._answer = answer
        self.asked: list[tuple[str, dict[str, Any]]] = []

    def __call__(self, name: str, **options: Any) -> str:
        self.asked.append((name, options))
        if isinstance(self._answer, Exception):
            raise self._answer
        return str(self._answer)


@pytest.fixture
def use(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)

    def replaced(answer: Path | Exception) -> Hub:
        stand_in = Hub(answer)
        monkeypatch.setattr(huggingface_hub, "snapshot_download", stand_in)
        return stand_in

    return replaced


def refusal() -> str:
    with pytest.raises(ModelError) as caught:
        resolve_model(NAME)
    sentence = str(caught.value)
    assert "\n" not in sentence
    return sentence


def failure(kind: str, words: str = "first line\nsecond") -> Exception:
    """One of the client's errors, made without the HTTP response that they require."""
    found = getattr(huggingface_hub.errors, kind)
    error: Exception = found.__new__(found)
    error.args = (words,)
    return error


def test_a_name_becomes_the_folder_of_its_files(use, tmp_path):
    folder = tmp_path / "snapshot"
    folder.mkdir()
    for name in ("config.json", "model.safetensors"):
        (folder / name).touch()
    stand_in = use(folder)
    assert resolve_model(NAME) == folder
    [(name, options)] = stand_in.asked
    assert name == NAME
    files = [
        "config.json", "generation_config.json", "model-00001-of-00002.safetensors", "model.safetensors.index.json",
        "tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "README.md", "pytorch_model.bin",
        "consolidated.safetensors", "original/model.safetensors", "onnx/config.json",
    ]  # fmt: skip
    patterns = {key: options[key] for key in ("allow_patterns", "ignore_patterns")}
    kept = huggingface_hub.utils.filter_repo_objects(files, **patterns)
    assert list(kept) == files[:7]


@pytest.mark.parametrize("is_head", [True, False])
def test_a_pickle_is_asked_for_only_if_a_draft_head_has_no_other_weights(use, tmp_path, is_head):
    folder = tmp_path / "snapshot"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"draft_vocab_size": 5} if is_head else {"vocab_size": 5}))
    stand_in = use(folder)
    assert "has no config.json with .safetensors weights" in refusal()
    assert ["pytorch_model.bin" in options["allow_patterns"] for _, options in stand_in.asked] == [False, True][
        : 1 + is_head
    ]
    (folder / "pytorch_model.bin").touch()
    if is_head:
        assert resolve_model(NAME) == folder
    else:
        assert "has no config.json with .safetensors weights" in refusal()


def snapshot(tmp_path: Path, commit: str) -> Path:
    folder = tmp_path / commit
    folder.mkdir()
    for name in ("config.json", "model.safetensors"):
        (folder / name).touch()
    return folder


def test_the_commit_is_logged_with_the_name_that_pins_it(use, tmp_path, caplog):
    caplog.set_level("INFO", "outpace.models")
    commit = "0123456789abcdef" * 2 + "01234567"
    stand_in = use(snapshot(tmp_path, commit))
    resolve_model(NAME)
    assert f"{NAME} is loaded from the hub at commit {commit}; name it {NAME}@{commit} to load" in caplog.text
    caplog.clear()
    resolve_model(f"{NAME}@{commit}")
    assert f"at commit {commit}" in caplog.text and "name it" not in caplog.text
    assert [(name, options["revision"]) for name, options in stand_in.asked] == [(NAME, None), (NAME, commit)]


@pytest.mark.parametrize("revision", ["main", "v1.0", "refs/pr/3", "0123abc"])
def test_a_name_may_carry_a_revision(use, tmp_path, revision):
    stand_in = use(snapshot(tmp_path, "a" * 40))
    resolve_model(f"{NAME}@{revision}")
    assert [(name, options["revision"]) for name, options in stand_in.asked] == [(NAME, revision)]


def linked(folder: Path, name: str, content: bytes, blob: str) -> Path:
    """A file as the hub client keeps it: under its hash, with a link by its name."""
    blobs = folder.parent.parent / "blobs"
    blobs.mkdir(exist_ok=True)
    (blobs / blob).write_bytes(content)
    (folder / name).unlink(missing_ok=True)
    (folder / name).symlink_to(blobs / blob)
    return blobs / blob


@pytest.mark.skipif(os.name == "nt", reason="links need rights here")
def test_files_are_compared_with_the_hashes_of_the_hub(use, tmp_path, monkeypatch):
    monkeypatch.setenv("OUTPACE_CACHE_DIR", str(tmp_path / "cache"))
    snapshots = tmp_path / "hub" / "snapshots"
    snapshots.mkdir(parents=True)
    folder = snapshot(snapshots, "a" * 40)
    weights = b"weights" * 1000
    large = linked(folder, "model.safetensors", weights, hashlib.sha256(weights).hexdigest())
    small = linked(folder, "config.json", b"{}\n", "0967ef424bce6791893e9a57bb952f80fd536e93")  # git's hash of it
    use(folder)
    assert resolve_model(NAME) == folder
    with monkeypatch.context() as patch:
        patch.setattr(hub_check, "_hash", lambda *_: pytest.fail("a file was read again"))
        assert resolve_model(NAME) == folder
    for blob, content, changed in ((large, weights, weights[:-1] + b"S"), (small, b"{}\n", b"[]\n")):
        blob.write_bytes(changed)
        assert "is not the file that the hub has (hash " in refusal()
        blob.write_bytes(content)
        assert resolve_model(NAME) == folder


def test_a_revision_that_does_not_exist_is_named(use):
    use(failure("RevisionNotFoundError"))
    with pytest.raises(ModelError, match="owner/some-model on the hub has no revision v9; check it"):
        resolve_model(f"{NAME}@v9")


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
def test_a_repository_without_such_weights_is_refused(use, tmp_path, name):
    folder = tmp_path / "snapshot"
    folder.mkdir()
    (folder / name).touch()
    use(folder)
    assert f"{NAME} on the hub has no config.json with .safetensors weights" in refusal()


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("GatedRepoError", "requires that you accept its terms on the hub; accept them on its page"),
        ("RepositoryNotFoundError", "nor a public model of that name on the hub; check it"),
        (
            "LocalEntryNotFoundError",
            "the hub cannot be reached to look for a model of that name; download it",
        ),
        ("OfflineModeIsEnabled", "the hub cannot be reached"),
        ("HfHubHTTPError", "could not be fetched from the hub (first line); try again, or download it by other means"),
    ],
)
def test_what_the_client_cannot_do_is_one_sentence(use, kind, words):
    use(failure(kind))
    assert words in refusal()


def test_without_a_connection_and_a_cache_the_real_client_says_so_too(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    assert "the hub cannot be reached" in refusal()


def test_without_the_client_its_package_is_named(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    real = builtins.__import__

    def without(name: str, *arguments: Any, **options: Any) -> Any:
        if name == "huggingface_hub":
            raise ImportError(name)
        return real(name, *arguments, **options)

    monkeypatch.setattr(builtins, "__import__", without)
    assert "pip install 'outpace[torch]' to fetch it, or download it by other means" in refusal()


@pytest.mark.parametrize(
    "name",
    [
        "no/such/model",
        "owner/model.gguf",
        "owner/model:Q4:K",
        "owner/model:",
        "https://a.b/c",
        "/a/b",
        "a/b@",
        "a/b@c@d",
    ],
)
def test_nothing_else_is_looked_for_there(use, name):
    stand_in = use(ModelError("asked"))
    with pytest.raises(ModelError):
        resolve_model(name)
    assert not stand_in.asked
    assert not hub.is_name(name)


# ---- GGUF files by their quantisation

FILES = [
    "README.md", "config.json", "model-Q4_K_M.gguf", "model-Q8_0.gguf", "model-UD-Q4_K_M.gguf",
    "mmproj-model-f16.gguf", "model.q5_k_s.gguf", "BF16/model-BF16.gguf", "model-IQ4_K_M.gguf", "f32.gguf",
    "Q6_K/model-Q6_K-00001-of-00002.gguf",
]  # fmt: skip


class Repository(Hub):
    """Downloads what the patterns select, as the client does."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.folder = folder

    def __call__(self, name: str, **options: Any) -> str:
        patterns = {key: options[key] for key in ("allow_patterns", "ignore_patterns")}
        for file in huggingface_hub.utils.filter_repo_objects(FILES, **patterns):
            (self.folder / file).parent.mkdir(exist_ok=True)
            write_model(self.folder / file)
        return super().__call__(name, **options)


@pytest.fixture
def repository(monkeypatch, tmp_path) -> Repository:
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / ("c" * 40)
    folder.mkdir()
    stand_in = Repository(folder)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", stand_in)
    return stand_in


@pytest.mark.parametrize(
    ("tag", "file"),
    [
        ("Q4_K_M", "model-Q4_K_M.gguf"),
        ("q4_k_m", "model-Q4_K_M.gguf"),
        ("UD-Q4_K_M", "model-UD-Q4_K_M.gguf"),
        ("Q5_K_S", "model.q5_k_s.gguf"),
        ("BF16", "BF16/model-BF16.gguf"),
        ("F32", "f32.gguf"),
    ],
)
def test_a_quantisation_names_one_gguf_file_and_only_that_is_downloaded(repository, tag, file):
    assert resolve_model(f"{NAME}:{tag}") == repository.folder / file
    downloaded = [path.relative_to(repository.folder).as_posix() for path in repository.folder.rglob("*.gguf")]
    assert downloaded == [file]
    assert [(name, options["revision"]) for name, options in repository.asked] == [(NAME, None)]


def test_a_file_of_an_earlier_download_is_not_mistaken_for_another(repository, caplog):
    caplog.set_level("INFO", "outpace.models")
    for tag, file in (("UD-Q4_K_M", "model-UD-Q4_K_M.gguf"), ("Q4_K_M", "model-Q4_K_M.gguf")):
        assert resolve_model(f"{NAME}:{tag}@main") == repository.folder / file
    assert f"name it {NAME}:Q4_K_M@{'c' * 40} to load the same files every time" in caplog.text
    assert repository.asked[-1][1]["revision"] == "main"


@pytest.mark.parametrize("tag", ["Q3_K", "Q6_K", "K_M", "f16"])
def test_a_quantisation_that_is_not_there_or_in_parts_is_refused(repository, tag):
    with pytest.raises(ModelError, match=f"{NAME} on the hub has no GGUF file for {tag} in one piece"):
        resolve_model(f"{NAME}:{tag}")


def test_a_gguf_file_from_the_hub_is_checked_like_any_other(repository, monkeypatch, tmp_path):
    monkeypatch.setenv("OUTPACE_CACHE_DIR", str(tmp_path / "cache"))
    path = resolve_model(f"{NAME}:Q8_0")
    path.write_bytes(path.read_bytes()[:-100])
    monkeypatch.setattr("tests.models.test_hub.FILES", [])
    with pytest.raises(ModelError, match="is truncated"):
        resolve_model(f"{NAME}:Q8_0")
    path.unlink()
    (tmp_path / ("0" * 64)).write_bytes(b"something else")
    path.symlink_to(tmp_path / ("0" * 64))
    with pytest.raises(ModelError, match="is not the file that the hub has"):
        resolve_model(f"{NAME}:Q8_0")


def test_a_folder_that_is_here_is_meant_before_the_hub(use, tmp_path):
    (tmp_path / "owner").mkdir()
    stand_in = use(ModelError("asked"))
    assert f"there is no file {NAME}" in refusal()
    assert not stand_in.asked
