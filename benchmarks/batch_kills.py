"""Kill `outpace batch` at random moments, resume it, and compare what it wrote with an uninterrupted run.

    python -m benchmarks.batch_kills [--lines 5000] [--kills 5] [--model FILE]

Ends with status 1 if a line is lost, is there twice, or has another answer.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory

_TOPICS = ("rivers", "tea", "the moon", "trains", "bread", "chess", "winter", "maps")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lines", type=int, default=5000, help="lines of the batch")
    parser.add_argument("--kills", type=int, default=5, help="how often it is killed")
    parser.add_argument("--max-tokens", type=int, default=8, help="tokens of an answer")
    parser.add_argument("--model", help="a model other than the embedded one")
    options = parser.parse_args()
    with TemporaryDirectory() as folder:
        return _compare(Path(folder), options)


def _compare(folder: Path, options: argparse.Namespace) -> int:
    source, target, whole = (folder / name for name in ("in.jsonl", "out.jsonl", "whole.jsonl"))
    with source.open("w") as file:
        for number in range(options.lines):
            text = f"Write sentence {number} about {_TOPICS[number % len(_TOPICS)]}."
            body = {"messages": [{"role": "user", "content": text}], "max_tokens": options.max_tokens}
            line = {"custom_id": str(number), "method": "POST", "url": "/v1/chat/completions", "body": body}
            file.write(json.dumps(line) + "\n")
    chance = random.Random(0)
    for stop in sorted(chance.sample(range(1, options.lines), options.kills)):
        child = subprocess.Popen(_command(source, target, options.model), stderr=subprocess.DEVNULL)
        while child.poll() is None and _num_lines(target) < stop:
            time.sleep(0.01)
        child.kill()
        child.wait()
        print(f"killed with {_num_lines(target)} of {options.lines} lines written", flush=True)
    for path in (target, whole):
        subprocess.run(_command(source, path, options.model), check=True)
    found, expected = _answers(target), _answers(whole)
    names = [name for name, _ in found]
    lost = options.lines - len(set(names))
    doubled = len(names) - len(set(names))
    different = len(set(found) - set(expected))
    print(f"{options.lines} lines, {options.kills} kills: {lost} lost, {doubled} doubled, {different} different")
    return 1 if lost or doubled or different else 0


def _command(source: Path, target: Path, model: str | None) -> list[str]:
    more = [] if model is None else ["--model", model]
    return [sys.executable, "-m", "outpace", "batch", str(source), str(target), "--seed", "1", *more]


def _num_lines(path: Path) -> int:
    return path.read_bytes().count(b"\n") if path.exists() else 0


def _answers(path: Path) -> list[tuple[str, str]]:
    results = [json.loads(line) for line in path.read_text().splitlines()]
    return [(each["custom_id"], each["response"]["body"]["choices"][0]["message"]["content"]) for each in results]


if __name__ == "__main__":
    sys.exit(main())
