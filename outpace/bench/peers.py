"""Runs the same prompts through several engines, interleaved on one machine, and compares their speed and texts.

Every engine gets the same token ids and answers greedily, one request at a time. Speed is tokens per second from
request to complete answer, prefill included: what a user waits for. An engine's own plain decoding is the baseline of
its speculation, whose texts must equal it. Texts of two engines may differ, because they round differently and some
of them dequantise the weights differently.
"""

from __future__ import annotations

import argparse
import random
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter, sleep
from typing import Any

from tqdm import tqdm

from outpace.bench.figures import estimate_dict
from outpace.bench.formats import interval, number
from outpace.bench.peer import PEERS, is_installed
from outpace.bench.peer.base import Models, Peer, open_peer
from outpace.bench.provenance import provenance
from outpace.bench.results import save
from outpace.bench.statistics import ratio_of_rates
from outpace.bench.targets import encode
from outpace.bench.workloads import built_in
from outpace.config import usable_cores
from outpace.errors import UsageError
from outpace.llm import LLM
from outpace.models.resolve import resolve_model

CONTEXT = 2048
PAUSE = 0.2  # seconds before each request, because some engines' threads spin for a while after the one before
REFERENCE = ("outpace", "auto")
Variant = tuple[str, str]  # engine, its variant


@dataclass(slots=True)
class Attempt:
    workload: str
    text: str = ""
    num_tokens: int = 0
    seconds: float = 0.0
    error: str | None = None


def run(options: argparse.Namespace) -> int:
    names = _chosen(options.peers)
    model = resolve_model(options.model)
    draft = Path(options.draft) if options.draft else None
    prompts, end_ids = _prompts(model, options)
    threads = options.threads or usable_cores()
    models = Models(model, draft, threads, options.depth, CONTEXT, end_ids, options.backend)
    skipped = {name: "not installed" for name in names if not is_installed(name)}
    peers: dict[str, Peer] = {}
    for name in [each for each in names if each not in skipped]:
        try:
            peers[name] = open_peer(name, models)
        except Exception as error:  # an engine may raise anything; the others are still measured
            skipped[name] = f"cannot run {model.name}: {_briefly(error)}"
    attempts, was_cut_short = measure(peers, prompts, options.max_tokens, options.time_budget)
    for peer in peers.values():
        peer.close()
    results = {
        "provenance": provenance(["outpace", *sys.argv[1:]], [model, *([draft] if draft else [])]),
        "settings": {"threads": threads, "depth": options.depth, "max_tokens": options.max_tokens},
        "skipped": skipped,
        "was_cut_short": was_cut_short,
        "rows": rows(attempts),
    }
    print(as_text(results))
    if options.json:
        save(options.json, results)
    return 0


def _chosen(text: str | None) -> list[str]:
    names = [part.strip() for part in text.split(",")] if text else list(PEERS)
    unknown = [name for name in names if name not in PEERS]
    if unknown:
        raise UsageError(f"{unknown[0]!r} is not among the peers {', '.join(PEERS)}; check --peers")
    return names


def _prompts(model: Path, options: argparse.Namespace) -> tuple[list[tuple[str, list[int]]], frozenset[int]]:
    """Token ids by workload, from this model's own chat template."""
    workloads = [name.strip() for name in options.workloads.split(",")]
    chosen = [(name, prompt) for name in workloads for prompt in built_in(name, options.requests)]
    with LLM(str(model), backend=options.backend, max_context=CONTEXT) as llm:
        return [(name, encode(llm, prompt)) for name, prompt in chosen], llm.tokenizer.end_ids


def measure(
    peers: Mapping[str, Peer], prompts: Sequence[tuple[str, list[int]]], max_tokens: int, time_budget: float
) -> tuple[dict[Variant, list[Attempt]], bool]:
    """Run each prompt through every variant, in changing order. Prompts are shuffled, so that a run that is cut short
    covers all workloads alike."""
    variants = [(name, variant) for name, peer in peers.items() for variant in peer.variants]
    attempts: dict[Variant, list[Attempt]] = {variant: [] for variant in variants}
    rng = random.Random(0)
    order = rng.sample(list(prompts), len(prompts))
    for name, variant in variants:
        _attempt(peers[name], variant, *order[0], 4)  # warm-up: a first request is slower, as it touches new memory
    end = perf_counter() + time_budget
    bar = tqdm(total=len(order) * len(variants), unit="answer", disable=not sys.stderr.isatty())
    try:
        for workload, tokens in order:
            if perf_counter() >= end:
                return attempts, True
            turn = {}
            for name, variant in rng.sample(variants, len(variants)):
                turn[name, variant] = _attempt(peers[name], variant, workload, tokens, max_tokens)
                bar.update(1)
            for key, attempt in turn.items():  # a prompt counts only when every variant has run it
                attempts[key].append(attempt)
    except KeyboardInterrupt:
        if not any(attempts.values()):
            raise
        return attempts, True
    finally:
        bar.close()
    return attempts, False


def _attempt(peer: Peer, variant: str, workload: str, tokens: Sequence[int], max_tokens: int) -> Attempt:
    sleep(PAUSE)
    begin = perf_counter()
    try:
        answer = peer.answer(variant, tokens, max_tokens)
    except Exception as error:  # any exception is shown as a failure of that engine
        return Attempt(workload, error=_briefly(error))
    return Attempt(workload, answer.text, answer.num_tokens, perf_counter() - begin)


def rows(attempts: Mapping[Variant, Sequence[Attempt]]) -> list[dict[str, Any]]:
    """One row per variant, the fastest first."""
    plains = {name: next(v for v in attempts if v[0] == name) for name, _ in attempts}
    found = []
    for variant, tries in attempts.items():
        own_plain = attempts[plains[variant[0]]]
        reference = attempts.get(REFERENCE)
        done = [each for each in tries if not each.error]
        seconds = sum(each.seconds for each in done)
        found.append(
            {
                "engine": variant[0],
                "variant": variant[1],
                "num_requests": len(tries),
                "num_failed": len(tries) - len(done),
                "errors": sorted({each.error for each in tries if each.error}),
                "tokens_per_second": sum(each.num_tokens for each in done) / seconds if seconds else None,
                "to_own_plain": _ratio(tries, own_plain),
                "to_outpace_auto": _ratio(tries, reference) if reference else None,
                "same_as_own_plain": _num_same(tries, own_plain),
                "same_as_outpace_plain": _num_same(tries, attempts.get(("outpace", "plain"), ())),
                "by_workload": _by_workload(done),
            }
        )
    return sorted(found, key=lambda row: -(row["tokens_per_second"] or 0.0))


def _ratio(ours: Sequence[Attempt], theirs: Sequence[Attempt]) -> dict[str, Any] | None:
    pairs = [(a, b) for a, b in zip(ours, theirs, strict=True) if not a.error and not b.error]
    if not pairs:
        return None
    return estimate_dict(
        ratio_of_rates(
            [a.num_tokens for a, _ in pairs],
            [a.seconds for a, _ in pairs],
            [b.num_tokens for _, b in pairs],
            [b.seconds for _, b in pairs],
        )
    )


def _num_same(ours: Sequence[Attempt], theirs: Sequence[Attempt]) -> int | None:
    if not theirs:
        return None
    return sum(a.text.strip() == b.text.strip() and not a.error for a, b in zip(ours, theirs, strict=True))


def _by_workload(tries: Sequence[Attempt]) -> dict[str, float]:
    names = sorted({each.workload for each in tries})
    groups = {name: [each for each in tries if each.workload == name] for name in names}
    return {name: sum(e.num_tokens for e in g) / sum(e.seconds for e in g) for name, g in groups.items()}


def as_text(results: Mapping[str, Any]) -> str:
    return "\n".join(_lines(results))


def _lines(results: Mapping[str, Any]) -> Iterator[str]:
    table = results["rows"]
    workloads = list(table[0]["by_workload"]) if table else []
    yield (
        f"{'':30}{'tok/s':>8}{'to its own plain':>24}{'to outpace auto':>24}{'same text':>11}{'as ours':>9}"
        + "".join(f"{name:>11}" for name in workloads)
    )
    for row in table:
        asked = row["num_requests"]
        yield (
            f"{row['engine'] + ', ' + row['variant']:30}{number(row['tokens_per_second'], '.1f'):>8}"
            f"{interval(row['to_own_plain']):>24}{interval(row['to_outpace_auto']):>24}"
            f"{_of(row['same_as_own_plain'], asked):>11}{_of(row['same_as_outpace_plain'], asked):>9}"
            + "".join(f"{number(row['by_workload'].get(name), '.1f'):>11}" for name in workloads)
        )
        for error in row["errors"]:
            yield f"    failed: {error}"
    for name, reason in results["skipped"].items():
        yield f"{name}: skipped, {reason}"
    ahead = [row for row in table if (row["to_outpace_auto"] or {}).get("low") and row["to_outpace_auto"]["low"] > 1]
    for row in ahead:
        yield f"{row['engine']}, {row['variant']} is ahead of Outpace here: {interval(row['to_outpace_auto'])}"
    if results["was_cut_short"]:
        yield "The run was cut short; the figures cover only the prompts that every engine has run."


def _of(count: int | None, whole: int) -> str:
    return "-" if count is None else f"{count}/{whole}"


def _briefly(error: Exception) -> str:
    return " ".join(str(error).split())[:240] or type(error).__name__
