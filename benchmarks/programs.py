"""Programs in one batch, beside the same calls through the API of `outpace serve`, and one program after the other.

    python -m benchmarks.programs [--model FILE] [--count 64] [--rounds 3] [--json FILE]

Each program extracts four fields of a short record into a JSON frame: the frame is text, the fields are generated, and
every generation continues the text with the fields before it. Four ways, in turns:

    programs     `outpace.programs.run` on an LLM in this process, all programs at once
    api          one thread per program, which sends the same four requests to `outpace serve` in another process
    api client   `outpace.programs.run` with the URL of that server
    one by one   `outpace.programs.run` with one program at a time

Both engines have the same settings. All that was learned from earlier texts is dropped before every run, prefixes too.
The fields must be equal in all ways. Throughput is generated tokens over the time from the first program's start to the
last one's end. Records are made from a fixed seed.
"""

from __future__ import annotations

import argparse
import random
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from time import perf_counter
from typing import Any

import httpx

from benchmarks.report import provenance, spread, write_json
from outpace import LLM
from outpace.models.resolve import resolve_model
from outpace.programs import Interrupted, State, gen, run

INSTRUCTION = """\
Read the record of a support call and write its facts as JSON.

Record: Call 4410, taken on 12 May. Ms Iris Novak from Graz reported that the kettle she bought in March leaks at the \
handle. She was calm and asked for a refund. We agreed on a refund and closed the case.
{"customer": "Iris Novak", "product": "kettle", "problem": "leaks at the handle", "outcome": "refund"}

"""
FIELDS = (("customer", 16), ("product", 12), ("problem", 24), ("outcome", 16))
NAMES = "Ana Lopez, Tom Baker, Aiko Tanaka, Samuel Okoro, Lena Fischer, Priya Nair, Elena Petrova, Omar Haddad"
CITIES = "Porto, Leeds, Kyoto, Lagos, Hamburg, Pune, Varna, Amman"
PRODUCTS = "toaster, desk lamp, bicycle, office chair, headphones, blender, printer, tent"
PROBLEMS = (
    "does not switch on, arrived with a broken foot, makes a loud noise, smells of smoke, has lost its colour, "
    "stops after ten minutes"
)
WAYS = ("programs", "api", "api client", "one by one")
OUTCOMES = "refund, repair, replacement, visit of a technician"


def records(count: int, seed: int = 0) -> list[str]:
    rng = random.Random(seed)

    def one(listed: str) -> str:
        return rng.choice(listed.split(", "))

    return [
        f"Call {rng.randint(1000, 9999)}, taken on {rng.randint(1, 28)} June. {one('Mr, Ms, Dr')} {one(NAMES)} from "
        f"{one(CITIES)} called about a {one(PRODUCTS)} that was bought {rng.randint(2, 9)} weeks ago in our shop. The "
        f"customer said that it {one(PROBLEMS)}, and was {one('calm, upset, in a hurry, very polite')}. "
        f"{one('We looked at the invoice together. A photo was sent by mail. The warranty is still valid.')} "
        f"The call took {rng.randint(3, 40)} minutes. At the end we agreed on a {one(OUTCOMES)}."
        for _ in range(count)
    ]


def frames(record: str) -> Iterator[tuple[str, str, int]]:
    """The text before each field, its name, and how long it may be."""
    for number, (name, max_tokens) in enumerate(FIELDS):
        yield f'{INSTRUCTION}Record: {record}\n{{"{name}": "' if number == 0 else f'", "{name}": "', name, max_tokens


def extract(s: State, record: str) -> None:
    for frame, name, max_tokens in frames(record):
        s += frame
        s += gen(name, max_tokens=max_tokens, stop='"')
    s += '"}'


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", metavar="FILE", help="a GGUF file (default: the embedded SmolLM2)")
    parser.add_argument("--count", type=int, default=64, metavar="N", help="programs (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=3, metavar="N", help="(default: %(default)s)")
    parser.add_argument("--json", type=Path, metavar="FILE")
    options = parser.parse_args(arguments)
    inputs = records(options.count)
    with served(options.model) as url, LLM(options.model) as llm:
        llm.engine.calibrate()
        results = measure(llm, url, inputs, options.rounds)
    print_table(results)
    if options.json:
        settings = {"count": options.count, "rounds": options.rounds, "fields": len(FIELDS)}
        write_json(options.json, provenance([resolve_model(options.model)]) | settings | results)
    return 0 if results["same_answers"] else 1


@contextmanager
def served(model: str | None) -> Iterator[str]:
    """The address of `outpace serve` in another process, with default settings."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    chosen = [model] if model else []
    command = [sys.executable, "-m", "outpace", "serve", *chosen, "--port", str(port), "--max-queued-requests", "256"]
    child = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    url = f"http://127.0.0.1:{port}"
    try:
        for _ in range(600):
            if child.poll() is not None:
                raise SystemExit(f"the server ended with status {child.returncode}: {' '.join(command)}")
            try:
                if httpx.get(f"{url}/health").status_code == 200:
                    break
            except httpx.HTTPError:
                time.sleep(0.1)
        yield url
    finally:
        child.terminate()
        child.wait(30)


@dataclass
class Way:
    """One way to run the programs, over all rounds."""

    seconds: list[float] = field(default_factory=list)
    fields: list[dict[str, str]] = field(default_factory=list)
    counts: dict[str, int] | None = None


def measure(llm: LLM, url: str, inputs: Sequence[str], rounds: int) -> dict[str, Any]:
    """Every way with a few programs to warm up, then `rounds` times in changing order. Ctrl-C keeps whole rounds."""
    ways = {name: Way() for name in WAYS}
    num_rounds = 0
    try:
        for turn in range(rounds + 1):
            for name in WAYS if turn % 2 else WAYS[::-1]:
                once(llm, url, inputs if turn else inputs[:4], name, ways[name])
                print(f"round {turn}, {name}: {ways[name].seconds[-1]:.2f} s", file=sys.stderr)
            if turn == 0:
                for way in ways.values():
                    way.seconds.clear()
            num_rounds = turn
    except (KeyboardInterrupt, Interrupted):
        print("interrupted; whole rounds count", file=sys.stderr)
    if not num_rounds:
        raise SystemExit("no round is complete")
    return summary({name: replace(way, seconds=way.seconds[:num_rounds]) for name, way in ways.items()})


def once(llm: LLM, url: str, inputs: Sequence[str], name: str, way: Way) -> None:
    llm.engine.forget()
    httpx.post(f"{url}/reset_prefix_cache").raise_for_status()
    begin = perf_counter()
    if name == "api":
        way.fields = through_api(url, inputs)
    else:
        on = url if name == "api client" else llm
        done = run(extract, inputs, on=on, at_once=1 if name == "one by one" else len(inputs), progress=False)
        for result in done:
            _ = result.value  # raises the error of a program that failed, or was interrupted
        way.fields = [result.values for result in done]
        way.counts = counted([result.state for result in done])
    way.seconds.append(perf_counter() - begin)


def summary(ways: dict[str, Way]) -> dict[str, Any]:
    counts, api = ways["programs"].counts, ways["api"].seconds
    assert counts is not None
    return {
        "ways": {
            name: {
                "seconds": way.seconds,
                "tokens_per_second": counts["tokens"] / statistics.median(way.seconds),
                "over_api": statistics.median(a / b for a, b in zip(api, way.seconds, strict=True)),
                "over_api_by_round": [a / b for a, b in zip(api, way.seconds, strict=True)],
                "counts": way.counts,
            }
            for name, way in ways.items()
        },
        "num_tokens": counts["tokens"],
        "same_answers": all(way.fields == ways["programs"].fields for way in ways.values()),
        "answers": ways["programs"].fields[:8],
    }


def counted(states: Sequence[State]) -> dict[str, int]:
    answers = [state.answer(name) for state in states for name, _ in FIELDS]
    return {
        "prompt_tokens": sum(each.num_prompt_tokens for each in answers),
        "cached_tokens": sum(each.num_cached_tokens for each in answers),
        "tokens": sum(each.num_tokens for each in answers),
        "accepted": sum(each.num_accepted for each in answers),
    }


def through_api(url: str, inputs: Sequence[str]) -> list[dict[str, str]]:
    """The same calls by hand, as an application makes them: a thread for each record."""
    with httpx.Client(timeout=600, limits=httpx.Limits(max_connections=len(inputs))) as client:
        model = client.get(f"{url}/v1/models").json()["data"][0]["id"]

        def answer(record: str) -> dict[str, str]:
            text, found = "", dict[str, str]()
            for frame, name, max_tokens in frames(record):
                text += frame
                body = {"model": model, "prompt": text, "max_tokens": max_tokens, "temperature": 0, "stop": '"'}
                reply = client.post(f"{url}/v1/completions", json=body).raise_for_status().json()
                found[name] = reply["choices"][0]["text"]
                text += found[name]
            return found

        with ThreadPoolExecutor(len(inputs)) as pool:
            return list(pool.map(answer, inputs))


def print_table(results: dict[str, Any]) -> None:
    print(f"{'way':12}{'seconds':>9}{'tokens/s':>10}{'over api':>10}{'by round':>16}{'cached prompt tokens':>24}")
    for way, row in results["ways"].items():
        counts = row["counts"]
        cached = f"{counts['cached_tokens']} of {counts['prompt_tokens']}" if counts else "-"
        print(
            f"{way:12}{statistics.median(row['seconds']):9.2f}{row['tokens_per_second']:10.1f}{row['over_api']:10.2f}"
            f"{spread(row['over_api_by_round'], '.2f'):>16}{cached:>24}"
        )
    print(f"{results['num_tokens']} tokens; same answers: {results['same_answers']}")


if __name__ == "__main__":
    sys.exit(main())
