"""The commands to paste, for Outpace and for vLLM, and what they cannot say.

A command is printed only if its engine takes it: vLLM has no rounded copies and no bridge between tokenizers, wants as
many tokens in the draft's embedding as in the target's, and shards a draft model like its target. (vLLM 0.20:
`vllm/config/speculative.py`, `vllm/v1/spec_decode/draft_model.py`.)
"""

from __future__ import annotations

import json
import shlex
from dataclasses import dataclass, field
from pathlib import Path

from outpace.config import MAX_SEQUENCES
from outpace.plan.drafts import PlannedDraft
from outpace.plan.guesses import Conditions
from outpace.plan.memory import Deployment
from outpace.plan.models import PlannedModel
from outpace.plan.pairing import Pairing
from outpace.plan.precision import ROUNDED

_DEFAULT_DEPTH = 4
_ROUNDING = {fmt: name for name, fmt in ROUNDED.items()}


@dataclass(slots=True)
class Launch:
    commands: dict[str, str] = field(default_factory=dict)  # by engine
    notes: list[str] = field(default_factory=list)


def launch(target: PlannedModel, best: Pairing | None, to: Deployment, conditions: Conditions) -> Launch:
    """`best`: the draft to use; None: plain decoding."""
    found = Launch()
    shared = ["--max-model-len", str(min(to.context, target.shape.context))]
    if to.machine.is_gpu:
        shared += ["--gpu-memory-utilization", f"{to.utilization:g}"]
    if to.gpus > 1:
        shared += ["--tensor-parallel-size", str(to.gpus)]
    sequences = max(to.sequences, conditions.rows)
    _for_outpace(found, target, best, to, conditions, [*shared, "--max-num-seqs", str(min(sequences, MAX_SEQUENCES))])
    if to.machine.is_gpu:  # vLLM is for GPUs
        _for_vllm(found, target, best, to, [*shared, "--max-num-seqs", str(sequences)])
    return found


def _for_outpace(
    found: Launch, target: PlannedModel, best: Pairing | None, to: Deployment, conditions: Conditions, shared: list[str]
) -> None:
    is_gpu = to.machine.is_gpu
    if not target.torch_runs and (is_gpu or not _is_file(target.path)):
        found.notes.append(f"Outpace does not run {target.family} models there: the plan is for other engines.")
        return
    command = ["outpace", "serve", "--model", _shown(target.hub), *(["--backend", "torch"] if is_gpu else []), *shared]
    if to.cache_element_bytes == 1 and is_gpu:
        command += ["--kv-cache-dtype", to.cache_precision]
    command += _rounded(found, "--quantization", target, is_gpu=is_gpu)
    if best is None:
        found.commands["outpace"] = shlex.join([*command, "--speculation", "off"])
        return
    draft = best.draft
    if draft.kind == "self":
        command += ["--draft", draft.name]
    elif draft.kind != "lookup":
        command += ["--draft", _draft_place(draft)]
        if draft.model is not None:
            command += _rounded(found, "--speculative-model-quantization", draft.model, is_gpu=is_gpu)
        if to.gpus > 1:
            command += ["--speculative-draft-tensor-parallel-size", "1"]  # Outpace does not shard drafts
    if conditions.depth is not None:
        command += ["--num-speculative-tokens", str(conditions.depth)]
    found.commands["outpace"] = shlex.join([*command, "--speculation", "auto"])


def _rounded(found: Launch, flag: str, model: PlannedModel, *, is_gpu: bool) -> list[str]:
    """The flag that makes the planned precision out of the published weights."""
    if model.precision.name == model.stored:
        return []
    rounding = _ROUNDING.get(model.precision.name) if is_gpu else None
    if rounding is not None:
        return [flag, rounding]
    other = ", or let Outpace round it: --precision int4_g32" if model.precision.name == "int4" and is_gpu else ""
    found.notes.append(
        f"The command loads {model.name} in {model.stored}, as it is published; name a file of it in "
        f"{model.precision} instead{other}."
    )
    return []


def _for_vllm(found: Launch, target: PlannedModel, best: Pairing | None, to: Deployment, shared: list[str]) -> None:
    refusal = _refusal(target, best)
    if refusal is not None:
        found.notes.append(f"There is no command for vLLM: {refusal}.")
        return
    command = ["vllm", "serve", _shown(target.hub), *shared]
    if to.cache_element_bytes == 1:
        command += ["--kv-cache-dtype", "fp8"]  # its only cache of 8 bits
    if target.precision.name != target.stored:
        if target.precision.name == "fp8":
            command += ["--quantization", "fp8"]
        else:
            found.notes.append(
                f"vLLM does not round to {target.precision} as it loads: name a checkpoint of {target.name} in that "
                "format in its command."
            )
    if best is not None:
        config = _speculation(best, to)
        if best.draft.kind == "draft" and to.draft_gpus != to.gpus:
            found.notes.append(f"vLLM shards a draft model like its target: --draft-gpus {to.gpus} plans for that.")
        command += ["--speculative-config", json.dumps(config)]
    found.commands["vllm"] = shlex.join(command)


def _refusal(target: PlannedModel, best: Pairing | None) -> str | None:
    """Why vLLM cannot run this; None if it can."""
    draft = best.draft if best is not None else None
    if _is_file(target.path) or (draft is not None and _is_file(draft.path)):
        return "it takes folders of Hugging Face, and a GGUF file was named"
    if draft is None or draft.kind in ("lookup", "head"):
        return None
    if draft.kind == "self":
        return "it does not draft with a rounded copy of the target"
    assert best is not None and draft.model is not None
    sizes = target.shape.vocab_size, draft.model.shape.vocab_size
    if best.bridge is not None:
        return "it refuses a draft with another tokenizer"
    if sizes[0] != sizes[1]:
        return (
            f"it refuses a draft whose embedding has another number of tokens ({sizes[1]:,} for {sizes[0]:,}), even "
            "where the tokenizers agree; Outpace takes it"
        )
    return None


def _speculation(best: Pairing, to: Deployment) -> dict[str, object]:
    draft = best.draft
    config: dict[str, object] = {"num_speculative_tokens": best.speed.depth or _DEFAULT_DEPTH}
    if draft.kind == "lookup":
        return config | {"method": draft.name} | ({"prompt_lookup_max": 4} if draft.name == "ngram" else {})
    config["model"] = _draft_place(draft)
    if draft.kind == "head":
        config["method"] = "eagle3"
    if draft.model is not None and draft.model.precision.name == "fp8" != draft.model.stored:
        config["quantization"] = "fp8"
    if to.gpus > 1:
        config["draft_tensor_parallel_size"] = to.gpus if draft.kind == "draft" else to.draft_gpus
    return config


def _is_file(path: Path | None) -> bool:
    return path is not None and path.is_file()


def _draft_place(draft: PlannedDraft) -> str:
    return _shown(draft.model.hub if draft.model is not None else str(draft.path))


def _shown(path: str) -> str:
    """A report may be passed on, so it does not name the folders of one machine."""
    return Path(path).name if Path(path).is_absolute() else path
