"""The options of `outpace run` that describe the form of the output."""

from __future__ import annotations

import argparse
from pathlib import Path

from outpace.errors import UsageError
from outpace.structured import StructuredOutput


def add_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("structured output").add_mutually_exclusive_group()
    group.add_argument("--json-schema", metavar="FILE", help="the answer is JSON that satisfies the schema in FILE")
    group.add_argument("--regex", metavar="R", help="the whole answer matches this regular expression")
    group.add_argument("--choice", metavar="A,B", help="the answer is one of these texts")
    group.add_argument("--grammar", metavar="FILE", help="the answer follows the Lark grammar in FILE")


def structured_of(options: argparse.Namespace) -> StructuredOutput | None:
    """What the options ask for; None: free text."""
    if options.json_schema is not None:
        return StructuredOutput(json_schema=_text("--json-schema", options.json_schema))
    if options.regex is not None:
        return StructuredOutput(regex=options.regex)
    if options.choice is not None:
        return StructuredOutput(choice=options.choice.split(","))
    if options.grammar is not None:
        return StructuredOutput(grammar=_text("--grammar", options.grammar))
    return None


def _text(option: str, path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as problem:
        reason = problem.strerror if isinstance(problem, OSError) else "it is not UTF-8 text"
        raise UsageError(f"{option} {path} cannot be read: {reason}; name a text file") from None
