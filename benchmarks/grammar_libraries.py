"""llguidance beside xgrammar: correctness under rollback, time per mask, coverage of schemas.

    python -m benchmarks.grammar_libraries [--schemas N] [--json FILE]

Needs xgrammar, which is not a dependency. Both get the embedded model's vocabulary and the schemas of tests/schemas.py.
For each schema, answers are written at random from the masks (short tokens first, so that they end). Counted are the
schemas that a library compiles, the answers that end, and those of them that jsonschema calls valid. Along every answer
the matcher accepts a few tokens more and rolls back; its mask must equal that of a matcher which never rolled back.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter
from typing import Any, Protocol

import jsonschema
import numpy as np
from numpy.typing import NDArray

from benchmarks.report import provenance, write_json
from outpace import LLM
from outpace.backends.base import Tokenizer
from outpace.decoding.constraints import Constraints
from outpace.structured import StructuredOutput
from tests.schemas import schemas

Bits = NDArray[np.uint32]
MOST_TOKENS = 150
AHEAD = 4  # tokens accepted and rolled back


class Matching(Protocol):
    def mask(self) -> Bits: ...
    def accept(self, token: int) -> bool: ...
    def rollback(self, num_tokens: int) -> None: ...
    def fresh(self) -> Matching: ...


class Guidance:
    name = "llguidance"

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._constraints = Constraints(tokenizer, tokenizer.vocab_size)
        self._constraints.compile(StructuredOutput(regex="a"))  # builds the tokenizer

    def compile(self, schema: dict[str, Any]) -> Matching:
        made = self._constraints.compile(StructuredOutput(json_schema=schema))
        return _GuidanceMatcher(made.template, -(-self._constraints.num_tokens // 32))


class _GuidanceMatcher:
    def __init__(self, template: Any, num_words: int) -> None:
        self._template, self._num_words = template, num_words
        self._parser = template.deep_copy()

    def mask(self) -> Bits:
        bits = np.empty(self._num_words, np.uint32)
        self._parser.unsafe_compute_mask_ptr(bits.ctypes.data, bits.nbytes)
        return bits

    def accept(self, token: int) -> bool:
        return bool(self._parser.try_consume_tokens([token]))

    def rollback(self, num_tokens: int) -> None:
        self._parser.rollback(num_tokens)

    def fresh(self) -> Matching:
        return _GuidanceMatcher(self._template, self._num_words)


class XGrammar:
    name = "xgrammar"

    def __init__(self, tokenizer: Tokenizer) -> None:
        import xgrammar

        self._library = xgrammar
        controls = {token.id for token in tokenizer.specials.controls.tokens}
        words = [b"" if t in controls else tokenizer.token_bytes(t) for t in range(tokenizer.vocab_size)]
        info = xgrammar.TokenizerInfo(
            words, xgrammar.VocabType.RAW, vocab_size=len(words), stop_token_ids=sorted(tokenizer.end_ids)
        )
        self._compiler = xgrammar.GrammarCompiler(info, max_threads=1, cache_enabled=False)
        self._vocab_size = len(words)

    def compile(self, schema: dict[str, Any]) -> Matching:
        made = self._compiler.compile_json_schema(
            json.dumps(schema), any_whitespace=False, separators=(", ", ": "), strict_mode=False
        )
        return _XGrammarMatcher(self._library, made, self._vocab_size)


class _XGrammarMatcher:
    def __init__(self, library: Any, compiled: Any, vocab_size: int) -> None:
        self._made_of = library, compiled, vocab_size
        self._matcher = library.GrammarMatcher(compiled)
        self._bits = library.allocate_token_bitmask(1, vocab_size)

    def mask(self) -> Bits:
        self._bits.fill_(-1)
        self._matcher.fill_next_token_bitmask(self._bits)
        found: Bits = self._bits.numpy()[0].view(np.uint32)
        return found

    def accept(self, token: int) -> bool:
        return bool(self._matcher.accept_token(token))

    def rollback(self, num_tokens: int) -> None:
        self._matcher.rollback(num_tokens)

    def fresh(self) -> Matching:
        return _XGrammarMatcher(*self._made_of)


@dataclass
class Findings:
    compile_seconds: list[float] = field(default_factory=list)
    mask_seconds: list[float] = field(default_factory=list)
    num_refused: int = 0
    num_ended: int = 0
    num_valid: int = 0
    num_rollbacks: int = 0
    num_wrong_after_rollback: int = 0

    def as_dict(self) -> dict[str, Any]:
        masks = sorted(self.mask_seconds)
        return {
            "compile_milliseconds_median": 1e3 * statistics.median(self.compile_seconds),
            "mask_microseconds_median": 1e6 * statistics.median(masks),
            "mask_microseconds_99th": 1e6 * masks[len(masks) * 99 // 100],
            "mask_microseconds_mean": 1e6 * statistics.mean(masks),
            "schemas_refused": self.num_refused,
            "answers_ended": self.num_ended,
            "answers_valid": self.num_valid,
            "rollbacks": self.num_rollbacks,
            "wrong_after_rollback": self.num_wrong_after_rollback,
        }


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--schemas", type=int, default=300, metavar="N")
    parser.add_argument("--json", type=Path, default=Path("benchmarks/results/grammar_libraries.json"), metavar="FILE")
    options = parser.parse_args(arguments)
    with LLM(speculation="off") as llm:
        tokenizer = llm.tokenizer
    chosen = schemas(options.schemas)
    results = {
        library.name: compare(library, tokenizer, chosen) for library in (Guidance(tokenizer), XGrammar(tokenizer))
    }
    write_json(options.json, provenance([]) | {"schemas": len(chosen), "libraries": results})
    for name, found in results.items():
        print(name, json.dumps(found))
    return 0


def compare(library: Any, tokenizer: Tokenizer, chosen: Sequence[dict[str, Any]]) -> dict[str, Any]:
    findings = Findings()
    for seed, schema in enumerate(chosen):
        begin = perf_counter()
        try:
            matcher = library.compile(schema)
        except Exception:  # every library has its own
            findings.num_refused += 1
            continue
        findings.compile_seconds.append(perf_counter() - begin)
        text = write_answer(matcher, tokenizer, random.Random(seed), findings)
        if text is not None:
            findings.num_ended += 1
            findings.num_valid += is_valid(text, schema)
    return findings.as_dict()


def write_answer(matcher: Matching, tokenizer: Tokenizer, rng: random.Random, findings: Findings) -> bytes | None:
    """A random answer; None if it is too long."""
    tokens: list[int] = []
    never_rewound = matcher.fresh()
    while len(tokens) < MOST_TOKENS:
        begin = perf_counter()
        mask = matcher.mask()
        findings.mask_seconds.append(perf_counter() - begin)
        members = np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little"))
        allowed = [int(token) for token in members if token < tokenizer.vocab_size]
        if not allowed or tokenizer.end_ids.intersection(allowed):
            return b"".join(map(tokenizer.token_bytes, tokens))
        token = pick(allowed, tokenizer, rng)
        matcher.accept(token)
        never_rewound.accept(token)
        tokens.append(token)
        check_rollback(matcher, never_rewound, tokenizer, rng, findings)
    return None


def pick(allowed: Sequence[int], tokenizer: Tokenizer, rng: random.Random) -> int:
    """One of a few short tokens, so that answers end."""
    some = rng.sample(allowed, min(len(allowed), 12))
    closing = [token for token in allowed if tokenizer.token_bytes(token)[:1] in (b'"', b"}", b"]", b",")]
    return (
        rng.choice(closing)
        if closing and rng.random() < 0.5
        else min(some, key=lambda t: len(tokenizer.token_bytes(t)))
    )


def check_rollback(
    matcher: Matching, never_rewound: Matching, tokenizer: Tokenizer, rng: random.Random, findings: Findings
) -> None:
    num_ahead = 0
    for _ in range(rng.randrange(AHEAD + 1)):
        members = np.flatnonzero(np.unpackbits(matcher.mask().view(np.uint8), bitorder="little"))
        allowed = [int(token) for token in members if token < tokenizer.vocab_size and token not in tokenizer.end_ids]
        if not allowed or not matcher.accept(rng.choice(allowed)):
            break
        num_ahead += 1
    if num_ahead:
        matcher.rollback(num_ahead)
        findings.num_rollbacks += 1
        findings.num_wrong_after_rollback += not np.array_equal(matcher.mask(), never_rewound.mask())


def is_valid(text: bytes, schema: dict[str, Any]) -> bool:
    try:
        jsonschema.Draft202012Validator(schema).validate(json.loads(text))
    except (ValueError, jsonschema.ValidationError):
        return False
    return True


if __name__ == "__main__":
    sys.exit(main())
