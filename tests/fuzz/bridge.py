"""Texts in many scripts through the bridge between two tokenizers, in pieces and with drafts that are rejected.

    python -m tests.fuzz.bridge --seed 1 --count 10000 [--target FILE.gguf] [--draft FILE.gguf]

Without files, the embedded model's tokenizer is paired with one that has tokens of a few bytes. For every text: what a
draft model has after any steps, rejected drafts among them, is what a fresh one would have; it spells exactly the
target's text; and a continuation in the target's tokens spells exactly the continuation.
"""

from __future__ import annotations

import argparse
import random
import sys
from collections.abc import Iterator
from pathlib import Path

from tqdm import tqdm

from outpace.backends.base import Tokenizer
from outpace.kv.prefix import common_prefix_length
from outpace.speculation.proposers.text_bridge import TextBridge

# Ranges of letters, with the marks that the script combines them with.
SCRIPTS: dict[str, tuple[tuple[int, int], ...]] = {
    "latin": ((0x41, 0x5A), (0x61, 0x7A)),
    "latin with marks": ((0xC0, 0x24F), (0x300, 0x36F)),
    "greek": ((0x391, 0x3C9),),
    "cyrillic": ((0x410, 0x44F),),
    "armenian": ((0x561, 0x586),),
    "hebrew": ((0x5D0, 0x5EA), (0x5B0, 0x5BC)),
    "arabic": ((0x627, 0x64A), (0x64B, 0x652)),
    "devanagari": ((0x905, 0x939), (0x93E, 0x94D)),
    "bengali": ((0x995, 0x9B9), (0x9BE, 0x9CD)),
    "tamil": ((0xB95, 0xBB9), (0xBBE, 0xBCD)),
    "telugu": ((0xC15, 0xC39), (0xC3E, 0xC4D)),
    "thai": ((0xE01, 0xE3A), (0xE40, 0xE4E)),
    "georgian": ((0x10D0, 0x10F0),),
    "amharic": ((0x1200, 0x1248),),
    "khmer": ((0x1780, 0x17B3), (0x17B6, 0x17D1)),
    "hiragana and katakana": ((0x3041, 0x3096), (0x30A1, 0x30FA)),
    "han": ((0x4E00, 0x9FFF), (0x20000, 0x2A6DF)),
    "hangul": ((0xAC00, 0xD7A3), (0x1100, 0x1112)),
    "emoji": ((0x1F300, 0x1F64F), (0x1F3FB, 0x1F3FF), (0x200D, 0x200D), (0xFE0F, 0xFE0F)),
    "gothic": ((0x10330, 0x1034A),),
}
BETWEEN = (
    " ",
    " ",
    " ",
    "  ",
    "\n",
    "\n    ",
    "\t",
    ". ",
    ", ",
    "",
    "-",
    " 42",
    "\u00a0",
    "\r\n",
    "'",
    "(",
    "://",
    "▁",
    "Ġ",
)


def texts(seed: int, count: int) -> Iterator[tuple[str, str]]:
    """Texts of one or two scripts, with the name of the first."""
    rng = random.Random(seed)
    names = list(SCRIPTS)
    for number in range(count):
        name = names[number % len(names)]
        others = [name, name, rng.choice(names)]
        words = []
        for _ in range(rng.randint(1, 40)):
            ranges = SCRIPTS[rng.choice(others)]
            words.append("".join(chr(rng.randint(*rng.choice(ranges))) for _ in range(rng.randint(1, 9))))
            words.append(rng.choice(BETWEEN))
        yield name, "".join(words)


def check(bridge: TextBridge, target: Tokenizer, draft: Tokenizer, text: str, rng: random.Random) -> None:
    tokens = target.encode(text)
    controls = {token.id for token in target.specials.controls.tokens}
    for at in range(rng.randint(0, 3)):  # control tokens between the others
        tokens.insert(rng.randint(0, len(tokens)), rng.choice(sorted(controls)) if controls else tokens[at])
    grown, at = bridge.start(), 0
    cached: list[int] = []
    while at < len(tokens):
        at = min(len(tokens), at + rng.randint(1, 6))
        bridge.read(grown, tokens[:at])
        cached = continued(cached, grown.tokens) + [rng.randrange(draft.vocab_size) for _ in range(rng.randint(0, 4))]
        if at < len(tokens) and rng.random() < 0.8:
            continue  # a fresh one takes time
        fresh = bridge.start()
        bridge.read(fresh, tokens[:at])
        assert grown.tokens == fresh.tokens, "a text that grew has other tokens than a fresh one"
        spelled = b"".join(draft.token_bytes(token) for token in grown.tokens)
        assert spelled == b"".join(target.token_bytes(token) for token in tokens[:at]), "the text is another one"
        assert cached[: len(fresh.tokens)] == fresh.tokens, "the rewound cache is not a fresh one"
    data = text.encode()
    begin = rng.randint(0, len(data))
    drafted = data[begin : rng.randint(begin, len(data))]  # may begin and end inside a character
    assert b"".join(map(target.token_bytes, bridge.target_tokens(drafted))) == drafted, "a draft says something else"


def continued(cached: list[int], tokens: list[int]) -> list[int]:
    """A cache that ends with a draft, of which anything may be rejected: rewound to what agrees, fed with the rest."""
    kept = common_prefix_length(cached, tokens)
    return cached[:kept] + tokens[kept:]


def run(target: Tokenizer, draft: Tokenizer, *, seed: int, count: int, progress: bool = False) -> int:
    """Check this many texts; returns the number of scripts."""
    bridge, rng, seen = TextBridge(target, draft), random.Random(seed), set[str]()
    for number, (name, text) in enumerate(tqdm(texts(seed, count), total=count, disable=not progress)):
        try:
            check(bridge, target, draft, text, rng)
        except AssertionError as error:
            raise AssertionError(f"text {number} of seed {seed} ({name}): {error}: {text!r}") from error
        seen.add(name)
    return len(seen)


def main() -> int:
    from outpace.models.gguf_tokenizer import LlamaTokenizer
    from outpace.models.llama_library import load_library
    from outpace.models.resolve import resolve_model
    from tests.piece_tokenizer import PieceTokenizer

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--count", type=int, default=10_000)
    parser.add_argument("--target", type=Path)
    parser.add_argument("--draft", type=Path)
    options = parser.parse_args()
    library = load_library()
    target: Tokenizer = LlamaTokenizer(options.target or resolve_model(None), library)
    draft: Tokenizer = LlamaTokenizer(options.draft, library) if options.draft else PieceTokenizer()
    for pair in ((target, draft), (draft, target)):
        num_scripts = run(*pair, seed=options.seed, count=options.count, progress=True)
    print(f"{options.count} texts in {num_scripts} scripts, both ways: every cache is a fresh one, every text the same")
    return 0


if __name__ == "__main__":
    sys.exit(main())
