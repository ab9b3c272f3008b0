"""Measures servers with the OpenAI API: one with speculation and one without, or one Outpace server, where each
request carries its own speculation setting.

Times are the client's: from a request's due time until its chunks arrive. The server counts tokens (`usage`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import httpx

from outpace.bench.loads import Closed, Load
from outpace.bench.server_metrics import Snapshot, between, read_metrics
from outpace.bench.settings import PLAIN, Setting
from outpace.bench.targets import WARM_UP_TOKENS, limited, sampling
from outpace.bench.trials import Job, Run
from outpace.bench.url_load import run_requests
from outpace.bench.workloads import Prompt
from outpace.config import Method
from outpace.errors import OutpaceError, UsageError

_RESETS = ("/reset_prefix_cache", "/flush_cache")  # Outpace and vLLM (in its development mode); SGLang
_TIMEOUT = httpx.Timeout(600.0, connect=10.0)


class UrlTarget:
    drafting: Method | None = None  # a server does not tell

    def __init__(self, url: str, baseline_url: str | None = None, *, api_key: str | None = None) -> None:
        self.name = "server"
        self._headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self._url = _base(url)
        self._baseline_url = _base(baseline_url) if baseline_url else None
        self._models = {each: self._model_name(each) for each in filter(None, (self._url, self._baseline_url))}
        self._can_reset = {each: self._reset_caches(each) for each in self._models}
        if self._baseline_url is None and not self._is_outpace():
            raise UsageError(
                f"{url} is not an Outpace server, so a request cannot turn speculation off; give "
                "a server without speculation as --baseline-url"
            )

    def jobs(self, prompts: Sequence[Prompt], *, temperature: float, base_seed: int = 0) -> list[Job]:
        chosen = zip(prompts, sampling(prompts, temperature, base_seed), strict=True)
        return [Job(i, prompt.category, (), params, prompt.messages) for i, (prompt, params) in enumerate(chosen)]

    def warm_up(self, job: Job, settings: Sequence[Setting]) -> None:
        short = limited(job, WARM_UP_TOKENS)
        for setting in settings:
            (trial,) = self.run([short], setting, Closed(1)).trials
            if trial.error:
                raise OutpaceError(f"the first request to {self._url_for(setting)} failed: {trial.error}")

    def run(self, jobs: Sequence[Job], setting: Setting, load: Load, seed: int = 0) -> Run:
        url = self._url_for(setting)
        self._reset_caches(url)
        before = self._metrics(url)
        bodies = [self._body(job, setting, url) for job in jobs]
        run = asyncio.run(run_requests(f"{url}/v1/chat/completions", self._headers, jobs, bodies, load, seed))
        run.reported = between(before, self._metrics(url))
        return run

    def describe(self) -> dict[str, Any]:
        return {
            "target": self.name,
            "url": self._url,
            "baseline_url": self._baseline_url,
            "model": self._models[self._url],
            "caches_emptied": all(self._can_reset.values()),
        }

    def _url_for(self, setting: Setting) -> str:
        return self._baseline_url if self._baseline_url and setting == PLAIN else self._url

    def _body(self, job: Job, setting: Setting, url: str) -> dict[str, Any]:
        body: dict[str, Any] = {
            "model": self._models[url],
            "messages": list(job.messages),
            "max_tokens": job.params.max_tokens,
            "temperature": job.params.temperature,
            "seed": job.params.seed,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if self._baseline_url is None:
            wanted = setting.speculation
            asked = {"mode": wanted.mode, "method": wanted.method, "max_depth": wanted.max_depth}
            body["speculation"] = {name: value for name, value in asked.items() if value is not None}
        return body

    def _model_name(self, url: str) -> str:
        try:
            reply = httpx.get(f"{url}/v1/models", headers=self._headers, timeout=_TIMEOUT)
            reply.raise_for_status()
            return str(reply.json()["data"][0]["id"])
        except httpx.HTTPStatusError as error:
            raise OutpaceError(
                f"{url}/v1/models answered {error.response.status_code}; check the address, and --api-key"
            ) from error
        except httpx.HTTPError as error:
            raise OutpaceError(f"{url} does not answer ({error}); check the address and the server") from error
        except (ValueError, KeyError, IndexError, TypeError) as error:
            raise OutpaceError(
                f"{url}/v1/models does not list a model as the OpenAI API does; check the URL"
            ) from error

    def _reset_caches(self, url: str) -> bool:
        """Empty the server's caches, so that no run profits from another; False if the server cannot do it."""
        return any(self._post(f"{url}{path}") for path in _RESETS)

    def _post(self, url: str) -> bool:
        try:
            return httpx.post(url, headers=self._headers, timeout=_TIMEOUT).is_success
        except httpx.HTTPError:
            return False

    def _is_outpace(self) -> bool:
        return "\noutpace_" in self._metrics_page(self._url)

    def _metrics(self, url: str) -> Snapshot:
        return read_metrics(self._metrics_page(url))

    def _metrics_page(self, url: str) -> str:
        """Empty if there is none: acceptance is then unknown, which is not a failure."""
        try:
            reply = httpx.get(f"{url}/metrics", headers=self._headers, timeout=_TIMEOUT, follow_redirects=True)
        except httpx.HTTPError:
            return ""
        return reply.text if reply.status_code == 200 else ""


def _base(url: str) -> str:
    """The URL without the `/v1` that OpenAI clients use."""
    if not url.startswith(("http://", "https://")):
        raise UsageError(f"{url!r} is not a URL; write it as http://host:port")
    return url.rstrip("/").removesuffix("/v1")
