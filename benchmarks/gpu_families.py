"""Every model family on a GPU: logits beside the reference, drafts beside plain decoding, and the time of steps.

    python -m benchmarks.gpu_families OUT                          OUT.txt and OUT.json; some minutes on one H200
    python -m benchmarks.gpu_families OUT --only check exact       only these sections
    python -m benchmarks.gpu_families OUT --shapes gemma-3-4b      only this shape's steps

`check` and `exact` use small models with random weights, and texts longer than their windows. `tests/backends/torch`
compares the reference, which runs on the CPU in float32, with transformers. In bfloat16 a router may choose another
expert than in float32, so the median error counts there. The floor of a step with experts counts those that tokens are
expected to choose if all are equally likely. `--device cpu` tries the first two sections without a GPU.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.gpu import CONTEXT, Bench, Cell, Report, run_sections
from benchmarks.gpu_models import Letters, captured, random_caches, random_weights, replay_ms, uniform_step
from outpace.backends.base import Capacity, LoadedModel
from outpace.backends.torch.execution.pages import PAGE_TOKENS
from outpace.backends.torch.kernels import ops_for
from outpace.backends.torch.model.model import Model
from outpace.backends.torch.model.weights import Weights, allocate, copy_into, named_tensors
from outpace.backends.torch.runner import TorchRunner
from outpace.backends.torch.storage import plain_tensor
from outpace.config import EngineConfig, SamplingParams
from outpace.core import Row, StepPlan
from outpace.engine.engine import Engine
from outpace.models.architecture import Architecture
from outpace.models.hf_config import parse_config
from outpace.speculation.proposers.base import NoDraft, Proposer
from outpace.speculation.proposers.draft_model import DraftModelProposer

_SIZES: dict[str, Any] = {
    "vocab_size": 500, "hidden_size": 256, "intermediate_size": 320, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 64, "max_position_embeddings": 512, "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
}  # fmt: skip
_LONGROPE = {"rope_type": "longrope", "short_factor": [1.0] * 24, "long_factor": [1.5] * 24,
             "partial_rotary_factor": 0.75, "original_max_position_embeddings": 128}  # fmt: skip
SMALL: dict[str, dict[str, Any]] = {
    "llama": {"architectures": ["LlamaForCausalLM"]},
    "mistral": {"architectures": ["MistralForCausalLM"], "sliding_window": 50},
    "gemma": {"architectures": ["GemmaForCausalLM"], "hidden_act": "gelu_pytorch_tanh"},
    "gemma2": {"architectures": ["Gemma2ForCausalLM"], "head_dim": 128, "sliding_window": 50,
               "attn_logit_softcapping": 20.0, "final_logit_softcapping": 30.0, "query_pre_attn_scalar": 100},
    "gemma3": {"architectures": ["Gemma3ForCausalLM"], "head_dim": 256, "sliding_window": 50,
               "sliding_window_pattern": 3, "query_pre_attn_scalar": 256},
    "phi3": {"architectures": ["Phi3ForCausalLM"], "sliding_window": 100, "rope_parameters": _LONGROPE},
    "qwen3_moe": {"architectures": ["Qwen3MoeForCausalLM"], "moe_intermediate_size": 96, "num_experts": 16,
                  "num_experts_per_tok": 4, "norm_topk_prob": True},
    "mixtral": {"architectures": ["MixtralForCausalLM"], "num_local_experts": 4, "num_experts_per_tok": 2},
}  # fmt: skip
SHAPES: dict[str, dict[str, Any]] = {
    "gemma-3-4b": {
        "architectures": ["Gemma3ForCausalLM"], "hidden_size": 2560, "intermediate_size": 10240,
        "num_hidden_layers": 34, "sliding_window": 1024, "tie_word_embeddings": True,
    },
    "phi-4": {
        "architectures": ["Phi3ForCausalLM"], "vocab_size": 100352, "hidden_size": 5120, "intermediate_size": 17920,
        "num_hidden_layers": 40, "num_attention_heads": 40, "num_key_value_heads": 10, "rope_theta": 250000.0,
        "max_position_embeddings": 16384, "tie_word_embeddings": False,
    },
    "qwen3-30b-a3b": {
        "architectures": ["Qwen3MoeForCausalLM"], "vocab_size": 151936, "hidden_size": 2048, "intermediate_size": 6144,
        "moe_intermediate_size": 768, "num_hidden_layers": 48, "num_attention_heads": 32, "num_key_value_heads": 4,
        "head_dim": 128, "num_experts": 128, "num_experts_per_tok": 8, "norm_topk_prob": True,
        "max_position_embeddings": 40960, "rope_theta": 1e6, "tie_word_embeddings": False,
    },
    "mixtral-8x7b": {
        "architectures": ["MixtralForCausalLM"], "vocab_size": 32000, "hidden_size": 4096, "intermediate_size": 14336,
        "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "num_local_experts": 8,
        "num_experts_per_tok": 2, "max_position_embeddings": 32768, "tie_word_embeddings": False,
    },
}  # fmt: skip
CELLS = ((1, 1), (1, 8), (8, 1), (32, 1))  # rows, tokens per row
SPACE = Capacity(12, 4096, 512, 512)
LARGEST_ERROR = {torch.float32: 1e-4, torch.bfloat16: 0.05}


def small_weights(config: Architecture) -> Weights:
    """On the CPU in float32, rounded to bfloat16 so that both dtypes have the same weights."""
    torch.manual_seed(0)
    weights = allocate(config, tied=False, dtype=torch.float32, device=torch.device("cpu"))
    for tensor in map(plain_tensor, weights.tensors):
        if tensor.dim() == 1:
            tensor.normal_(1.0, 0.2)
        else:
            tensor.normal_(0.0, 1.5 / tensor.shape[1] ** 0.5)
        tensor.copy_(tensor.bfloat16())
    return weights


def moved(weights: Weights, config: Architecture, dtype: torch.dtype, device: torch.device, noise: float) -> Weights:
    """A copy; with `noise`, a draft model that the target often agrees with."""
    found = allocate(config, tied=False, dtype=dtype, device=device)
    source = named_tensors(weights, config)
    generator = torch.Generator().manual_seed(1)
    for name, place in named_tensors(found, config).items():
        tensor = plain_tensor(source[name])
        copy_into(place, tensor * (1 + noise * torch.randn(tensor.shape, generator=generator)))
    return found


def small_model(name: str, dtype: torch.dtype, device: torch.device, noise: float = 0.0) -> Model:
    config = parse_config(_SIZES | SMALL[name])
    weights = moved(small_weights(config), config, dtype, device, noise)
    return Model(config, weights, ops_for(device), SPACE.max_context)


def steps_of(model: Model) -> np.ndarray[Any, np.dtype[np.float32]]:
    """Logits of prompts, of single tokens and of drafts, alone and together."""
    runner, rng = TorchRunner(model, SPACE), random.Random(0)
    texts = [[rng.randrange(500) for _ in range(200)] for _ in range(9)]
    lengths = [0] * len(texts)
    found = []
    plans = [[(0, 130)], [(0, 1)], [(0, 5)], [(0, 1), (1, 20), (2, 90), (3, 3)], [(0, 1), (1, 7), (2, 1), (3, 1)]]
    plans += [[(seq, 30) for seq in range(4, 9)], *[[(seq, 1) for seq in range(9)]] * 3, [(seq, 4) for seq in range(9)]]
    for plan in plans:
        rows = [Row(seq, lengths[seq], texts[seq][lengths[seq] : lengths[seq] + n], n) for seq, n in plan]
        found.append(runner.forward(StepPlan(rows)).copy())
        for seq, n in plan:
            lengths[seq] += n
    runner.close()
    return np.concatenate(found)


def generate(target: Model, draft: Model | None, depth: int | None) -> tuple[list[list[int]], int]:
    """Tokens of greedy and seeded requests, and how many drafted ones were accepted."""
    name = "draft" if draft else None
    config = EngineConfig(
        draft=name, max_sequences=6, max_context=400, max_step_tokens=128, cache_tokens=3000, depth=depth,
        speculation="on" if draft else "off", method="draft" if draft else None,
    ).resolve(model_context=512, model_path="random", draft_path=name, backend="torch")  # fmt: skip
    models = [target] if draft is None else [target, draft]
    loaded = [LoadedModel(TorchRunner(model, SPACE), Letters(500), "random", 0, 0) for model in models]
    proposers: dict[str, Proposer] = {"none": NoDraft()}
    if draft is not None:
        proposers["draft"] = DraftModelProposer(loaded[1], 500)
    engine = Engine(loaded[0], proposers, config)
    requests = []
    for i in range(6):
        prompt = [random.Random(i).randrange(500) for _ in range(20 + 25 * i)]
        params = SamplingParams(max_tokens=64, ignore_eos=True, temperature=[0.0, 0.8][i % 2], seed=i)
        requests.append(engine.submit(prompt, params))
    while engine.has_requests:
        engine.step()
    for each in loaded:
        each.runner.close()
    return [request.tokens for request in requests], sum(request.spec.num_accepted for request in requests)


def floor_bytes(config: Architecture, rows: int, tokens: int) -> float:
    """What a step must read in bfloat16: matrices, chosen experts, and keys and values in sight."""
    c = config
    attention = (2 * c.q_size + 2 * c.kv_size) * c.width
    mlps = 1.0
    if c.experts is not None:
        left_out = (1 - c.experts.per_token / c.experts.count) ** (rows * tokens)
        mlps = c.experts.count * (1 - left_out)
    matrices = c.num_layers * (attention + mlps * 3 * c.hidden * c.width) + c.vocab_size * c.width
    seen = sum(min(window or CONTEXT, CONTEXT) for window in c.windows or (None,) * c.num_layers)
    return 2 * (matrices + rows * seen * 2 * c.kv_size)


class FamilyBench(Bench):
    def __init__(self, report: Report, device: torch.device, shapes: list[str]) -> None:
        super().__init__(report, None, [])
        self.device = device
        self._shapes = shapes
        self._current: tuple[str, Model] | None = None

    def model(self, shape: str) -> Model:
        if self._current is None or self._current[0] != shape:
            self._current = None
            torch.cuda.empty_cache()
            config = parse_config(SHAPES[shape])
            self._current = (
                shape, Model(config, random_weights(config, self.device), ops_for(self.device), 2 * CONTEXT)
            )  # fmt: skip
        return self._current[1]

    def check(self) -> None:
        """Logits on the device beside those of the reference."""
        found = self.report.figures["check"] = []
        for name in SMALL:
            expected = steps_of(small_model(name, torch.float32, torch.device("cpu")))
            for dtype in (torch.float32, torch.bfloat16):
                found_logits = steps_of(small_model(name, dtype, self.device))
                errors = np.abs(found_logits - expected).max(1) / np.abs(expected).max()
                counted = float(errors.max() if dtype == torch.float32 else np.median(errors))
                passed = counted < LARGEST_ERROR[dtype]
                found.append({"family": name, "dtype": str(dtype), "largest": float(errors.max()),
                              "median": float(np.median(errors)), "passed": passed})  # fmt: skip
                self.report.say(
                    f"  {name:10} {str(dtype).removeprefix('torch.'):9} error of a token's logits: median "
                    f"{np.median(errors):.1e}, largest {errors.max():.1e}{'' if passed else ' FAILED'}"
                )
        assert all(each["passed"] for each in found)

    def exact(self) -> None:
        """Greedy and seeded tokens with drafts of another model, in float32."""
        found = self.report.figures["exact"] = []
        for name in SMALL:
            target, draft = (small_model(name, torch.float32, self.device, noise) for noise in (0.0, 0.01))
            plain, _ = generate(target, None, None)
            for depth in (1, 4):
                texts, num_accepted = generate(target, draft, depth)
                num_equal = sum(one == other for one, other in zip(texts, plain, strict=True))
                passed = num_equal == len(plain) and num_accepted > 0
                found.append({"family": name, "depth": depth, "equal": num_equal, "accepted": num_accepted,
                              "passed": passed})  # fmt: skip
                self.report.say(
                    f"  {name:10} depth {depth}: {num_equal} of {len(plain)} texts equal plain decoding, "
                    f"{num_accepted} draft tokens accepted{'' if passed else ' FAILED'}"
                )
        assert all(each["passed"] for each in found)

    def steps(self) -> None:
        """One forward pass in one CUDA graph, in bfloat16."""
        found = self.report.figures["steps"] = []
        for shape in self._shapes:
            model = self.model(shape)
            for rows, tokens in CELLS:
                step = uniform_step(rows, tokens, CONTEXT, model.config.vocab_size, self.device)
                caches = random_caches(model.config, rows * -(-CONTEXT // PAGE_TOKENS), self.device)
                ms = replay_ms(captured(lambda m=model, s=step, c=caches: m.forward(s, c)), rounds=5)  # type: ignore[misc]
                floor = 1e3 * floor_bytes(model.config, rows, tokens) / self.bandwidth
                found.append({"shape": shape, "rows": rows, "tokens": tokens, "ms": ms, "floor_ms": floor})
                self.report.say(f"  {shape:14} {rows:3} x {tokens}: {statistics.median(ms):6.2f} ms, floor {floor:.2f}")
                self.report.save()

    def engine(self) -> None:
        """Plain steps of the whole engine, greedy."""
        found = self.report.figures["engine"] = []
        for shape in self._shapes:
            for rows, tokens in CELLS:
                row = self._engine_row(Cell(shape, rows, tokens, 0.0), 0.0)
                found.append(row | {"shape": shape, "rows": rows, "tokens": tokens})
                self.report.say(f"  {shape:14} {rows:3} x {tokens}: {row['step_ms']:6.2f} ms")
                self.report.save()


SECTIONS = ("machine", "check", "exact", "steps", "engine")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, help="output path, without a suffix")
    parser.add_argument("--only", nargs="+", choices=SECTIONS, default=SECTIONS, metavar="SECTION",
                        help=f"any of {', '.join(SECTIONS)} (default: all)")  # fmt: skip
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=list(SHAPES), metavar="SHAPE",
                        help=f"what to time: any of {', '.join(SHAPES)} (default: all)")  # fmt: skip
    parser.add_argument("--device", default="cuda", help="cuda, or cpu to try the checks")
    options = parser.parse_args()
    if options.device == "cuda" and not torch.cuda.is_available():
        print("benchmarks.gpu_families needs a CUDA GPU, and torch sees none", file=sys.stderr)
        return 2
    report = Report(options.out)
    report.say(f"python -m benchmarks.gpu_families {' '.join(Path(arg).name for arg in sys.argv[1:])}")
    bench = FamilyBench(report, torch.device(options.device), options.shapes)
    return run_sections(bench, [section for section in SECTIONS if section in options.only])


if __name__ == "__main__":
    sys.exit(main())
