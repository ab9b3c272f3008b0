"""Downloads a model from the Hugging Face hub by name, once, into the hub client's cache.

Only the files that the torch backend reads are downloaded. Without a connection, files in the cache are used. A name
may carry a revision, as in owner/name@revision: a commit, a tag or a branch. Only a commit always means the same files.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Sequence
from pathlib import Path

from outpace.errors import ModelError
from outpace.models.hub_check import check_files

log = logging.getLogger("outpace.models")

_NAME = re.compile(r"(\w[\w.-]*/\w[\w.-]*)(?:@(\w[\w./-]*))?", re.ASCII)
_COMMIT = re.compile(r"[0-9a-f]{40}")
_LONGEST_NAME = 96  # the hub's limit
_WANTED = ("config.json", "generation_config.json", "tokenizer*.json", "chat_template*", "*.safetensors*")
_PICKLED = "pytorch_model.bin"  # of a draft head only: many are published in this form alone
_UNWANTED = ("*/*", "consolidated*")  # other formats of the same weights
_INSTEAD = "download it by other means and give its folder, or give a GGUF file"


def is_name(reference: str) -> bool:
    found = _NAME.fullmatch(reference)
    return found is not None and len(found[1]) <= _LONGEST_NAME and not reference.endswith(".gguf")


def fetch(reference: str) -> Path:
    """The folder of the model's files."""
    name, _, revision = reference.partition("@")
    folder = _download(name, revision, _WANTED)
    found = _has_weights(folder, "*.safetensors")
    if not found and _is_head(folder):
        folder = _download(name, revision, (*_WANTED, _PICKLED))
        found = _has_weights(folder, _PICKLED)
    if not found:
        raise ModelError(
            f"{name} on the hub has no config.json with .safetensors weights, which the torch backend reads; {_INSTEAD}"
        )
    check_files(folder)
    _log_commit(name, revision, folder.name)
    return folder


def _has_weights(folder: Path, pattern: str) -> bool:
    return (folder / "config.json").is_file() and any(folder.glob(pattern))


def _is_head(folder: Path) -> bool:
    from outpace.models.head_formats import find_head  # numpy

    try:
        return find_head(folder) is not None
    except ModelError:
        return False


def _download(name: str, revision: str, wanted: Sequence[str]) -> Path:
    try:
        from huggingface_hub import errors, snapshot_download
    except ImportError as error:
        raise ModelError(
            f"there is no file {name}; if that is the name of a model on the hub, pip install 'outpace[torch]' to "
            f"fetch it, or {_INSTEAD}"
        ) from error
    try:
        allowed, unwanted = list(wanted), list(_UNWANTED)
        return Path(
            snapshot_download(name, revision=revision or None, allow_patterns=allowed, ignore_patterns=unwanted)
        )
    except errors.GatedRepoError as error:
        raise ModelError(
            f"{name} requires that you accept its terms on the hub; accept them on its page and log in with "
            f"'hf auth login', or {_INSTEAD}"
        ) from error
    except errors.RevisionNotFoundError as error:
        raise ModelError(f"{name} on the hub has no revision {revision or 'main'}; check it, or {_INSTEAD}") from error
    except errors.RepositoryNotFoundError as error:
        raise ModelError(f"there is no file {name}, nor a public model of that name on the hub; check it") from error
    except (errors.LocalEntryNotFoundError, ConnectionError) as error:
        raise ModelError(
            f"there is no file {name}, and the hub cannot be reached to look for a model of that name; {_INSTEAD}"
        ) from error
    except (errors.HfHubHTTPError, errors.HFValidationError, OSError) as error:
        reason = str(error).strip().splitlines()[0]
        raise ModelError(f"{name} could not be fetched from the hub ({reason}); try again, or {_INSTEAD}") from error


def _log_commit(name: str, revision: str, commit: str) -> None:
    """The hub client names a folder of files after their commit."""
    advice = "" if _COMMIT.fullmatch(revision) else f"; name it {name}@{commit} to load the same files every time"
    log.info("%s is loaded from the hub at commit %s%s", name, commit, advice)
