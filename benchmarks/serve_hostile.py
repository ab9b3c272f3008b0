"""`python -m benchmarks.serve_load hostile`: what good clients get while others abuse the server.

Eight good clients stream short answers. Beside them run, in turn, 32 clients that behave well and are as busy as they
can be, and 32 that abuse the server (`hostile_client.py`). The order within a round is random. The good clients must
lose no answer, each must equal the offline engine's, and their 99th percentile of the time to the end of an answer may
grow by at most MAX_RATIO. The bars are a 95% bootstrap interval over rounds. Good clients, others and the server are
three processes on one machine, so abusers also take CPU time from the server, as they would not from afar. The fake
model makes the comparison harder: its steps are Python, which the event loop's work on abusers holds up, and beside
well-behaved clients they cost next to nothing.

The server allows only MAX_CONNECTIONS, fewer than the slow abusers hold, so that the house is always full.
"""

from __future__ import annotations

import argparse
import random
import statistics
from collections import Counter
from collections.abc import Sequence
from time import sleep
from typing import Any

from benchmarks.serve_load import Clients, bodies, finish, make_model, offline_answers, p99
from outpace.server import logs
from tests.server_helper import LiveServer

MAX_RATIO = 1.5
MAX_CONNECTIONS = 64
WARM_UP_SECONDS = 0.5
CONDITIONS = ("well-behaved", "abusive")


def ratio_interval(rounds: Sequence[dict[str, list[float]]], *, draws: int = 2000) -> tuple[float, float, float]:
    """The ratio of the pooled P99s, abusive over well-behaved, with a 95% bootstrap interval over rounds."""

    def ratio(some: Sequence[dict[str, list[float]]]) -> float:
        before, after = (p99([value for each in some for value in each[name]]) for name in CONDITIONS)
        return after / before

    rng = random.Random(1)
    drawn = sorted(ratio(rng.choices(rounds, k=len(rounds))) for _ in range(draws))
    return ratio(rounds), drawn[int(draws * 0.025)], drawn[int(draws * 0.975)]


def hostile(options: argparse.Namespace) -> int:
    logs.configure("warning", "text")
    wanted = bodies(options.tokens)
    llm, engine, tokenizer, max_context = make_model(options.model, options.clients + options.others)
    expected = offline_answers(engine, tokenizer, wanted)
    good, others = Clients(), {"well-behaved": Clients(), "abusive": Clients("hostile_client")}
    server = LiveServer(engine, tokenizer, max_context, model_names=("abused",), max_connections=MAX_CONNECTIONS)
    streaming = [body | {"stream": True, "stream_options": {"include_usage": True}} for body in wanted]
    good_job: dict[str, Any] = {"bodies": streaming, "concurrency": options.clients, "keep_alive": False}
    other_jobs: dict[str, dict[str, Any]] = {
        "well-behaved": {"bodies": streaming, "concurrency": options.others, "keep_alive": False},
        "abusive": {"clients": options.others},
    }
    rounds: list[dict[str, list[float]]] = []
    answers: list[dict[str, Any]] = []
    attacks: Counter[str] = Counter()
    for number in range(-1, options.rounds):  # the first round warms up
        times: dict[str, list[float]] = {}
        for name in random.sample(CONDITIONS, len(CONDITIONS)):
            seed = {"seed": number} if name == "abusive" else {}
            others[name].begin(port=server.port, seconds=options.seconds + 1, **other_jobs[name], **seed)
            sleep(WARM_UP_SECONDS)
            result = good.run(port=server.port, seconds=options.seconds, **good_job)
            beside = others[name].result()
            server.check_clean()
            if number >= 0:
                answers += result["answers"]
                times[name] = [answer["total"] for answer in result["answers"]]
                attacks.update(beside.get("outcomes", {}))
        if times:
            rounds.append(times)
    for process in (good, *others.values()):
        process.close()
    server.stop()
    lost = [answer for answer in answers if answer["text"] != expected[answer["body"]]]
    return _report(options, rounds, lost, attacks, llm)


def _report(
    options: argparse.Namespace,
    rounds: Sequence[dict[str, list[float]]],
    lost: Sequence[dict[str, Any]],
    attacks: Counter[str],
    llm: Any,
) -> int:
    ratio, low, high = ratio_interval(rounds)
    figures: dict[str, Any] = {"p99_ratio": ratio, "p99_ratio_95_percent": [low, high], "attacks": dict(attacks)}
    print(f"{'seconds to the end of an answer':34}{'answers':>9}{'median':>9}{'P99':>9}")
    for name in CONDITIONS:
        values = [value for each in rounds for value in each[name]]
        figures[name] = {"answers": len(values), "median": statistics.median(values), "p99": p99(values)}
        print(
            f"{f'beside {options.others} {name}':34}{len(values):9}{statistics.median(values):9.3f}{p99(values):9.3f}"
        )
    print(f"{'P99, abusive over well-behaved':34}{ratio:9.2f}   95%: {low:.2f} .. {high:.2f}   <= {MAX_RATIO}")
    for outcome, count in sorted(attacks.items()):
        print(f"  {outcome:32}{count:9}")
    for answer in lost[:3]:
        print("LOST", answer.get("status"), answer.get("error"), repr(answer["text"]))
    kinds = {outcome.partition(":")[0] for outcome in attacks}
    holds = {
        "no answer is lost and every one equals the offline engine's": not lost,
        f"P99 beside abusive clients is at most {MAX_RATIO} of P99 beside well-behaved ones": ratio <= MAX_RATIO,
        "there were slow, huge, vanishing and malformed clients": kinds == {"slow", "huge", "vanishing", "malformed"},
        "no attack got status 500": not any(outcome.endswith(": 500") for outcome in attacks),
    }
    shape = {"clients": options.clients, "others": options.others, "rounds": options.rounds, "seconds": options.seconds}
    return finish(options, holds, figures | shape, llm)
