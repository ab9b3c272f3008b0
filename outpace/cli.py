"""The command line: imports only the chosen subcommand, and turns errors into one sentence and an exit status.

Exit status: 0 done, 1 failed or interrupted, 2 wrong usage.
"""

from __future__ import annotations

import argparse
import importlib
import io
import os
import sys
from collections.abc import Sequence

import outpace
from outpace.errors import OutpaceError, UsageError, suggestion

COMMANDS = {
    "run": "generate text from one prompt",
    "chat": "hold a conversation in the terminal",
    "serve": "serve the OpenAI API",
    "plan": "before a launch: what fits, which draft pays, at which depth and load",
    "batch": "answer a file of requests in OpenAI's batch format",
    "bench": "measure where speculation pays on this machine, and with which settings",
    "costs": "print the costs of steps, drafts and lookups that speculation decides by",
    "distill": "train a draft head for a model, so that speculation pays on ordinary text",
    "doctor": "show what this machine has and lacks, and what a step costs on it",
}


def main(argv: Sequence[str] | None = None) -> int:
    arguments = [_dashed(word) for word in (sys.argv[1:] if argv is None else argv)]
    parser = argparse.ArgumentParser(
        prog="outpace",
        description="LLM inference built around speculative decoding: lossless, never slower, visible.",
        epilog="`outpace COMMAND --help` explains a command and its options.",
    )
    parser.add_argument("--version", action="version", version=f"outpace {outpace.__version__}")
    subparsers = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name, summary in COMMANDS.items():
        subparser = subparsers.add_parser(
            name, help=summary, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
        )
        if name in arguments:
            importlib.import_module(f"outpace.commands.{name}").add_arguments(subparser)
    options, unknown = parser.parse_known_args(arguments)
    if unknown:
        known = subparsers.choices[options.command]._option_string_actions
        hints = [suggestion(word, known) for word in unknown if word.startswith("-")]
        hint = "".join(f"; {hint}" for hint in hints if hint)
        subparsers.choices[options.command].error(f"unrecognized arguments: {' '.join(unknown)}{hint}")
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # print a question mark for characters the terminal cannot show
    try:
        status: int = importlib.import_module(f"outpace.commands.{options.command}").execute(options)
        sys.stdout.flush()
        return status
    except UsageError as error:
        print(f"outpace: {error}", file=sys.stderr)
        return 2
    except OutpaceError as error:
        print(f"outpace: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\noutpace: interrupted before anything was generated; run it again to start over", file=sys.stderr)
        return 1
    except BrokenPipeError:
        # The reader closed the pipe, as `| head` does. Redirect stdout so that the interpreter can flush it at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1


def _dashed(word: str) -> str:
    """A flag with dashes: command lines for vLLM also have --max_model_len."""
    if not word.startswith("--"):
        return word
    flag, equals, value = word.partition("=")
    return flag.replace("_", "-") + equals + value


if __name__ == "__main__":
    sys.exit(main())
