"""Downloads a model from the Hugging Face hub by name, once, into the hub client's cache.

Only the files that the torch backend reads are downloaded. Without a connection, files in the cache are used.
"""

from __future__ import annotations

import re
from pathlib import Path

from outpace.errors import ModelError

_NAME = re.compile(r"\w[\w.-]*/\w[\w.-]*")
_LONGEST_NAME = 96  # the hub's limit
_WANTED = ("config.json", "generation_config.json", "tokenizer*.json", "chat_template*", "*.safetensors*")
_UNWANTED = ("*/*", "consolidated*")  # other formats of the same weights
_INSTEAD = "download it by other means and give its folder, or give a GGUF file"


def is_name(reference: str) -> bool:
    is_short = len(reference) <= _LONGEST_NAME
    return is_short and _NAME.fullmatch(reference) is not None and not reference.endswith(".gguf")


def fetch(name: str) -> Path:
    """The folder of the model's files."""
    try:
        from huggingface_hub import errors, snapshot_download
    except ImportError as error:
        raise ModelError(
            f"there is no file {name}; if that is the name of a model on the hub, pip install 'outpace[torch]' to "
            f"fetch it, or {_INSTEAD}"
        ) from error
    try:
        folder = Path(snapshot_download(name, allow_patterns=list(_WANTED), ignore_patterns=list(_UNWANTED)))
    except errors.GatedRepoError as error:
        raise ModelError(
            f"{name} requires that you accept its terms on the hub; accept them on its page and log in with "
            f"'hf auth login', or {_INSTEAD}"
        ) from error
    except errors.RepositoryNotFoundError as error:
        raise ModelError(f"there is no file {name}, nor a public model of that name on the hub; check it") from error
    except (errors.LocalEntryNotFoundError, ConnectionError) as error:
        raise ModelError(
            f"there is no file {name}, and the hub cannot be reached to look for a model of that name; {_INSTEAD}"
        ) from error
    except (errors.HfHubHTTPError, errors.HFValidationError, OSError) as error:
        reason = str(error).strip().splitlines()[0]
        raise ModelError(f"{name} could not be fetched from the hub ({reason}); try again, or {_INSTEAD}") from error
    if not (folder / "config.json").is_file() or not any(folder.glob("*.safetensors")):
        raise ModelError(
            f"{name} on the hub has no config.json with .safetensors weights, which the torch backend reads; {_INSTEAD}"
        )
    return folder
