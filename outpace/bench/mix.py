"""The prompts of a run and their proportions, from built-in workloads and files: `json=0.6,story=0.4`."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from pathlib import Path

from outpace.bench.prompt_files import load_prompts
from outpace.bench.workloads import BUILT_IN, Prompt, built_in
from outpace.errors import UsageError


def parse_mix(text: str) -> dict[str, float]:
    """Names with weights; a name alone has weight 1."""
    weights: dict[str, float] = {}
    for part in text.split(","):
        name, _, weight = part.strip().rpartition("=") if "=" in part else (part.strip(), "", "1")
        try:
            value = float(weight)
        except ValueError:
            value = -1.0
        if not name or not 0 < value < float("inf"):
            raise UsageError(
                f"a mix is NAME=WEIGHT,NAME=WEIGHT with weights above 0, for example json=0.6,story=0.4; got {text!r}"
            )
        if name in weights:
            raise UsageError(f"{name!r} appears twice in the mix; give it one weight")
        weights[name] = value
    return weights


def load_sources(names: Sequence[str], max_tokens: int | None = None) -> dict[str, list[Prompt]]:
    """The prompts behind each name: a built-in workload, or else a file."""
    sources = {}
    for name in names:
        if name in BUILT_IN:
            prompts = built_in(name)
        elif Path(name).expanduser().exists():
            path = Path(name).expanduser()
            prompts = load_prompts(path) if max_tokens is None else load_prompts(path, max_tokens)
        else:
            raise UsageError(
                f"{name!r} is neither a built-in workload ({', '.join(BUILT_IN)}) nor a file; check the name"
            )
        sources[name] = [_capped(prompt, max_tokens) for prompt in prompts]
    return sources


def _capped(prompt: Prompt, limit: int | None) -> Prompt:
    if limit is None or prompt.max_tokens <= limit:
        return prompt
    return Prompt(prompt.messages, prompt.category, limit, prompt.temperature)


def draw(
    sources: Mapping[str, Sequence[Prompt]], weights: Mapping[str, float], count: int, seed: int = 0
) -> list[Prompt]:
    """`count` prompts in the proportions of the mix; the prompts of each source are shuffled.

    Sources do not alternate at random: the next prompt comes from the source furthest behind its share, so that small
    blocks have the same mix as the whole. An exhausted source starts again.
    """
    rng = random.Random(seed)
    total = sum(weights.values())
    decks = {name: rng.sample(list(prompts), len(prompts)) for name, prompts in sources.items()}
    given = dict.fromkeys(sources, 0)
    drawn = []
    for place in range(1, count + 1):
        name = max(sources, key=lambda each: weights[each] / total * place - given[each])
        drawn.append(decks[name][given[name] % len(decks[name])])
        given[name] += 1
    return drawn
