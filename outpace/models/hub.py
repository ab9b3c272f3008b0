"""Downloads a model from the Hugging Face hub by name, once, into the hub client's cache.

owner/name is a folder for the torch backend; only the files that it reads are downloaded. owner/name:Q4_K_M is a GGUF
file, named by its quantisation (`hub_gguf.py`). Without a connection, files in the cache are used. A name may carry a
revision, as in owner/name@revision: a commit, a tag or a branch. Only a commit always means the same files.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from outpace.errors import ModelError
from outpace.models import hub_gguf
from outpace.models.hub_check import check_file, check_files

log = logging.getLogger("outpace.models")

_NAME = re.compile(r"(\w[\w.-]*/\w[\w.-]*)(?::(\w[\w.-]*))?(?:@(\w[\w./-]*))?", re.ASCII)
_COMMIT = re.compile(r"[0-9a-f]{40}")
_LONGEST_NAME = 96  # the hub's limit
_WANTED = ("config.json", "generation_config.json", "tokenizer*.json", "chat_template*", "*.safetensors*")
_PICKLED = "pytorch_model.bin"  # of a draft head only: many are published in this form alone
_UNWANTED = ("*/*", "consolidated*")  # other formats of the same weights
_INSTEAD = "download it by other means and give its folder, or give a GGUF file"


@dataclass(frozen=True, slots=True)
class _Reference:
    name: str
    quantisation: str | None
    revision: str | None

    @property
    def model(self) -> str:
        return f"{self.name}:{self.quantisation}" if self.quantisation else self.name


def _parse(reference: str) -> _Reference | None:
    found = _NAME.fullmatch(reference)
    if found is None or len(found[1]) > _LONGEST_NAME or reference.endswith(".gguf"):
        return None
    return _Reference(found[1], found[2], found[3])


def is_name(reference: str) -> bool:
    return _parse(reference) is not None


def fetch(reference: str) -> Path:
    """The folder of the model's files, or its GGUF file."""
    asked = _parse(reference)
    assert asked is not None
    if asked.quantisation is not None:
        folder = _download(asked, *hub_gguf.patterns(asked.quantisation))
        path = hub_gguf.choose(folder, asked.name, asked.quantisation)
        check_file(path)
        _log_commit(asked, folder.name)
        return path
    folder = _download(asked, _WANTED, _UNWANTED)
    found = _has_weights(folder, "*.safetensors")
    if not found and _is_head(folder):
        folder = _download(asked, (*_WANTED, _PICKLED), _UNWANTED)
        found = _has_weights(folder, _PICKLED)
    if not found:
        raise ModelError(
            f"{asked.name} on the hub has no config.json with .safetensors weights, which the torch backend reads; if "
            f"it has GGUF files, add the quantisation, as in {asked.name}:Q4_K_M, or {_INSTEAD}"
        )
    check_files(folder)
    _log_commit(asked, folder.name)
    return folder


def _has_weights(folder: Path, pattern: str) -> bool:
    return (folder / "config.json").is_file() and any(folder.glob(pattern))


def _is_head(folder: Path) -> bool:
    from outpace.models.head_formats import find_head  # numpy

    try:
        return find_head(folder) is not None
    except ModelError:
        return False


def _download(asked: _Reference, wanted: Sequence[str], unwanted: Sequence[str]) -> Path:
    """The folder with the files of these patterns."""
    name = asked.name
    try:
        from huggingface_hub import errors, snapshot_download
    except ImportError as error:
        package = "huggingface_hub" if asked.quantisation else "'outpace[torch]'"
        raise ModelError(
            f"there is no file {asked.model}; if that is the name of a model on the hub, pip install {package} to "
            f"fetch it, or {_INSTEAD}"
        ) from error
    try:
        return Path(
            snapshot_download(
                name, revision=asked.revision, allow_patterns=list(wanted), ignore_patterns=list(unwanted)
            )
        )
    except errors.GatedRepoError as error:
        raise ModelError(
            f"{name} requires that you accept its terms on the hub; accept them on its page and log in with "
            f"'hf auth login', or {_INSTEAD}"
        ) from error
    except errors.RevisionNotFoundError as error:
        revision = asked.revision or "main"
        raise ModelError(f"{name} on the hub has no revision {revision}; check it, or {_INSTEAD}") from error
    except errors.RepositoryNotFoundError as error:
        raise ModelError(f"there is no file {name}, nor a public model of that name on the hub; check it") from error
    except (errors.LocalEntryNotFoundError, ConnectionError) as error:
        raise ModelError(
            f"there is no file {name}, and the hub cannot be reached to look for a model of that name; {_INSTEAD}"
        ) from error
    except (errors.HfHubHTTPError, errors.HFValidationError, OSError) as error:
        reason = str(error).strip().splitlines()[0]
        raise ModelError(f"{name} could not be fetched from the hub ({reason}); try again, or {_INSTEAD}") from error


def _log_commit(asked: _Reference, commit: str) -> None:
    """The hub client names a folder of files after their commit."""
    is_pinned = _COMMIT.fullmatch(asked.revision or "") is not None
    advice = "" if is_pinned else f"; name it {asked.model}@{commit} to load the same files every time"
    log.info("%s is loaded from the hub at commit %s%s", asked.model, commit, advice)
