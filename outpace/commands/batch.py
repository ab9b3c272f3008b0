"""`outpace batch`: answers a file of requests in OpenAI's batch format; it can be stopped at any time and continued."""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any

from outpace.errors import UsageError

if TYPE_CHECKING:
    from outpace.batch.job import Job, Tally
    from outpace.server.config import ServerConfig

_DESCRIPTION = """\
Answer a file of requests. Each line of INPUT is a request in OpenAI's batch format, for /v1/chat/completions,
/v1/completions, /v1/embeddings or /v1/responses:

  {"custom_id": "1", "method": "POST", "url": "/v1/chat/completions",
   "body": {"messages": [{"role": "user", "content": "Hello!"}], "max_tokens": 64}}

Answers are those of `outpace serve`, written to OUTPUT as they come, one line per request, also for a request that
fails. Run the same command again to continue after Ctrl-C, a crash or with lines added to INPUT: every answer is
written once.

examples:
  outpace batch requests.jsonl answers.jsonl
  outpace batch requests.jsonl answers.jsonl --model target.gguf --speculative-model draft.gguf --max-num-seqs 32
  outpace batch requests.jsonl answers.jsonl --retry-failed

exit status: 0 all lines are answered, 1 some failed or are left, 2 wrong usage
"""
_LINE_SECONDS = 10.0  # between two lines about progress where there is no terminal


def add_arguments(parser: argparse.ArgumentParser) -> None:
    from outpace.server.flags import add_answer_flags, add_model_flags

    parser.description = _DESCRIPTION
    parser.add_argument("input", type=Path, metavar="INPUT.jsonl", help="the requests")
    parser.add_argument("output", type=Path, metavar="OUTPUT.jsonl", help="the answers; continued if it exists")
    group = parser.add_argument_group("batch")
    group.add_argument("--retry-failed", action="store_true", help="answer again the lines that failed in earlier runs")
    group.add_argument("--overwrite", action="store_true", help="begin OUTPUT anew")
    group.add_argument("--seed", type=int, metavar="S",
                       help="requests without a seed get one made from this one and their line, so that a batch gives "
                       "the same answers again, also if it was interrupted")  # fmt: skip
    group.add_argument("--request-timeout", type=float, metavar="S", help="seconds an answer may take (default: any)")
    group.add_argument("--json", action="store_true", help="print one JSON object with the counts at the end")
    group.add_argument("--config", default=argparse.SUPPRESS, metavar="FILE",
                       help="a YAML or TOML file with flags of `outpace serve`; the network's are ignored")  # fmt: skip
    group.add_argument("--ray", action="store_true", help="answer on a Ray cluster, with several engines")
    group.add_argument("--ray-address", metavar="ADDRESS",
                       help="with --ray, the cluster to join: auto or HOST:6379 (default: start one here)")  # fmt: skip
    group.add_argument("--engines", type=int, default=1, metavar="N", help="with --ray (default: %(default)s)")
    group.add_argument("--engine-cpus", type=float, default=1.0, metavar="N",
                       help="with --ray, CPU cores of each engine (default: %(default)g)")  # fmt: skip
    group.add_argument("--engine-gpus", type=float, default=0.0, metavar="N",
                       help="with --ray, GPUs of each engine (default: %(default)g)")  # fmt: skip
    add_model_flags(parser)
    add_answer_flags(parser)


_RAY = ("ray", "ray_address", "engines", "engine_cpus", "engine_gpus")
_OWN = ("command", "input", "output", "retry_failed", "overwrite", "seed", "request_timeout", "json", *_RAY)


def execute(options: argparse.Namespace) -> int:
    from outpace.batch.answering import unlimited
    from outpace.batch.job import Job
    from outpace.commands.serve import configure
    from outpace.server.settings import gather

    if options.retry_failed and options.overwrite:
        raise UsageError("--overwrite drops all answers and --retry-failed only the failed ones; give one of them")
    if options.ray:
        from outpace.ray.installed import check_ray

        check_ray("--ray")
    given = {name: value for name, value in vars(options).items() if name not in _OWN}
    settings = gather(given, {})
    engine, server = configure(settings)
    server = unlimited(server, options.request_timeout)
    job = Job(
        options.input,
        options.output,
        seed=options.seed,
        overwrite=options.overwrite,
        retry=options.retry_failed,
    )
    began = perf_counter()
    try:
        if job.tally.is_complete:
            pass
        elif options.ray:
            _answer_on_cluster(job, settings, engine, server, options)
        else:
            _answer(job, settings, engine, server)
    finally:
        job.close()
    return _report(job, perf_counter() - began, as_json=options.json)


def _answer(job: Job, settings: Mapping[str, Any], engine: dict[str, Any], server: ServerConfig) -> None:
    from outpace.batch.answering import Answerer
    from outpace.batch.job import run
    from outpace.llm import LLM
    from outpace.models.generation_config import GenerationChoice
    from outpace.server import logs

    logs.configure("warning", "text")
    generation = GenerationChoice.of(settings.get("generation_config"), settings.get("override_generation_config"))
    tally = job.tally
    if tally.num_done:
        print(f"continuing: {tally.num_done:,} of {tally.num_lines:,} lines have a result", file=sys.stderr)
    with LLM(**engine) as llm:
        defaults = generation.settle(Path(llm.config.model))
        server = replace(server, default_sampling=defaults.values)
        llm.engine.calibrate()

        async def answer_all() -> None:
            async with Answerer(llm.engine, llm.tokenizer, server, max_context=llm.config.max_context) as answerer:
                await run(job, answerer, progress.show)

        with _Progress(tally) as progress:
            asyncio.run(answer_all())


def _answer_on_cluster(
    job: Job, settings: Mapping[str, Any], engine: dict[str, Any], server: ServerConfig, options: argparse.Namespace
) -> None:
    from outpace.models.generation_config import GenerationChoice
    from outpace.ray.batches import run_on_cluster

    generation = GenerationChoice.of(settings.get("generation_config"), settings.get("override_generation_config"))
    engine.setdefault("threads", max(int(options.engine_cpus), 1))
    predictor = {**engine, "server": server, "generation": generation, "seed": options.seed}
    with _Progress(job.tally) as progress:
        run_on_cluster(
            job,
            predictor,
            num_engines=options.engines,
            num_cpus=options.engine_cpus,
            num_gpus=options.engine_gpus,
            address=options.ray_address,
            show=progress.show,
        )


class _Progress:
    """A bar in a terminal, and a line now and then in a log."""

    def __init__(self, tally: Tally) -> None:
        from tqdm import tqdm

        self._tally = tally
        self._began = self._last_line = perf_counter()
        self._is_terminal = sys.stderr.isatty()
        self._bar = tqdm(
            total=tally.num_lines,
            initial=tally.num_done,
            unit="line",
            dynamic_ncols=True,
            disable=not self._is_terminal,
        )

    def __enter__(self) -> _Progress:
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.close()

    def show(self) -> None:
        """A line has got its result."""
        now, tally = perf_counter(), self._tally
        text = f"{tally.num_output_tokens / max(now - self._began, 1e-9):,.0f} tokens/s, {tally.num_failed:,} failed"
        if self._is_terminal:
            self._bar.set_postfix_str(text, refresh=False)
            self._bar.update(1)
        elif now - self._last_line >= _LINE_SECONDS:
            self._last_line = now
            print(f"{tally.num_done:,} of {tally.num_lines:,} lines, {text}", file=sys.stderr, flush=True)


def _report(job: Job, seconds: float, *, as_json: bool) -> int:
    tally = job.tally
    for failure in tally.failures:
        print(f"outpace: {failure}", file=sys.stderr)
    left = tally.num_lines - tally.num_done
    print(
        f"{tally.num_done:,} of {tally.num_lines:,} lines have a result, {tally.num_failed:,} of them an error; "
        f"in this run {tally.num_new:,} lines, {tally.num_output_tokens:,} tokens, {seconds:.1f} s",
        file=sys.stderr,
    )
    if left:
        print(f"outpace: stopped with {left:,} lines left; run the same command to continue", file=sys.stderr)
    if as_json:
        print(
            json.dumps(
                {
                    "lines": tally.num_lines,
                    "completed": tally.num_done - tally.num_failed,
                    "failed": tally.num_failed,
                    "left": left,
                    "this_run": {
                        "lines": tally.num_new,
                        "prompt_tokens": tally.num_prompt_tokens,
                        "output_tokens": tally.num_output_tokens,
                        "seconds": round(seconds, 3),
                    },
                }
            )
        )
    return 1 if left or tally.num_failed else 0
