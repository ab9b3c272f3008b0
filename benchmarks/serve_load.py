"""Tests the server under load, and compares its throughput with the offline engine's. Uses only loopback.

    python -m benchmarks.serve_load load --model fake          64 streaming clients for two minutes
    python -m benchmarks.serve_load load --model embedded
    python -m benchmarks.serve_load overhead                   throughput at concurrency 8, served and offline
    python -m benchmarks.serve_load hostile                    8 clients beside 32 abusive ones: see serve_hostile.py
    python -m benchmarks.serve_load watchers                   throughput with 20 watchers of the live view, and none

`load` compares every answer with the offline engine's for the same prompt and seed. Afterwards it checks for leaks:
requests, sequences and cells of the KV cache, memory. `overhead` runs the same requests served and offline, in random
order within a round, checks that the texts are equal, and compares within rounds. Server and offline engine run in
this process. `watchers` does the same with the page's event stream open 20 times, and not at all. Clients are another
process on the same machine, so their CPU time is shown. If a check fails, the exit status is 1.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter, sleep
from typing import Any

from benchmarks.memory import MemoryWatch, touch_all
from benchmarks.report import median_interval, provenance, spread, write_json
from outpace import LLM, SamplingParams
from outpace.backends.base import Tokenizer
from outpace.core import StepPlan
from outpace.engine.driver import Driver
from outpace.engine.engine import Engine
from outpace.models.resolve import resolve_model
from tests.fakes import ByteTokenizer, FakeModel, fake_engine, runner_of
from tests.server_helper import LiveServer

MAX_LAG = 0.020  # seconds; limit of the 99th percentile of the event loop's lag
MAX_GROWTH = 0.05  # limit of the growth of resident memory after STEADY_SECONDS
STEADY_SECONDS = 30  # warm-up of the load
MIN_RATIO = 0.95  # served over offline throughput
MIN_WATCHED = 0.99  # throughput with watchers over that without

FAKE_SECONDS = 0.005  # of a step of the fake model; it releases the GIL, as a real model does

STORE_TOKENS = 4096  # small, so that the store is full within seconds: later growth of memory is a leak

SUBJECTS = ("river", "market", "engine", "winter", "library", "harbour", "garden", "signal")
TASKS = (
    "Write a short story about a {}.",
    "List ten facts about a {}, one per line.",
    "Explain to a child what a {} is.",
    "Write a Python class that models a {}.",
)


def bodies(num_tokens: int, *, ignore_eos: bool = False) -> list[dict[str, Any]]:
    """Requests with different prompts and temperatures. Each has a seed, so it has one right answer."""
    prompts = [task.format(subject) for subject in SUBJECTS for task in TASKS]
    return [
        {
            "prompt": prompt,
            "temperature": (0.0, 0.7, 1.0)[i % 3],
            "seed": i,
            # Lengths differ. With equal lengths, all answers would end in the same step and all clients send together.
            "max_tokens": num_tokens // 2 + num_tokens * i * 7 // len(prompts) % num_tokens,
            "ignore_eos": ignore_eos,
        }
        for i, prompt in enumerate(prompts)
    ]


def params_of(body: dict[str, Any]) -> SamplingParams:
    return SamplingParams(**{name: body[name] for name in ("temperature", "seed", "max_tokens", "ignore_eos")})


class Clients:
    """The process of a load generator. It starts before the measurement."""

    def __init__(self, module: str = "serve_client") -> None:
        command = [sys.executable, "-m", f"benchmarks.{module}"]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def run(self, **job: Any) -> dict[str, Any]:
        self.begin(**job)
        return self.result()

    def begin(self, **job: Any) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(job) + "\n")
        self._process.stdin.flush()

    def result(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        answer: dict[str, Any] = json.loads(self._process.stdout.readline())
        return answer

    def kill(self) -> None:
        self._process.kill()
        self._process.wait(10)

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(10)


class BoundedFake(FakeModel):
    """A fake model with a bounded memo. The tests' fake keeps all logits, which would look like a leak under load."""

    def logits(self, context: Sequence[int]) -> Any:
        if len(self._memory) > 4096:
            self._memory.clear()
        return super().logits(context)


def make_fake(max_sequences: int) -> tuple[Engine, Tokenizer, int]:
    engine = fake_engine(
        BoundedFake(),
        max_sequences=max_sequences,
        cache_tokens=8192,
        max_context=1024,
        max_step_tokens=512,
        method="suffix",
        speculation="on",
        suffix_store_tokens=STORE_TOKENS,
    )
    runner = runner_of(engine)
    forward = runner.forward

    def timed_forward(plan: StepPlan) -> Any:
        runner.steps.clear()
        sleep(FAKE_SECONDS)
        return forward(plan)

    runner.forward = timed_forward  # type: ignore[method-assign]
    engine.calibrate()
    return engine, ByteTokenizer(), 1024


def make_model(name: str, max_sequences: int) -> tuple[LLM | None, Engine, Tokenizer, int]:
    if name == "fake":
        return None, *make_fake(max_sequences)
    llm = LLM(max_sequences=max_sequences, cache_tokens=8192, max_context=2048, suffix_store_tokens=STORE_TOKENS)
    llm.engine.calibrate()
    return llm, llm.engine, llm.tokenizer, llm.config.max_context


def offline_answers(engine: Engine, tokenizer: Tokenizer, wanted: Sequence[dict[str, Any]]) -> list[str]:
    driver = Driver(engine)
    requests = [engine.submit(tokenizer.encode(body["prompt"]), params_of(body)) for body in wanted]
    with driver.submit(lambda: requests) as stream:
        for _ in stream:
            pass
    engine.scheduler.forget_kept()
    return [request.writer.text for request in requests]


def quantile_bound(buckets: Sequence[tuple[str, float]], share: float) -> float:
    """The smallest bucket bound that is at least this quantile of the histogram."""
    total = buckets[-1][1]
    return float(next(bound for bound, count in buckets if count >= share * total))


def load(options: argparse.Namespace) -> int:
    wanted = bodies(options.tokens)
    llm, engine, tokenizer, max_context = make_model(options.model, options.clients)
    if llm is not None:
        touch_all(engine)
    expected = offline_answers(engine, tokenizer, wanted)
    clients = Clients()
    server = LiveServer(engine, tokenizer, max_context, model_names=("loaded",))
    streaming = [body | {"stream": True, "stream_options": {"include_usage": True}} for body in wanted]
    job = {"concurrency": options.clients, "seconds": options.seconds, "keep_alive": False}
    with MemoryWatch(options.seconds) as memory:
        result = clients.run(port=server.port, bodies=streaming, **job)
    clients.close()
    server.check_clean()
    lag = server.app.state.outpace.http.lag.buckets()
    metrics = server.metrics()
    server.stop()

    answers = result["answers"]
    wrong = [answer for answer in answers if answer["text"] != expected[answer["body"]]]
    num_tokens = sum(answer["num_tokens"] or 0 for answer in answers)
    early, late = memory.peaks(STEADY_SECONDS)
    growth = late / early - 1
    firsts = [answer["first"] for answer in answers]
    figures = {
        "answers": len(answers),
        "wrong_answers": len(wrong),
        "tokens_per_second": num_tokens / result["seconds"],
        "tokens_received_equal_counter": num_tokens == metrics["vllm:generation_tokens_total"],
        "events_per_answer": statistics.mean(answer.get("num_events", 0) for answer in answers),
        "first_event_seconds": {"median": statistics.median(firsts), "p99": p99(firsts)},
        "event_loop_lag_seconds": {"p50_at_most": quantile_bound(lag, 0.5), "p99_at_most": quantile_bound(lag, 0.99)},
        "event_loop_lag_samples": lag[-1][1],
        "resident_bytes": {f"in_the_first_{STEADY_SECONDS}_seconds": early, "afterwards": late},
        "resident_bytes_every_10_seconds": memory.samples[::10],
        "memory_growth": growth,
        "client_cpu_seconds": result["cpu_seconds"],
        "left_behind": "nothing",  # check_clean raises if it finds a leak
        "acceptance_rate": metrics["vllm:spec_decode_draft_acceptance_rate"],
    }
    holds = {
        "every answer equals the offline engine's": not wrong,
        "the counter of tokens equals what clients received": figures["tokens_received_equal_counter"],
        f"P99 of the event loop's lag is at most {MAX_LAG * 1000:g} ms": quantile_bound(lag, 0.99) <= MAX_LAG,
        f"memory grows by less than {MAX_GROWTH:.0%} after {STEADY_SECONDS} s": growth < MAX_GROWTH,
    }
    for name, value in figures.items():
        print(f"{name:32}{value}")
    for answer in wrong[:3]:
        print("WRONG", answer.get("error"), repr(answer["text"]), "wanted", repr(expected[answer["body"]]))
    return finish(options, holds, figures | {"clients": options.clients, "seconds": options.seconds}, llm)


@dataclass(slots=True)
class Trial:
    seconds: float
    texts: list[str]
    client_cpu_seconds: float = 0.0


def overhead(options: argparse.Namespace) -> int:
    """Run all variants in one process with one engine, one at a time."""
    llm = LLM(max_sequences=options.clients, speculation="off")
    wanted = bodies(options.tokens, ignore_eos=True)[::2]  # short rounds: the machine's speed changes little
    prompts, params = [body["prompt"] for body in wanted], [params_of(body) for body in wanted]
    num_tokens = sum(body["max_tokens"] for body in wanted)
    clients = Clients()
    server = LiveServer(llm.engine, llm.tokenizer, llm.config.max_context, model_names=("measured",))

    def offline() -> Trial:
        begin = perf_counter()
        outputs = server.aside(lambda: llm.generate(prompts, params, progress=False))
        return Trial(perf_counter() - begin, [output.outputs[0].text for output in outputs])

    def served(*, stream: bool) -> Trial:
        sent = [body | {"stream": stream} for body in wanted]
        result = clients.run(port=server.port, concurrency=options.clients, count=len(sent), bodies=sent)
        texts = {answer["body"]: answer["text"] for answer in result["answers"]}
        return Trial(result["seconds"], [texts[i] for i in range(len(sent))], result["cpu_seconds"])

    variants: dict[str, Callable[[], Trial]] = {
        "offline": offline,
        "whole": lambda: served(stream=False),
        "streamed": lambda: served(stream=True),
    }
    rates: dict[str, list[float]] = {name: [] for name in variants}
    cpu: dict[str, list[dict[str, float]]] = {name: [] for name in variants}
    order = list(variants)
    expected: list[str] | None = None
    for round_ in range(-1, options.rounds):  # the first round warms up
        random.shuffle(order)
        for name in order:
            loop_began = server.loop_cpu_seconds()
            trial = variants[name]()
            server.wait_until_idle()
            loop_seconds = server.loop_cpu_seconds() - loop_began
            server.aside(llm.engine.forget)
            expected = expected or trial.texts
            assert trial.texts == expected, f"{name}: an answer differs"
            if round_ >= 0:
                rates[name].append(num_tokens / trial.seconds)
                shares = {"event_loop": loop_seconds, "clients": trial.client_cpu_seconds}
                cpu[name].append({part: seconds / trial.seconds for part, seconds in shares.items()})
    clients.close()
    server.stop()

    print(f"{'tokens per second':24}{'median':>9}   quartiles")
    figures: dict[str, Any] = {}
    holds = {}
    for name, values in rates.items():
        ratios = [value / base for value, base in zip(values, rates["offline"], strict=True)]
        shares = {part: statistics.median(each[part] for each in cpu[name]) for part in ("event_loop", "clients")}
        figures[name] = {"tokens_per_second": statistics.median(values), "all": values, "share_of_a_core": shares}
        print(f"{name:24}{statistics.median(values):9.1f}   {spread(values, '.1f')}")
        if name != "offline":
            ratio, (low, high) = statistics.median(ratios), median_interval(ratios)
            figures[name] |= {"over_offline": ratio, "over_offline_95_percent": [low, high]}
            print(f"{'  over offline, paired':24}{ratio:9.3f}   95%: {low:.3f} .. {high:.3f}   >= {MIN_RATIO}")
            print(f"{'  of one core':24}event loop {shares['event_loop']:.1%}, clients {shares['clients']:.1%}")
            holds[f"{name}: at least {MIN_RATIO} of the offline engine's throughput"] = ratio >= MIN_RATIO
    return finish(options, holds, figures | {"clients": options.clients, "rounds": options.rounds}, llm)


@dataclass(slots=True)
class Watched:
    """Runs with one number of watchers."""

    seconds: list[float] = field(default_factory=list)
    loop_shares: list[float] = field(default_factory=list)  # of a core, by the event loop
    num_events: int = 0
    watcher_cpu_seconds: float = 0.0


def watchers(options: argparse.Namespace) -> int:
    """Run the same requests with and without watchers, in random order within a round; compare within rounds. Ctrl-C
    ends the rounds, and what was measured is reported."""
    llm = LLM(max_sequences=options.clients)
    wanted = bodies(options.tokens, ignore_eos=True)[::2]
    num_tokens = sum(body["max_tokens"] for body in wanted)
    sent = [body | {"stream": True} for body in wanted]
    clients, audience = Clients(), Clients("serve_watchers")
    llm.engine.calibrate()
    server = LiveServer(llm.engine, llm.tokenizer, llm.config.max_context, model_names=("measured",))
    expected: list[str] | None = None

    def run(count: int, found: Watched) -> None:
        nonlocal expected
        if count:
            audience.run(port=server.port, watchers=count)  # returns once all of them watch
        loop_began = server.loop_cpu_seconds()
        result = clients.run(port=server.port, concurrency=options.clients, count=len(sent), bodies=sent)
        found.loop_shares.append((server.loop_cpu_seconds() - loop_began) / result["seconds"])
        found.seconds.append(result["seconds"])
        if count:
            seen = audience.run(port=server.port, watchers=0)
            assert seen["events"] >= count, "the watchers saw nothing"
            found.num_events += seen["events"]
            found.watcher_cpu_seconds += seen["cpu_seconds"]
        server.wait_until_idle()
        server.aside(llm.engine.forget)
        texts = {answer["body"]: answer["text"] for answer in result["answers"]}
        expected = expected or [texts[i] for i in range(len(sent))]
        assert [texts[i] for i in range(len(sent))] == expected, "an answer differs"

    none, some = Watched(), Watched()
    try:
        run(options.watchers, Watched())  # warms up
        for round_ in range(options.rounds):
            pair = [(0, none), (options.watchers, some)]
            for count, found in random.sample(pair, 2):
                run(count, found)
            print(f"round {round_ + 1}: {none.seconds[-1] / some.seconds[-1]:.3f}", flush=True)
    except KeyboardInterrupt:
        print("interrupted; these are the rounds before")
    clients.kill()  # after an interruption they may be in the middle of a job
    audience.kill()
    server.stop()
    ratios = [bare / watched for bare, watched in zip(none.seconds, some.seconds, strict=False)]
    ratio, (low, high) = statistics.median(ratios), median_interval(ratios)
    figures = {
        "watchers": options.watchers,
        "rounds": len(ratios),
        "throughput_over_none": ratio,
        "throughput_over_none_95_percent": [low, high],
        "all_ratios": ratios,
        "tokens_per_second": [num_tokens / statistics.median(each.seconds) for each in (none, some)],
        "event_loop_share_of_a_core": [statistics.median(each.loop_shares) for each in (none, some)],
        "events_per_second": some.num_events / sum(some.seconds),
        "watchers_share_of_a_core": some.watcher_cpu_seconds / sum(some.seconds),
    }
    for name, value in figures.items():
        print(f"{name:34}{value}")
    holds = {f"{options.watchers} watchers leave at least {MIN_WATCHED} of the throughput": ratio >= MIN_WATCHED}
    return finish(options, holds, figures | {"clients": options.clients}, llm)


def p99(values: Sequence[float]) -> float:
    return sorted(values)[min(len(values) - 1, int(len(values) * 0.99))]


def finish(options: argparse.Namespace, holds: dict[str, bool], figures: dict[str, Any], llm: LLM | None) -> int:
    for what, ok in holds.items():
        print(f"{'holds' if ok else 'DOES NOT HOLD'}: {what}")
    if options.json:
        models = [resolve_model(None)] if llm is not None else []
        write_json(options.json, {"figures": figures, "holds": holds, "provenance": provenance(models)})
    if llm is not None:
        llm.close()
    return 0 if all(holds.values()) else 1


def main() -> int:
    from benchmarks.serve_hostile import hostile

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    for name, action, clients, tokens in (
        ("load", load, 64, 96),
        ("overhead", overhead, 8, 128),
        ("hostile", hostile, 8, 24),
        ("watchers", watchers, 8, 64),
    ):
        command = commands.add_parser(name)
        command.set_defaults(action=action)
        command.add_argument("--clients", type=int, default=clients, help="requests in flight (default: %(default)s)")
        command.add_argument("--tokens", type=int, default=tokens, help="mean tokens per answer (default: %(default)s)")
        command.add_argument("--json", type=Path, metavar="FILE", help="write the figures here")
    for name, model, seconds, help in (
        ("load", "fake", 120.0, "of the load"),
        ("hostile", "embedded", 4.0, "of one part of a round"),
    ):
        commands.choices[name].add_argument("--model", choices=("fake", "embedded"), default=model)
        commands.choices[name].add_argument("--seconds", type=float, default=seconds, help=f"{help} (%(default)s)")
    for name, rounds in (("overhead", 24), ("hostile", 16), ("watchers", 24)):
        commands.choices[name].add_argument("--rounds", type=int, default=rounds)
    commands.choices["hostile"].add_argument("--others", type=int, default=32, help="clients beside the good ones")
    commands.choices["watchers"].add_argument("--watchers", type=int, default=20)
    options = parser.parse_args()
    status: int = options.action(options)
    return status


if __name__ == "__main__":
    sys.exit(main())
