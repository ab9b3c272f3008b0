"""Outpace and vLLM on the same GPU, in one run: plain steps, and speculation at real acceptance.

    python -m benchmarks.gpu_peers run SMOLLM2.gguf TOKENS.json OUT --site VLLM    OUT.txt and OUT.json
    python -m benchmarks.gpu_peers summary OUT.json...                             the tables of several runs

`benchmarks.gpu_speculation prepare` writes TOKENS.json. VLLM is a folder of Python packages with vLLM in it. The model
is SmolLM2 padded to an 8B with its head padded to the head of an 8B (see `gpu_padding.py`). Outpace writes both as
Hugging Face folders, which vLLM loads: the same texts, and drafts that are right as often.

The engines of a wave start at the same time and are then measured in turns; only one works at a time. All are
measured in the same way (see `gpu_peers_window.py`). Files are written after every result. An engine that fails, or for
which no time is left, is listed as missing with the reason, and the others go on.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.gpu_peers_process import Failed, PeerProcess
from benchmarks.gpu_peers_settings import CONCURRENCY, TEMPERATURES, WAVES, PeerSettings
from benchmarks.gpu_peers_summary import summary_lines
from benchmarks.gpu_speculation import EMBEDDED_HEAD
from outpace.bench.provenance import provenance

_START_SECONDS = 240.0
_ANSWER_SECONDS = 60.0
_WAVE_SECONDS = 90.0  # with less time left, no wave is started


class Comparison:
    def __init__(self, options: argparse.Namespace, folder: Path) -> None:
        self._options, self._folder = options, folder
        self._begin = time.perf_counter()
        self.figures: dict[str, Any] = provenance(sys.argv, [options.model, options.head])
        self.figures["commit"] = options.commit or self.figures["commit"]
        self.figures |= {"prompts": json.loads(options.tokens.read_text())["source"]}
        self.figures |= {"engines": {}, "rows": [], "missing": []}

    @property
    def elapsed(self) -> float:
        return time.perf_counter() - self._begin

    def run(self) -> None:
        for number, wave in enumerate(self._options.waves, 1):
            self.say(f"wave {number}: {', '.join(peer.name for peer in wave)}")
            if self.elapsed + _WAVE_SECONDS > self._options.seconds:
                for peer in wave:
                    self._miss(peer.name, "the time is over")
                continue
            workers: dict[str, PeerProcess] = {}
            try:
                workers = self._start(wave)
                self._measure([peer for peer in wave if peer.name in workers], workers)
            finally:
                for worker in workers.values():
                    worker.close()

    def _start(self, wave: tuple[PeerSettings, ...]) -> dict[str, PeerProcess]:
        begin, o = time.perf_counter(), self._options
        started = {}
        for peer in wave:
            job = {
                "peer": peer.as_dict(), "model": str(o.model.absolute()), "head": str(o.head.absolute()),
                "tokens": str(o.tokens.absolute()), "folder": str(self._folder), "device": o.device,
                "concurrency": o.concurrency,
            }  # fmt: skip
            log = self._folder / f"{peer.name.replace(':', '-')}.log"
            started[peer.name] = PeerProcess(peer, job, log, o.site, self._folder)
        ready = {}
        for name, worker in started.items():
            try:
                left = min(_START_SECONDS - (time.perf_counter() - begin), o.seconds - self.elapsed)
                self.figures["engines"][name] = worker.wait_until_ready(left)
                ready[name] = worker
                self.say(f"  {name}: {self.figures['engines'][name]}")
            except Failed as error:
                self._miss(name, str(error))
                worker.close()
        self.say(f"  started in {time.perf_counter() - begin:.0f} s")
        return ready

    def _measure(self, peers: list[PeerSettings], workers: dict[str, PeerProcess]) -> None:
        for peer in peers:
            self.figures["engines"][peer.name] |= self._ask(workers[peer.name], {"do": "begin"}) or {}
        for number in self._options.concurrency:
            for peer in (peer for peer in peers if peer.has_steps):
                self._row(workers[peer.name], {"do": "steps", "concurrency": number})
        for block in range(self._options.blocks):
            for number in self._options.concurrency:
                for temperature in TEMPERATURES:
                    cell = {"do": "cell", "concurrency": number, "temperature": temperature, "block": block}
                    each = [(peer, s) for peer in peers if peer.has_cells for s in peer.settings]
                    shift = block % max(len(each), 1)  # another one begins in each block
                    for peer, setting in each[shift:] + each[:shift]:
                        self._row(workers[peer.name], cell | {"setting": setting})

    def _row(self, worker: PeerProcess, command: dict[str, Any]) -> None:
        found = self._ask(worker, command)
        if found is None:
            return
        settings = worker.settings
        row = {"engine": settings.name, "quantization": settings.quantization, **command, **found}
        self.figures["rows"].append(row)
        place = " ".join(f"{key} {row[key]}" for key in ("temperature", "block", "setting") if key in row)
        self.say(
            f"  {self.elapsed:4.0f} s  {settings.name:22} {row['do']:5} {row['concurrency']:3} at once {place}: "
            f"{row['ms_per_step']:.2f} ms a step, {row['tokens_per_s']:.0f} tokens/s, "
            f"{row['tokens_per_step_and_request']:.2f} tokens a step and request, {row['one_time_steps']} left out"
        )
        self.save()

    def _ask(self, worker: PeerProcess, command: dict[str, Any]) -> dict[str, Any] | None:
        what = f"{worker.settings.name} {json.dumps(command)}"
        if self.elapsed > self._options.seconds:
            self._miss(what, "the time is over")
            return None
        try:
            return worker.ask(command, _ANSWER_SECONDS)
        except Failed as error:
            self._miss(what, str(error))
            return None

    def _miss(self, what: str, reason: str) -> None:
        self.figures["missing"].append(f"{what}: {reason}")
        if reason != "the time is over":
            self.say(f"  missing: {what}: {reason}")
        self.save()

    def say(self, line: str) -> None:
        print(line, flush=True)

    def save(self) -> None:
        out: Path = self._options.out
        kept = [{key: value for key, value in row.items() if key != "first_tokens"} for row in self.figures["rows"]]
        out.with_suffix(".json").write_text(json.dumps({**self.figures, "rows": kept}, indent=1) + "\n")
        heading = [f"{key}: {self.figures.get(key)}" for key in ("command", "commit", "python", "torch", "gpu")]
        missing = [f"missing: {each}" for each in self.figures["missing"]]
        lines = [*heading, *summary_lines(self.figures["rows"]), *missing]
        out.with_suffix(".txt").write_text("\n".join(lines) + "\n")


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    running = commands.add_parser("run", help="measure all engines")
    running.add_argument("model", type=Path, help="SmolLM2 as a GGUF file")
    running.add_argument("tokens", type=Path, help="prompts, from `gpu_speculation prepare`")
    running.add_argument("out", type=Path, help="output path, without a suffix")
    running.add_argument("--site", type=Path, help="folder of packages with vLLM (default: the installed one)")
    running.add_argument("--head", type=Path, default=EMBEDDED_HEAD, metavar="GGUF",
                         help="the model's draft head (default: the one that comes with Outpace)")  # fmt: skip
    running.add_argument("--folder", type=Path, help="for checkpoint and logs, which stay there (default: temporary)")
    running.add_argument("--waves", type=int, nargs="+", default=list(range(1, len(WAVES) + 1)),
                         help="which groups of engines to measure (default: all)")  # fmt: skip
    running.add_argument("--only", nargs="+", metavar="ENGINE", help="only these engines of the waves")
    running.add_argument("--blocks", type=int, default=2)
    running.add_argument("--concurrency", type=int, nargs="+", default=list(CONCURRENCY))
    running.add_argument("--seconds", type=float, default=420, help="measure nothing after this (default: %(default)s)")
    running.add_argument("--device", choices=["cuda", "cpu"], default="cuda", help="of Outpace")
    running.add_argument("--commit", help="commit of this code, for a copy without git history")
    summarising = commands.add_parser("summary", help="the tables of one or several runs")
    summarising.add_argument("results", type=Path, nargs="+", metavar="JSON")
    options = parser.parse_args(arguments)
    if options.command == "summary":
        rows = [row for path in options.results for row in json.loads(path.read_text())["rows"]]
        print("\n".join(summary_lines(rows)))
        return 0
    known = {peer.name for wave in WAVES for peer in wave}
    if unknown := set(options.only or ()) - known or {n for n in options.waves if not 1 <= n <= len(WAVES)}:
        parser.error(f"unknown: {sorted(unknown)}; engines are {', '.join(sorted(known))}, in waves 1 to {len(WAVES)}")
    chosen = [tuple(p for p in WAVES[n - 1] if not options.only or p.name in options.only) for n in options.waves]
    options.waves = [wave for wave in chosen if wave]
    options.out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.folder or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        comparison = Comparison(options, folder)
        try:
            comparison.run()
        finally:
            comparison.save()
    print("\n".join(summary_lines(comparison.figures["rows"])))
    return int(any("the time is over" not in each for each in comparison.figures["missing"]))


if __name__ == "__main__":
    sys.exit(main())
