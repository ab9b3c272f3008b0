"""The server's settings. The engine's are in outpace.config; the two are independent."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from outpace.config import Pooling, SpeculationParams
from outpace.errors import UsageError

LogFormat = Literal["text", "json"]
SchedulingPolicy = Literal["priority", "fcfs"]
LogLevel = Literal["debug", "info", "warning", "error"]

MAX_STOP_STRINGS = 16
MAX_STOP_LENGTH = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerConfig:
    host: str = "127.0.0.1"
    port: int = 8000
    root_path: str = ""  # under which a proxy offers this server
    model_names: tuple[str, ...] = ("default",)  # replies carry the first
    api_keys: tuple[str, ...] = field(default=(), repr=False)
    max_queued: int = 256  # completions that may wait in addition to those that run
    scheduling_policy: SchedulingPolicy = "priority"  # fcfs: the priority that a request gives is ignored
    max_connections: int = 1024
    max_output_tokens: int | None = None  # per completion; None: the rest of the context
    max_request_bytes: int = 1 << 20
    request_timeout: float = 600.0
    shutdown_timeout: float = 30.0
    allowed_origins: tuple[str, ...] = ()
    default_speculation: SpeculationParams = field(
        default_factory=SpeculationParams
    )  # for requests without a speculation field
    default_sampling: Mapping[str, int | float] = field(default_factory=dict)  # for requests that do not set them
    default_template_variables: Mapping[str, Any] = field(default_factory=dict)  # of the chat template, likewise
    always_include_usage: bool = False  # streams end with usage whether or not a request asks for it
    allow_control_tokens: bool = False  # in messages; then any role is accepted too
    pooling: Pooling = "last"  # of embeddings
    tool_call_parser: str = "auto"  # a name of models/tool_calls; auto: as the chat template shows
    reasoning_parser: str = "auto"  # a name of models/reasoning, or none; auto: as template and vocabulary show
    page: bool = True  # the page at /
    log_level: LogLevel = "info"
    log_format: LogFormat = "text"
    log_interval: float = 10.0  # seconds between log lines about the engine while it works; 0: none
    log_prompts: bool = False

    def __post_init__(self) -> None:
        _check(bool(self.host), "--host is empty; give an address, such as 127.0.0.1 or 0.0.0.0")
        _check(0 <= self.port <= 65535, f"--port must be between 0 and 65535; got {self.port}")
        _check(all(self.model_names) and bool(self.model_names), "a served model name must not be empty")
        _check(all(self.api_keys), "an API key must not be empty")
        if self.root_path:
            right = self.root_path.startswith("/") and not self.root_path.endswith("/")
            _check(right, f"--root-path begins with a slash and does not end with one; got {self.root_path!r}")
        for name in ("max_connections", "max_request_bytes"):
            _check(getattr(self, name) >= 1, f"--{_flag(name)} must be at least 1; got {getattr(self, name)}")
        _check(self.max_queued >= 0, f"--max-queued-requests must be at least 0; got {self.max_queued}")
        if self.max_output_tokens is not None:
            _check(self.max_output_tokens >= 1, f"--max-output-tokens must be at least 1; got {self.max_output_tokens}")
        _check(self.request_timeout > 0, f"--request-timeout must be above 0 seconds; got {self.request_timeout}")
        for name in ("shutdown_timeout", "log_interval"):
            _check(getattr(self, name) >= 0, f"--{_flag(name)} must be at least 0 seconds; got {getattr(self, name)}")

    def as_dict(self) -> dict[str, Any]:
        """The settings for the log, without the keys."""
        return asdict(self) | {"api_keys": f"{len(self.api_keys)} set" if self.api_keys else "none"}


def _check(ok: bool, message: str) -> None:
    if not ok:
        raise UsageError(message)


def _flag(name: str) -> str:
    return name.replace("_", "-")
