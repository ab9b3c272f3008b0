"""Settings from the command line, the environment and a file, in this order: the first that has a flag sets it.

Keys of the file and names in the environment are those of the flags: `max-num-seqs = 16`,
OUTPACE_SERVE_MAX_NUM_SEQS=16. The command line's parser reads them too, so meaning and error messages are the same.
"""

from __future__ import annotations

import argparse
import json
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

import yaml

from outpace.errors import UsageError, suggestion
from outpace.server.flags import add_flags

ENVIRONMENT_PREFIX = "OUTPACE_SERVE_"


def gather(command_line: Mapping[str, Any], environment: Mapping[str, str]) -> dict[str, Any]:
    """All settings that were given, by flag name with underscores."""
    from_environment = _from_environment(environment)
    path = command_line.get("config") or from_environment.get("config")
    settings = _from_file(Path(path)) if path else {}
    for source in (from_environment, command_line):
        # The model has two keys, MODEL and --model. A source that has either replaces both.
        if {"model", "model_argument"} & set(source):
            settings.pop("model", None)
            settings.pop("model_argument", None)
        settings |= source
    given = settings.pop("model_argument", None)
    if given is not None and settings.get("model", given) != given:
        raise UsageError(f"the model is named twice, as {given!r} and with --model {settings['model']!r}; name it once")
    if given is not None:
        settings["model"] = given
    return settings


def _from_environment(environment: Mapping[str, str]) -> dict[str, Any]:
    given = {
        name.removeprefix(ENVIRONMENT_PREFIX).lower(): value
        for name, value in environment.items()
        if name.startswith(ENVIRONMENT_PREFIX)
    }
    return _read("the environment", given, spell=lambda key: ENVIRONMENT_PREFIX + key.upper(), split=True)


def _from_file(path: Path) -> dict[str, Any]:
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"cannot read the configuration {path}: {error}; check --config") from error
    try:
        if path.suffix == ".toml":
            content: object = tomllib.loads(text)
        elif path.suffix in (".yaml", ".yml"):
            content = yaml.safe_load(text)
        else:
            raise UsageError(f"{path} should end in .yaml, .yml or .toml, which gives its format; rename it")
    except (tomllib.TOMLDecodeError, yaml.YAMLError) as error:
        raise UsageError(f"{path} is not valid: {' '.join(str(error).split())}; correct it") from error
    if not isinstance(content, dict | None):
        raise UsageError(f"{path} must hold flags and their values, such as 'port: 8000'")
    given = {str(key): value for key, value in (content or {}).items()}
    if "config" in given:
        raise UsageError(f"{path} names another configuration, which is not supported; put everything into one file")
    return _read(str(path), given, spell=str, split=False)


class _Parser(argparse.ArgumentParser):
    source = ""

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"in {self.source}: {message}")


def _read(source: str, given: Mapping[str, Any], *, spell: Any, split: bool) -> dict[str, Any]:
    """Parse flags and values from another source with the command line's parser."""
    parser = _Parser(allow_abbrev=False, add_help=False)
    parser.source = source
    add_flags(parser)
    words: list[str] = []
    for key, value in given.items():
        name = "--" + key.replace("_", "-")
        action = parser._option_string_actions.get(name)
        if action is None:
            similar = suggestion(name, parser._option_string_actions)
            raise UsageError(
                f"in {source}: there is no flag for {spell(key)}; {similar or '`outpace serve --help` lists them'}"
            )
        if value is not None:
            words += _words(name, action, value, split=split)
    return vars(parser.parse_args(words))


def _words(name: str, action: argparse.Action, value: Any, *, split: bool) -> list[str]:
    """The command-line words for a value."""
    if action.nargs == 0:  # a switch
        wanted = str(value).lower() in ("1", "true", "yes", "on")
        negative = "--no-" + name.removeprefix("--")
        return [name] if wanted else [negative] if negative in action.option_strings else []
    many = value if isinstance(value, list) else [value]
    if action.nargs == "+" or isinstance(action, argparse._AppendAction):
        many = [part.strip() for part in str(value).split(",")] if split else many
        if action.nargs == "+":
            return [name, *map(str, many)]
    return [f"{name}={json.dumps(each) if isinstance(each, dict) else each}" for each in many]
