"""Constrained extraction: `auto` beside plain decoding under the same schema, and what the masks cost.

    python -m benchmarks.structured [--model FILE] [--rounds N] [--prompts FILE] [--json FILE]

Every prompt asks for the facts of a short text as JSON under a schema. One process answers each prompt with `auto` and
with plain decoding, in turns and in changing order; both must give the same tokens. The speed-up of a prompt is the
median over rounds of plain seconds / auto seconds. Then eight requests decode plainly together under the schema: mask
work is all time in matchers, in applying masks and in sampling again with a mask, given as a share of the other time of
those steps. `--prompts` is a JSONL file with the fields `text` and `schema`, to be used instead of the built-in texts.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import Any

from benchmarks.report import median_interval, provenance, write_json
from benchmarks.stopwatch import Stopwatch
from outpace import LLM, SamplingParams, SpeculationParams, StructuredOutput
from outpace.backends.native.verifier import NativeVerifier
from outpace.decoding.matcher import Matcher
from outpace.models.resolve import resolve_model

PERSON: dict[str, Any] = {
    "type": "object",
    "properties": {
        "full_name": {"type": "string", "maxLength": 40},
        "age_in_years": {"type": "integer", "minimum": 0, "maximum": 120},
        "home_city": {"type": "string", "maxLength": 40},
        "occupation": {"type": "string", "maxLength": 40},
        "languages_spoken": {"type": "array", "items": {"type": "string", "maxLength": 20}, "maxItems": 4},
        "employment_status": {"enum": ["employed", "self-employed", "retired", "student", "unknown"]},
        "has_children": {"type": "boolean"},
    },
    "required": [
        "full_name", "age_in_years", "home_city", "occupation", "languages_spoken", "employment_status", "has_children",
    ],
    "additionalProperties": False,
}  # fmt: skip
ORDER: dict[str, Any] = {
    "type": "object",
    "properties": {
        "order_number": {"type": "string", "pattern": "^[A-Z]{2}-[0-9]{4,6}$"},
        "customer_name": {"type": "string", "maxLength": 40},
        "items": {
            "type": "array",
            "minItems": 1,
            "maxItems": 4,
            "items": {
                "type": "object",
                "properties": {
                    "product_name": {"type": "string", "maxLength": 40},
                    "quantity": {"type": "integer", "minimum": 1, "maximum": 99},
                },
                "required": ["product_name", "quantity"],
                "additionalProperties": False,
            },
        },
        "delivery_method": {"enum": ["standard", "express", "collection"]},
        "is_gift": {"type": "boolean"},
    },
    "required": ["order_number", "customer_name", "items", "delivery_method", "is_gift"],
    "additionalProperties": False,
}
TEXTS: list[tuple[str, dict[str, Any]]] = [
    ("Maria Gonzales, 34, is a nurse in Valencia. She speaks Spanish and English and has two sons.", PERSON),
    ("My neighbour Tom Baker retired from teaching at 67. He lives in Leeds with his wife; they have no kids.", PERSON),
    ("Aiko Tanaka, a student of 21 from Kyoto, speaks Japanese, Korean and some German. No children.", PERSON),
    ("Samuel Okoro works for himself as a carpenter in Lagos. He is 45, a father of three, and speaks Yoruba.", PERSON),
    ("Lena Fischer, 52, employed as an architect in Hamburg, mother of one, speaks German and French.", PERSON),
    ("Order AB-20417 for Priya Nair: 2 desk lamps and 1 office chair, express delivery, not a gift.", ORDER),
    ("John Smith ordered three coffee mugs and one tea pot under XY-3391. Gift wrap, standard delivery please.", ORDER),
    ("Collection: order QR-77120, customer Elena Petrova, 5 notebooks, 12 pencils, 1 ruler. For herself.", ORDER),
]
INSTRUCTION = "Write the facts of this text as JSON."


@dataclass
class Prompt:
    text: str
    schema: dict[str, Any]

    def messages(self) -> list[dict[str, str]]:
        return [{"role": "user", "content": f"{INSTRUCTION}\n\n{self.text}"}]

    def params(self, mode: Any, temperature: float) -> SamplingParams:
        return SamplingParams(
            structured=StructuredOutput(json_schema=self.schema),
            temperature=temperature,
            seed=7,
            max_tokens=256,
            speculation=SpeculationParams(mode=mode),
        )


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", metavar="FILE")
    parser.add_argument("--rounds", type=int, default=5, metavar="N")
    parser.add_argument("--temperature", type=float, nargs="+", default=[0.0, 1.0], metavar="T")
    parser.add_argument("--prompts", type=Path, metavar="FILE")
    parser.add_argument("--json", type=Path, default=Path("benchmarks/results/structured.json"), metavar="FILE")
    options = parser.parse_args(arguments)
    prompts = read_prompts(options.prompts)
    with LLM(options.model) as llm:
        llm.engine.calibrate()
        cells = [extraction(llm, prompts, temperature, options.rounds) for temperature in options.temperature]
        shares = [mask_share(llm, prompts, temperature) for temperature in options.temperature]
    results = provenance([resolve_model(options.model)]) | {"extraction": cells, "mask_work": shares}
    write_json(options.json, results)
    for cell in cells:
        low, high = cell["interval"]
        print(f"temperature {cell['temperature']}: auto is {cell['speedup']:.2f}x plain ({low:.2f} .. {high:.2f})")
    for share in shares:
        print(
            f"temperature {share['temperature']}: masks take {share['share']:.1%} of the rest of a plain step with "
            f"{share['requests']} requests"
        )
    return 0


def read_prompts(path: Path | None) -> list[Prompt]:
    if path is None:
        return [Prompt(text, schema) for text, schema in TEXTS]
    lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    return [Prompt(line["text"], line["schema"]) for line in lines]


def extraction(llm: LLM, prompts: Sequence[Prompt], temperature: float, rounds: int) -> dict[str, Any]:
    """Every prompt with `auto` and plainly, in turns; the first round is not counted."""
    ratios: dict[int, list[float]] = {i: [] for i in range(len(prompts))}
    num_tokens = drafted = accepted = num_finished = 0
    for turn in range(rounds + 1):
        for i, prompt in enumerate(prompts):
            seconds, tokens = {}, {}
            for mode in ("off", "auto") if (turn + i) % 2 else ("auto", "off"):
                llm.engine.forget()  # otherwise a later round finds its own earlier answer
                begin = perf_counter()
                [answer] = llm.chat(prompt.messages(), prompt.params(mode, temperature))[0].outputs
                seconds[mode], tokens[mode] = perf_counter() - begin, answer.token_ids
                if mode == "auto" and turn:
                    drafted += answer.speculation.num_drafted
                    accepted += answer.speculation.num_accepted
                    num_tokens += len(answer.token_ids)
                    num_finished += answer.finish_reason == "stop"
            if tokens["off"] != tokens["auto"]:
                raise SystemExit(f"prompt {i} gave other tokens with speculation; this is a fault")
            if turn:
                ratios[i].append(seconds["off"] / seconds["auto"])
    medians = [statistics.median(each) for each in ratios.values()]
    return {
        "temperature": temperature,
        "speedup": statistics.median(medians),
        "interval": median_interval(medians),
        "per_prompt": medians,
        "accepted_per_drafted": accepted / max(1, drafted),
        "accepted_per_token": accepted / num_tokens,
        "finished": num_finished / (rounds * len(prompts)),
    }


@contextmanager
def watched_masks() -> Iterator[Stopwatch]:
    """Times all that matchers do, the application of masks to logits, and sampling again with a mask."""
    watch = Stopwatch()
    of_matchers = ("mask", "allows", "only_token", "masked", "count_allowed", "forced", "ending", "advance")
    watched: list[tuple[type, str]] = [(Matcher, name) for name in of_matchers]
    watched += [(NativeVerifier, name) for name in ("run_with_masks", "own_token")]
    methods = [(owner, name, getattr(owner, name)) for owner, name in watched]
    for owner, name, method in methods:
        setattr(owner, name, watch.wrapped(method))
    try:
        yield watch
    finally:
        for owner, name, method in methods:
            setattr(owner, name, method)


def mask_share(llm: LLM, prompts: Sequence[Prompt], temperature: float, num_requests: int = 8) -> dict[str, Any]:
    """Mask work of plain steps in which all requests decode, by step."""
    engine, shares, work = llm.engine, list[float](), list[float]()
    for _ in range(3):
        chosen = [prompts[i % len(prompts)] for i in range(num_requests)]
        requests = [engine.submit(llm.encode_chat(each.messages()), each.params("off", temperature)) for each in chosen]
        while all(request.finish_reason is None for request in requests):
            with watched_masks() as watch:
                begin = perf_counter()
                engine.step()
                seconds = perf_counter() - begin
            if engine.stats.num_decode_rows == num_requests and not engine.stats.num_prefill_tokens:
                shares.append(watch.seconds / (seconds - watch.seconds))
                work.append(watch.seconds)
        for request in requests:
            engine.abort(request)
    return {
        "temperature": temperature,
        "requests": num_requests,
        "steps": len(shares),
        "share": statistics.median(shares),
        "share_quartiles": statistics.quantiles(shares, n=4),
        "microseconds_per_request": 1e6 * statistics.median(work) / num_requests,
    }


if __name__ == "__main__":
    sys.exit(main())
