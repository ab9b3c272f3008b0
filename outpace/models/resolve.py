"""Resolves the user's model argument to the path of a GGUF file or a Hugging Face folder.

The argument is a local path, a name on the hub, or None for the embedded model. This module rejects incomplete files
and says what to do instead. It loads no weights; the backend decides whether it can run the model.
"""

from __future__ import annotations

import os
import stat
from contextlib import suppress
from pathlib import Path

from outpace.errors import ModelError
from outpace.models import hub
from outpace.models.embedded import SMOLLM2, resolve_embedded
from outpace.models.gguf_header import read_header


def resolve_model(reference: str | os.PathLike[str] | None, *, progress: bool = True) -> Path:
    """The file or folder for `reference`. None is the embedded model. Embedded and hub models are downloaded once."""
    if reference is None:
        return resolve_embedded(SMOLLM2, progress=progress)
    name = os.fspath(reference)
    path = Path(os.path.expanduser(name))
    try:
        mode = os.stat(path).st_mode if name else 0
    except PermissionError as error:
        raise ModelError(f"cannot access {path}: {error.strerror}; check the permissions of its folder") from error
    except (OSError, ValueError):  # no such file, a name too long, a NUL in it
        mode = 0
    if not mode:
        if hub.is_name(name) and not os.path.isdir(path.parent):
            found = hub.fetch(name)
            return found if found.is_dir() else _checked(found)
        raise ModelError(_missing(name))
    if stat.S_ISDIR(mode):
        if (path / "config.json").is_file():  # a Hugging Face model, for the torch backend
            return path
        raise ModelError(
            f"{path} is a folder without a config.json, and a model is one GGUF file or a Hugging Face folder; "
            f"{_suggest(path)}"
        )
    if not stat.S_ISREG(mode):  # opening a pipe would wait for a writer
        raise ModelError(f"{path} is not a regular file; name a GGUF file on disk")
    return _checked(path)


def _checked(path: Path) -> Path:
    """A GGUF file that holds a model."""
    header = read_header(path)
    kind = header.metadata.get("general.type", "model")
    if kind != "model":
        raise ModelError(f"{path} holds {kind!r} data, not a model; name the GGUF file of the model itself")
    if not header.architecture:
        raise ModelError(f"{path} does not name its architecture, so it cannot be run; convert the model again")
    return path


def _missing(name: str) -> str:
    if not name:
        return "the model's name is empty; name a GGUF file, or leave it out for the embedded SmolLM2-135M"
    if "://" in name:
        return f"{name} is a URL; name a local file or folder, or a model on the hub as owner/name"
    folder = Path(os.path.expanduser(name)).parent
    if os.path.isdir(folder):
        return f"there is no file {name}; {_suggest(folder)}"
    return f"there is no file {name}, nor a folder {folder}; check the path"


def _suggest(folder: Path) -> str:
    """A hint that lists the GGUF files in the folder."""
    where = os.path.abspath(folder)
    names: list[str] = []
    with suppress(OSError):
        names = sorted(name for name in os.listdir(folder) if name.lower().endswith(".gguf"))
    if not names:
        return f"there are no .gguf files in {where}, so check the path"
    more = f" and {len(names) - 5} more" if len(names) > 5 else ""
    return f"name one of the .gguf files in {where}: {', '.join(names[:5])}{more}"
