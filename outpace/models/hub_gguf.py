"""Finds the GGUF file of a quantisation among the files of a repository on the hub.

Repositories name such a file model-Q4_K_M.gguf or model.q4_k_m.gguf, at the top or in a folder. A model that is split
over several files is not found.
"""

from __future__ import annotations

from fnmatch import fnmatchcase
from pathlib import Path

from outpace.errors import ModelError

_PROJECTORS = ("mmproj*", "*/mmproj*")  # parts of multimodal models, in formats of the same names
_OTHER_RECIPES = ("UD-*", "*[-./]UD-*")  # UD-Q4_K_M is not Q4_K_M


def patterns(quantisation: str) -> tuple[list[str], list[str]]:
    """Patterns of the files to download, and of those to leave out, for the hub's client."""
    in_any_case = "".join(f"[{c.upper()}{c.lower()}]" if c.isalpha() else c for c in quantisation)
    is_other_recipe = quantisation.upper().startswith("UD-")
    unwanted = [*_PROJECTORS, *(() if is_other_recipe else _OTHER_RECIPES)]
    return [f"*[-./]{in_any_case}.gguf", f"{in_any_case}.gguf"], unwanted


def choose(folder: Path, name: str, quantisation: str) -> Path:
    """The file of a quantisation in the downloaded folder, which may hold files of earlier downloads too."""
    wanted, unwanted = patterns(quantisation)

    def matches(path: Path) -> bool:
        text = path.relative_to(folder).as_posix()
        return any(fnmatchcase(text, p) for p in wanted) and not any(fnmatchcase(text, p) for p in unwanted)

    found = sorted(filter(matches, folder.rglob("*.gguf")), key=lambda path: (len(path.parts), len(path.name), path))
    if not found:
        raise ModelError(
            f"{name} on the hub has no GGUF file for {quantisation} in one piece; its page lists its files, and a name "
            f"such as {name}:Q4_K_M ends like the file that is meant"
        )
    return found[0]
