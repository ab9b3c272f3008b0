"""Log lines on stderr: text, or one JSON object per line. The formatters add no prompts or answers."""

from __future__ import annotations

import json
import logging
import math
import sys
from datetime import UTC, datetime
from time import monotonic

from outpace.server.config import LogFormat, LogLevel


class JsonFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        line = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **getattr(record, "facts", {}),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)


class TextFormatter(logging.Formatter):
    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)s %(message)s", "%H:%M:%S")

    def formatMessage(self, record: logging.LogRecord) -> str:
        facts = getattr(record, "facts", None)
        # A message with several words already contains its facts.
        if facts and " " not in record.message:
            record.message += " " + " ".join(f"{name}={value}" for name, value in facts.items())
        record.message = _one_line(record.message)
        return super().formatMessage(record)


def _one_line(text: str) -> str:
    """Escapes control characters: a client must not be able to write lines of its own, or to the terminal."""
    return text if text.isprintable() else "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)


class Seldom:
    """Logs at most one warning in `seconds`, whatever its cause and however often it happens."""

    def __init__(self, name: str, *, seconds: float) -> None:
        self._log = logging.getLogger(name)
        self._seconds = seconds
        self._last = -math.inf
        self._num_left_out = 0

    def warning(self, message: str, *args: object) -> None:
        now = monotonic()
        if now - self._last < self._seconds:
            self._num_left_out += 1
            return
        again = f" (and {self._num_left_out} times more since the last such line)" if self._num_left_out else ""
        self._last, self._num_left_out = now, 0
        self._log.warning(message + again, *args)


def configure(level: LogLevel, style: LogFormat) -> None:
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter() if style == "json" else TextFormatter())
    for name, least in (("outpace", level.upper()), ("uvicorn", "ERROR"), ("asyncio", "WARNING")):
        logger = logging.getLogger(name)
        logger.handlers[:] = [handler]
        logger.setLevel(least)
        logger.propagate = False
