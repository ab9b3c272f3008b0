"""Prints a digest of everything that one build of the native library computes; equal digests are equal bits.

    python -m tests.backends.native.library_bits LIBRARY FOLDER

FOLDER gets the tiny models. The instruction set is chosen by OUTPACE_NATIVE_ISA, which a process reads once, so
builds and instruction sets are compared between processes (see `test_zig.py`).
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from outpace.backends.native import library


def main() -> None:
    path, folder = Path(sys.argv[1]), Path(sys.argv[2])
    library.LIBRARY_PATH = path
    digests = {name: hashlib.sha256(bits).hexdigest() for name, bits in outputs(folder)}
    loaded = library.load_library()
    assert loaded.path == path
    print(json.dumps({"isa": loaded.isa, "digests": digests}))


def outputs(folder: Path) -> Iterator[tuple[str, bytes]]:
    from tests.tiny_gguf import FAMILIES, TYPES

    for family in FAMILIES:
        for kind in TYPES:
            yield f"logits of {family} {kind}", _logits(folder, family, kind)
    yield "drafts of a head", _drafts(folder)
    yield "probabilities and tokens", _samples()


def _logits(folder: Path, family: str, kind: str) -> bytes:
    """Of steps of many sizes, so that every kernel's sizes occur."""
    from outpace.core import Row, StepPlan
    from tests.backends.native.test_runner import random_tokens, start
    from tests.tiny_gguf import write_model

    path = folder / f"{family}-{kind}.gguf"
    runner = start(path if path.exists() else write_model(path, family, kind))
    tokens, at, found = random_tokens(300), 0, b""
    for size in (1, 2, 3, 4, 5, 6, 7, 8, 13, 16, 17, 31, 64, 100):
        found += runner.forward(StepPlan([Row(0, at, tokens[at : at + size], size)])).tobytes()
        at += size
    runner.close()
    return found


def _drafts(folder: Path) -> bytes:
    from tests.backends.native.test_head import Drafting
    from tests.tiny_head import request_of

    drafting, found = Drafting(folder), ""
    for text in range(20):
        for temperature in (0.0, 0.8):
            request = request_of(20 + text, text=text, temperature=temperature, seed=text)
            drafting.feed(request)
            drafted = drafting.draft(request, 6)
            found += f"{drafted.tokens} {[float(c).hex() for c in drafted.confidence]}\n"
            drafting.runner.free(0)
    drafting.runner.close()
    return found.encode()


def _samples() -> bytes:
    from outpace.backends.native.verifier import NativeVerifier
    from outpace.config import SamplingParams
    from tests.backends.native.test_verifier import SHAPINGS, awkward_rows, request_with

    found = b""
    for vocab_size in (61, 1003, 49152):
        verifier = NativeVerifier(library.load_library(), vocab_size, threads=2)
        for row in awkward_rows(vocab_size, np.random.default_rng(vocab_size)).values():
            for seed, shaping in enumerate(SHAPINGS[1:]):
                request = request_with(SamplingParams(**shaping), seed)
                found += hashlib.sha256(verifier.probs(request, (), row).tobytes()).digest()
                found += verifier.own_token(request, (), row).to_bytes(4, "little")
        verifier.close()
    return found


if __name__ == "__main__":
    main()
