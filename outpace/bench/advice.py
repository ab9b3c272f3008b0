"""The command lines that follow from a verdict, for Outpace, vLLM and llama.cpp."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

DEFAULT_DEPTH = 4


def commands(decision: str, setting: str | None, losing: Sequence[str], results: Mapping[str, Any]) -> dict[str, str]:
    """Empty if the verdict gives no advice."""
    if decision in ("too_little_data", "no_difference") or setting is None:
        return {}
    target = results["target"]
    if target.get("baseline_url"):  # two servers: advise which of them to use
        return {"serve as": target["baseline_url" if decision == "leave_off" else "url"]}
    model, draft = _models(results)
    if decision == "leave_off":
        return {
            "outpace": _joined("outpace", "serve", *_outpace_models(model, None), "--speculation", "off"),
            "vllm": _joined("vllm", "serve", _hub(model)),
            "llama.cpp": _joined("llama-server", "-m", model),
        }
    method, depth = _method_and_depth(setting, results)
    found = {
        "outpace": _joined("outpace", "serve", *_outpace_models(model, draft), *_outpace_mode(setting)),
        "vllm": _joined("vllm", "serve", _hub(model), "--speculative-config", json.dumps(_vllm(method, depth, draft))),
        "llama.cpp": _joined("llama-server", "-m", model, *_llama(method, depth, draft)),
    }
    if losing:
        found["requests that lose"] = f'{", ".join(losing)}: send "speculation": {{"mode": "off"}} with them'
    return found


def _models(results: Mapping[str, Any]) -> tuple[str, str | None]:
    """By file name or, for a server, by the served model name."""
    target = results["target"]
    config = target.get("config") or {}
    draft = config.get("draft")
    return Path(config.get("model") or target["model"]).name, Path(draft).name if draft else None


def _outpace_models(model: str, draft: str | None) -> list[str]:
    return ["--model", model, *(["--draft", draft] if draft else [])]


def _outpace_mode(setting: str) -> list[str]:
    if setting == "auto":
        return ["--speculation", "auto"]
    method, _, depth = setting.partition(":")
    return ["--speculation", "on", "--method", method, "--depth", depth] if depth else ["--speculation", "on"]


def _method_and_depth(setting: str, results: Mapping[str, Any]) -> tuple[str, int]:
    """Engines without a policy need a fixed setting: the given one, or the best one measured."""
    if ":" not in setting:
        fixed = {
            name: each["all"]["value"] for name, each in results["overall"].items() if ":" in name and each.get("all")
        }
        for cell in results["cells"]:
            if cell["purpose"] == "sweep":
                fixed |= {n: f["speedup"]["value"] for n, f in cell["settings"].items() if ":" in n and f["speedup"]}
        if not fixed:
            config = results["target"].get("config") or {}
            return ("draft" if config.get("method") == "draft" else "ngram"), DEFAULT_DEPTH
        setting = max(fixed, key=lambda name: fixed[name])
    method, _, depth = setting.partition(":")
    return method, int(depth)


def _vllm(method: str, depth: int, draft: str | None) -> dict[str, Any]:
    if method == "draft":
        return {"model": _hub(draft or "DRAFT"), "num_speculative_tokens": depth}
    if method == "suffix":
        return {"method": "suffix", "num_speculative_tokens": depth}
    return {"method": "ngram", "num_speculative_tokens": depth, "prompt_lookup_max": 4}


def _llama(method: str, depth: int, draft: str | None) -> list[str]:
    if method == "draft":
        return ["--spec-draft-model", draft or "DRAFT", "--spec-draft-n-max", str(depth)]
    return ["--spec-type", "ngram-simple", "--spec-ngram-simple-size-m", str(depth)]


def _hub(model: str) -> str:
    """vLLM wants the model's name on a hub, which a GGUF file does not contain."""
    return model.removesuffix(".gguf")


def _joined(*parts: str) -> str:
    return shlex.join(parts)
