"""What a bridge between two tokenizers costs beside the passes of the draft model; `plan/bridge.py` has the figures.

    python -m benchmarks.bridge_time --target TARGET.gguf --draft DRAFT.gguf --prompts FILE [--json FILE]

Only the tokenizers run. Every text is walked along in steps, as an engine does: a draft of a few tokens, of which the
target accepts a random number, 60% each. Counted are the tokens that the draft model has to read before a draft, at
least one, and the host's time for reading the target's text and for splitting the draft's.
"""

from __future__ import annotations

import argparse
import random
import statistics
from collections.abc import Iterator
from pathlib import Path
from time import perf_counter

from benchmarks.prompts import load_prompts
from benchmarks.report import provenance, write_json
from outpace.backends.base import Tokenizer
from outpace.kv.prefix import common_prefix_length
from outpace.models.gguf_tokenizer import LlamaTokenizer
from outpace.models.llama_library import load_library
from outpace.speculation.proposers.text_bridge import TextBridge

CHANCE = 0.6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", type=Path, required=True, help="a GGUF file")
    parser.add_argument("--draft", type=Path, required=True, help="a GGUF file")
    parser.add_argument("--prompts", type=Path, required=True, help="Spec-Bench, HumanEval or JSON lines")
    parser.add_argument("--count", type=int, default=40, help="texts (default: %(default)s)")
    parser.add_argument("--depth", type=int, default=4, help="of a draft (default: %(default)s)")
    parser.add_argument("--json", type=Path, metavar="FILE")
    options = parser.parse_args()
    library, rng = load_library(), random.Random(0)
    target, draft = (LlamaTokenizer(path, library) for path in (options.target, options.draft))
    steps = [
        step
        for text in load_prompts(options.prompts, options.count)
        for step in walked(target, draft, text, options.depth, rng)
    ]
    seconds = statistics.median(each for _, each in steps)
    found = {
        "texts": options.count,
        "steps": len(steps),
        "depth": options.depth,
        "tokens_read": statistics.mean(read for read, _ in steps),
        "host_seconds": seconds,
        "host_seconds_per_draft_token": seconds / options.depth,
    }
    print(
        f"{found['steps']} drafts of {options.depth} tokens: {found['tokens_read']:.2f} tokens to read before each, "
        f"{1e6 * seconds:.0f} us of the host (median), {1e6 * seconds / options.depth:.0f} us for each draft token"
    )
    if options.json:
        write_json(options.json, {"provenance": provenance([options.target, options.draft]), **found})


def walked(
    target: Tokenizer, draft: Tokenizer, text: str, depth: int, rng: random.Random
) -> Iterator[tuple[int, float]]:
    """For every draft: tokens that the draft model reads before it, and seconds of the host. No text is split twice
    from memory: each has a bridge of its own."""
    bridge = TextBridge(target, draft)
    tokens, fed, at = target.encode(text), list[int](), 8
    bridged, ahead = bridge.start(), bridge.start()
    bridge.read(bridged, tokens[:at])
    while at + depth < len(tokens):
        bridge.read(ahead, tokens[: at + depth])  # what the text says next, in the draft model's tokens
        begin = perf_counter()
        bridge.read(bridged, tokens[:at])
        seconds = perf_counter() - begin
        ours = bridged.tokens
        num_read = max(1, len(ours) - common_prefix_length(fed, ours))
        drafted = ahead.tokens[len(ours) :][:depth]
        said = b"".join(bridge.draft_bytes(token) or b"" for token in drafted)
        begin = perf_counter()
        bridge.target_tokens(said)
        seconds += perf_counter() - begin
        if fed:
            yield num_read, seconds
        fed = ours + drafted[:-1]
        at += 1 + next((i for i in range(depth) if rng.random() > CHANCE), depth)


if __name__ == "__main__":
    main()
