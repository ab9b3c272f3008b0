"""The torch backend on the CPU: the same logits as `transformers` for every family, and clear error messages."""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

pytest.importorskip("torch", reason="torch is not installed; pip install outpace[torch]")
pytest.importorskip("safetensors", reason="safetensors is not installed; pip install outpace[torch]")
pytest.importorskip("tokenizers", reason="tokenizers is not installed; pip install outpace[torch]")

import torch
from safetensors.torch import load_file, save_file

from outpace import LLM, SamplingParams
from outpace.backends.base import Capabilities, Capacity, DraftTask
from outpace.backends.torch.device import MemoryPlan, TorchOptions, choose_device, out_of_memory
from outpace.backends.torch.execution import executor, graphs
from outpace.backends.torch.execution.early_start import EarlyStart
from outpace.backends.torch.execution.graphs import Graphs, find_bucket, find_prefill_bucket, load_step
from outpace.backends.torch.execution.pages import PAGE_TOKENS
from outpace.backends.torch.execution.staging import fill
from outpace.backends.torch.execution.step import DRAFTED, PADDING, HostStep, StepShape, views
from outpace.backends.torch.model.gguf_quants import dequantise
from outpace.backends.torch.runner import TorchModel, TorchRunner
from outpace.backends.torch.sampling import verifier as device_verifier
from outpace.config import EngineConfig, SpeculationParams
from outpace.core import Case, Draft, Request, Row, StepPlan
from outpace.decoding.sampling import Shaper
from outpace.decoding.verification import HostVerifier, matches_own_tokens
from outpace.engine.engine import Engine
from outpace.errors import BackendError, ModelError
from outpace.speculation.policy.decision import Decision
from outpace.speculation.policy.policy import LookUp, Policy
from outpace.speculation.policy.state import Choice, Outcome
from outpace.speculation.proposers.base import NoDraft, Proposer
from outpace.speculation.proposers.draft_model import DraftModelProposer
from outpace.speculation.proposers.ngram import NgramProposer
from outpace.structured import StructuredOutput
from tests.fakes import ByteTokenizer
from tests.numpy_reference import Floats, ReferenceModel
from tests.tiny_gguf import FAMILIES, TYPES, write_model

VOCAB_SIZE = 120
CAPACITY = Capacity(max_sequences=8, cache_tokens=1024, max_context=256, max_step_tokens=256)
SMALL: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256, "rms_norm_eps": 1e-5,
    "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}  # fmt: skip
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 64}
LAYERS = ["sliding_attention", "full_attention", "sliding_attention"]
GEMMA3 = {
    "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 500.0},
}
LONGROPE = {
    "rope_type": "longrope", "rope_theta": 1e4, "partial_rotary_factor": 0.75, "original_max_position_embeddings": 256,
    "short_factor": [1.0, 1.1, 1.2, 1.3, 1.5, 2.0], "long_factor": [1.0, 2.0, 3.0, 4.0, 6.0, 9.0],
}  # fmt: skip
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama2": ("Llama", {"num_key_value_heads": 4}),
    "llama3": ("Llama", {"rope_parameters": LLAMA3}),
    "llama linear": ("Llama", {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}}),
    "llama biases": ("Llama", {"attention_bias": True, "mlp_bias": True}),
    "smollm2": ("Llama", {"hidden_size": 72, "num_attention_heads": 9, "num_key_value_heads": 3,
                          "tie_word_embeddings": True}),
    "mistral": ("Mistral", {"sliding_window": None, "head_dim": 24}),
    "qwen2": ("Qwen2", {"tie_word_embeddings": True}),
    "qwen2 yarn": ("Qwen2", {"rope_parameters": YARN}),
    "qwen3": ("Qwen3", {"head_dim": 32}),
    # Windows shorter than the texts, in some layers or in all.
    "mistral window": ("Mistral", {"sliding_window": 20}),
    "qwen2 window": ("Qwen2", {"sliding_window": 20, "use_sliding_window": True, "max_window_layers": 1}),
    "gemma": ("Gemma", {"head_dim": 32, "num_key_value_heads": 1}),
    "gemma2": ("Gemma2", {"head_dim": 32, "sliding_window": 20, "attn_logit_softcapping": 5.0,
                          "query_pre_attn_scalar": 24}),
    "gemma3": ("Gemma3", {"head_dim": 32, "sliding_window": 20, "query_pre_attn_scalar": 24, "layer_types": LAYERS,
                          "rope_parameters": GEMMA3}),
    "phi3": ("Phi3", {"sliding_window": 50, "pad_token_id": 0}),
    "phi4 mini": ("Phi3", {"pad_token_id": 0, "tie_word_embeddings": True, "max_position_embeddings": 1024,
                           "original_max_position_embeddings": 256, "rope_parameters": LONGROPE}),
    "qwen3 moe": ("Qwen3Moe", {"head_dim": 32, "num_experts": 6, "num_experts_per_tok": 3, "norm_topk_prob": True,
                               "moe_intermediate_size": 40}),
    "mixtral": ("Mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2}),
}  # fmt: skip


class Reference:
    """A tiny random model of transformers, saved where the backend can read it."""

    def __init__(self, folder: Path, variant: str) -> None:
        transformers = pytest.importorskip("transformers", reason="transformers, the oracle, is not installed")
        name, changes = VARIANTS[variant]
        kind = getattr(transformers, f"{name}ForCausalLM")
        torch.manual_seed(0)
        self._model = kind(kind.config_class(**SMALL | changes)).eval().float()
        with torch.no_grad():
            middle = 0 if name.startswith("Gemma") else 1  # of norms: Gemma's are 1 + a weight
            for parameter in self._model.parameters():  # initial norms are 1 and biases 0, which would hide errors
                parameter.copy_(torch.randn_like(parameter) * 0.3 + middle * (parameter.dim() == 1))
        self._model.save_pretrained(folder)
        self.folder: Path = folder

    def logits(self, tokens: list[int]) -> Floats:
        with torch.no_grad():
            found: Floats = self._model(torch.tensor([tokens])).logits[0].numpy()
        return found


@pytest.fixture(scope="module", params=list(VARIANTS))
def reference(request, tmp_path_factory) -> Reference:
    return Reference(tmp_path_factory.mktemp("model"), request.param)


@pytest.fixture
def runner(reference) -> Iterator[TorchRunner]:
    runner = start(reference.folder)
    yield runner
    runner.close()


def start(path: Path, capacity: Capacity = CAPACITY) -> TorchRunner:
    model = TorchModel(path, TorchOptions("cpu"), tokenizer=ByteTokenizer())
    runner = model.start(capacity, 1).runner  # threads do not speed up tiny products
    assert isinstance(runner, TorchRunner)
    return runner


def random_tokens(n: int, seed: int = 0) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(VOCAB_SIZE) for _ in range(n)]


def step(runner: TorchRunner, seq: int, begin: int, tokens: list[int]) -> Floats:
    return runner.forward(StepPlan([Row(seq, begin, tokens, len(tokens))])).copy()


def check(found: Floats, expected: Floats) -> None:
    assert found.shape == expected.shape
    error = np.abs(found - expected).max() / np.abs(expected).max()
    assert error < 1e-4, error


# The same logits as transformers, for any split of tokens into steps.


def test_prefill_and_decoding_equal_transformers(reference, runner):
    tokens = random_tokens(100)
    expected = reference.logits(tokens)
    check(step(runner, 0, 0, tokens[:70]), expected[:70])
    for at in range(70, 75):
        check(step(runner, 0, at, tokens[at : at + 1]), expected[at : at + 1])
    check(step(runner, 0, 75, tokens[75:]), expected[75:])


def test_ragged_rows_equal_transformers(reference, runner):
    texts = [random_tokens(n, seed=n) for n in (90, 33, 32, 7)]
    for seq, tokens in enumerate(texts[:3]):
        step(runner, seq, 0, tokens[:-5])
    sizes = [(1, 1), (5, 5), (3, 2), (7, 7)]  # tokens, logits: decode, verify, logits of some tokens, a prompt
    rows = []
    for seq, (tokens, (size, num_logits)) in enumerate(zip(texts, sizes, strict=True)):
        begin = len(tokens) - 5 if seq < 3 else 0
        rows.append(Row(seq, begin, tokens[begin : begin + size], num_logits))
    logits, at = runner.forward(StepPlan(rows)), 0
    assert not logits.flags.writeable
    for row, tokens in zip(rows, texts, strict=True):
        end = row.start + len(row.tokens)
        check(logits[at : at + row.num_logits], reference.logits(tokens[:end])[end - row.num_logits :])
        at += row.num_logits
    assert at == len(logits)


def test_rewound_and_forked_sequences_equal_transformers(reference, runner):
    tokens, other = random_tokens(60), random_tokens(60, seed=1)
    step(runner, 0, 0, tokens)
    for keep in (45, PAGE_TOKENS, 7):  # inside a page, at its border, far back
        runner.truncate(0, keep)
        mixed = tokens[:keep] + other[keep : keep + 20]
        check(step(runner, 0, keep, mixed[keep:]), reference.logits(mixed)[keep:])
        runner.truncate(0, keep)
        runner.fork(0, 1, keep)
        check(step(runner, 1, keep, tokens[keep:50]), reference.logits(tokens[:50])[keep:])
        check(step(runner, 0, keep, tokens[keep:50]), reference.logits(tokens[:50])[keep:])
        runner.free(1)
    runner.free(0)
    runner.pool.check_integrity()
    assert runner.pool.num_free_blocks == runner.pool.num_blocks


def test_a_padded_bucket_computes_what_the_step_itself_would(reference, runner):
    """The step of a captured graph, kernel by kernel: rows with gaps after them, and unused rows."""
    tokens = random_tokens(40)
    for seq in range(3):
        step(runner, seq, 0, tokens[: 30 + seq])
    rows = [Row(seq, 30 + seq, tokens[30 + seq : 31 + 2 * seq], 1 + seq) for seq in range(3)]
    plan = StepPlan(rows)
    for row in rows:
        runner.reserve(row.seq, row.start, len(row.tokens))
    host = HostStep(StepShape(16, 4, 16, 4, runner._table_width), pinned=False)
    host.buffer.fill_(3)  # leftovers of an earlier step
    runner.fill(host, plan)
    assert (host.positions == PADDING).sum() == 16 - plan.num_tokens
    logits = runner.model.forward(views(host.buffer, host.shape), runner.caches).numpy()
    expected = [reference.logits(tokens[: row.start + len(row.tokens)])[row.start :] for row in rows]
    check(logits[host.outputs[: plan.num_tokens]], np.concatenate(expected))


def test_steps_in_buckets_change_nothing(tiny, damaged, monkeypatch):
    """Runs the steps that a GPU captures: padded steps and loops, and packed steps that prefill or verify."""
    expected = stream_of_requests(tiny, damaged)
    made, found = Graphs.__init__, Counter[bool]()
    reading = Graphs._find_prefill

    def as_if_captured(self: Graphs, *args: Any) -> None:
        made(self, *args)
        self._captures = True

    def counted_reading(self: Graphs, *args: Any) -> Any:
        bucket = reading(self, *args)
        found[bucket is not None and bucket.step.shape.num_rows > 1] += 1
        return bucket

    def counted_shape(self: Graphs, *args: Any) -> Any:
        found_shape = shape(self, *args)
        packed[found_shape is not None and found_shape.is_packed] += 1
        return found_shape

    packed, shape = Counter[bool](), Graphs._shape
    monkeypatch.setattr(Graphs, "__init__", as_if_captured)
    monkeypatch.setattr(Graphs, "_find_prefill", counted_reading)
    monkeypatch.setattr(Graphs, "_shape", counted_shape)
    assert stream_of_requests(tiny, damaged) == expected
    assert found[True] > 5, found
    assert packed[False] > 100, packed
    monkeypatch.setattr(graphs, "_DENSE", 9.0)  # pack every step that fits
    packed.clear()
    assert stream_of_requests(tiny, damaged) == expected
    assert packed[True] > 20, packed


def test_a_step_takes_what_the_host_says_and_what_was_drafted():
    """Two of the rows have drafts that only the device knows; leftovers of an earlier step in gaps are ignored."""
    drafted = torch.tensor([[11, 12, 13], [21, 22, 23]], dtype=torch.int32)
    for packed in (True, False):
        host = HostStep(StepShape(9, 3, 9, 3, 2, is_packed=packed), pinned=False)
        host.tokens[:] = DRAFTED
        rows = [Row(0, 5, [1, DRAFTED, DRAFTED], 3), Row(1, 7, [2], 1), Row(2, 4, [3, DRAFTED], 2)]
        fill(host, rows, np.zeros((3, 2), np.int32))
        inputs = views(torch.zeros_like(host.buffer), host.shape)
        load_step(host.buffer, inputs, drafted, most=22)
        tokens = inputs.tokens.tolist()
        found = [tokens[int(host.begins[i]) : int(host.begins[i]) + len(row.tokens)] for i, row in enumerate(rows)]
        assert found == [[1, 11, 21], [2], [3, 13]]
        assert min(tokens) >= 0 and max(tokens) <= 22


def test_buckets_hold_what_they_are_found_for():
    for num_rows in (1, 3, 17, 128, 130, 300, 512):
        for row_tokens in (1, 5, 7, 16):
            bucket = find_bucket(num_rows, row_tokens)
            assert bucket is None or (bucket[0] >= num_rows and bucket[1] >= row_tokens)
    assert find_bucket(1, 1) == (1, 1)
    assert find_bucket(1, 500) is None
    assert find_prefill_bucket(1, 500) == (1, 512)
    assert find_prefill_bucket(1, 5000) is None
    assert find_prefill_bucket(9, 2000) == (32, 2048)
    assert find_prefill_bucket(500, 2000) == (512, 2048)
    assert find_prefill_bucket(513, 2000) is None
    assert find_bucket(512, 1) == (512, 1)
    assert find_bucket(512, 2) == (512, 2)
    assert find_bucket(512, 3) is None
    assert find_bucket(513, 1) is None


# GGUF files.


@pytest.mark.parametrize("kind", TYPES)
def test_every_gguf_type_is_dequantised_as_the_gguf_package_does(kind, tmp_path):
    import gguf

    path = write_model(tmp_path / "tiny.gguf", "llama", kind)
    for tensor in gguf.GGUFReader(path).tensors:
        expected = gguf.quants.dequantize(tensor.data, tensor.tensor_type).reshape(-1)
        data = torch.from_numpy(np.array(tensor.data).view(np.uint8).reshape(-1))
        np.testing.assert_allclose(dequantise(data, int(tensor.tensor_type)).numpy(), expected, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("options", [{}, {"tied": False}, {"rope_factors": True}, {"head_dim": 32}], ids=str)
@pytest.mark.parametrize("family", FAMILIES)
def test_gguf_logits_are_those_of_the_numpy_reference(family, options, tmp_path):
    path = write_model(tmp_path / "tiny.gguf", family, "Q8_0", **options)
    tokens = random_tokens(50)
    runner = start(path)
    check(step(runner, 0, 0, tokens), ReferenceModel.load(path).logits(tokens))
    runner.close()


@pytest.mark.model
def test_greedy_speculation_says_what_plain_decoding_says():
    prompt = "red, green, blue, red, green, blue, red, green, blue, red, green,"
    texts = {}
    room: dict[str, Any] = {"max_context": 256, "cache_tokens": 256, "max_sequences": 1}  # less to calibrate
    with LLM(backend="torch", device="cpu", speculation="on", prefix_reuse=False, threads=1, **room) as llm:
        assert llm.config.backend == "torch"
        for mode in ("off", "on"):
            asked = SpeculationParams(mode=mode)
            params = SamplingParams(max_tokens=16, temperature=0.0, speculation=asked)
            texts[mode] = llm.generate(prompt, params)[0].outputs[0]
    assert texts["off"].speculation.num_drafted == 0
    assert texts["on"].speculation.num_accepted > 0, "nothing was accepted, so nothing was tested"
    assert texts["on"].token_ids == texts["off"].token_ids


# Drawing, drafting and verifying on the device.

FEATURES: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 0.0, "frequency_penalty": 0.8, "repetition_penalty": 1.2},
    {"temperature": 0.9, "seed": 5},
    {"temperature": 1.0, "seed": 6, "top_p": 0.9, "top_k": 30},
    {"temperature": 0.7, "seed": 7, "logprobs": 2, "logit_bias": {3: 2.0, 9: -1.5}},
    {"temperature": 0.0, "structured": StructuredOutput(regex="([a-f]{2,5}[0-9]){9,}")},
    {"temperature": 1.0, "seed": 8, "structured": StructuredOutput(regex="([A-M]+, (no|yes)! )+-")},
]


def generate(
    folder: Path,
    draft: Path | None,
    *,
    on_device: bool = True,
    wanted: Sequence[dict[str, Any]] = FEATURES,
    **options: Any,
) -> list[list[int]]:
    """Tokens from an engine built here; `draft` is another model, or the same. `wanted`: of each request."""
    name = "draft" if draft else None
    config = EngineConfig(draft=name, max_sequences=4, max_context=200, max_step_tokens=64, cache_tokens=900, **options)
    resolved = config.resolve(model_context=256, model_path="tiny", draft_path=name, backend="torch")
    capacity = Capacity(8, resolved.cache_tokens, resolved.max_context, resolved.max_step_tokens)
    loaded = [
        TorchModel(path, TorchOptions("cpu"), tokenizer=ByteTokenizer()).start(capacity, 1)
        for path in (folder, draft)
        if path is not None
    ]
    if not on_device:
        for each in loaded:
            assert isinstance(each.runner, TorchRunner)
            each.runner.capabilities = Capabilities(can_rewind=True)
    proposers: dict[str, Proposer] = {"none": NoDraft(), "ngram": NgramProposer(2, 4)}
    if draft is not None:
        proposers["draft"] = DraftModelProposer(loaded[1], loaded[0].runner.vocab_size)
    engine = Engine(loaded[0], proposers, resolved)
    requests = [
        engine.submit(random_tokens(20 + 9 * i, seed=i), SamplingParams(max_tokens=24, ignore_eos=True, **features))
        for i, features in enumerate(wanted)
    ]
    while engine.has_requests:
        engine.step()
    num_accepted = sum(request.spec.num_accepted for request in requests)
    assert num_accepted > 0 or draft is None, "nothing was accepted, so nothing was tested"
    return [list(request.tokens[len(request.prompt) :]) for request in requests]


def test_tokens_drawn_on_the_device_are_the_hosts(tiny):
    assert generate(tiny, None, speculation="off") == generate(tiny, None, speculation="off", on_device=False)


def test_steps_begun_early_change_nothing(tiny, monkeypatch):
    """Requests arrive, end and change their plan while the next step already runs."""
    said, taken = {}, {}
    for is_begun in (True, False):
        count = taken[is_begun] = Counter[str]()
        for name in ("_take", "_take_some"):
            monkeypatch.setattr(
                executor.DeviceExecutor, name, counted(getattr(executor.DeviceExecutor, name), name, count)
            )
        monkeypatch.setattr(EarlyStart, "is_worth", lambda *_, answer=is_begun: answer)
        said[is_begun] = stream_of_requests(tiny)
        monkeypatch.undo()
    assert said[True] == said[False]
    assert taken[True]["_take"] > 20 and taken[True]["_take_some"] > 5, taken
    assert not taken[False]


def test_a_step_without_cases_can_follow_one_that_was_begun(tiny, monkeypatch):
    monkeypatch.setattr(EarlyStart, "is_worth", lambda *_: True)
    runner = start(tiny)
    request = fake_request(0, random_tokens(6), SamplingParams(max_tokens=50, temperature=0.0))
    step(runner, 0, 0, request.tokens[:-1])
    runner.executor(StepPlan([Row(0, 5, request.tokens[-1:], 1)]), [Case(request, None)])
    assert runner.executor(StepPlan([Row(1, 0, random_tokens(3), 1)]), []).verdicts == []
    runner.close()


def test_what_can_be_done_meanwhile_is_done_once_while_a_step_runs(tiny):
    runner, calls = start(tiny), list[int]()
    request = fake_request(0, random_tokens(6), SamplingParams(max_tokens=50, temperature=0.0))
    plan = StepPlan([Row(0, 0, request.tokens, 1)])
    result = runner.executor(plan, [Case(request, None)], lambda: calls.append(len(calls)))
    assert calls == [0] and result.is_typical and not result.hidden_seconds
    runner.close()


def test_what_is_learned_late_is_what_would_be_learned_at_once(tiny, damaged, monkeypatch):
    """Late learning sees each step as it was, although the next one is already decided."""
    learn_of_policy, learn = Policy.learn, Engine._learn
    seen: dict[bool, list[tuple[int, list[list[int]]]]] = {True: [], False: []}
    decided, num_late = [0], 0

    def idle(policy: Policy, requests: Sequence[Request], look_up: LookUp, num_prefill: int = 0) -> Decision:
        decided[0] += 1
        return Decision(decided[0], requests, [Choice.plain()] * len(requests), "idle", is_repeated=True)

    monkeypatch.setattr(Policy, "decide", idle)
    for postpones in seen:
        decided[0] = 0

        def noted(
            policy: Policy,
            decision: Decision,
            outcomes: Sequence[Outcome],
            *rest: Any,
            kept: Any = seen[postpones],
            **named: Any,
        ) -> None:
            nonlocal num_late
            num_late += decision.step != decided[0]
            kept.append((decision.step, [outcome.verdict.tokens for outcome in outcomes]))
            learn_of_policy(policy, decision, outcomes, *rest, **named)

        def at_once(engine: Engine, *args: Any) -> None:
            engine._can_postpone = False
            learn(engine, *args)

        monkeypatch.setattr(Policy, "learn", noted)
        if not postpones:
            monkeypatch.setattr(Engine, "_learn", at_once)
        stream_of_requests(tiny, damaged)
    assert seen[True] == seen[False]
    assert num_late > 50


def test_nothing_is_learned_of_costs_from_a_step_that_waited_for_another_begun_in_vain(tiny, monkeypatch):
    monkeypatch.setattr(EarlyStart, "is_worth", lambda *_: True)
    runner = start(tiny)
    request = fake_request(0, random_tokens(6), SamplingParams(max_tokens=50, temperature=0.0))
    step(runner, 0, 0, request.tokens[:-1])
    result = runner.executor(StepPlan([Row(0, 5, request.tokens[-1:], 1)]), [Case(request, None)])
    assert result.is_typical
    request.tokens += result.verdicts[0].tokens
    drafted = Draft(random_tokens(2), "ngram")
    row = Row(0, 6, [request.tokens[-1], *drafted.tokens], 3)
    assert not runner.executor(StepPlan([row]), [Case(request, drafted)]).is_typical
    runner.close()


def test_steps_are_begun_early_where_that_is_worth_the_mistakes():
    """A right guess saves a fifth of a step here: early steps pay with one wrong guess in ten, not with one in two."""
    for share, is_worth in ((0.0, True), (0.1, True), (0.5, False)):
        early_start, now = EarlyStart(), 0.0
        for i in range(200):
            early_start.begin(now, is_plain=True)
            early_start.learn(False, was_right=i % 10 >= 10 * share)
            early_start.end(now + 4e-3, 4e-3)
            now += 5e-3
        assert early_start.is_worth(False) == is_worth, share
        assert early_start.is_worth(True), "nothing was learned of requests that are never drafted for"


def test_plain_steps_on_end_are_begun_early_although_drafts_have_followed_upon_few():
    early_start, now, expected = EarlyStart(), 0.0, False

    def step(is_plain: bool) -> bool:
        """Whether the next step would be started early."""
        nonlocal now, expected
        early_start.begin(now, is_plain)
        if expected:
            early_start.learn(False, was_right=is_plain)
        early_start.end(now + 4e-3, 4e-3)
        now, expected = now + 5e-3, is_plain
        return is_plain and early_start.is_worth(False)

    begun = [step(is_plain=i % 4 > 1) for i in range(200)]  # two steps with drafts, two without
    assert not any(begun[-40:])
    assert [step(is_plain=True) for _ in range(4)] == [False, True, True, True]  # third to sixth in a row


def counted(method: Callable[..., Any], name: str, count: Counter[str]) -> Callable[..., Any]:
    def wrapped(*args: Any) -> Any:
        count[name] += 1
        return method(*args)

    return wrapped


def stream_of_requests(
    folder: Path, draft: Path | None = None, *, count: int = 12, with_scores: bool = False
) -> list[list[int]]:
    """Some greedy, some sampled, of different lengths, a new one every few steps; two use drafts, or all.

    `with_scores`: prompts are scored beside them, and must have the scores that they have alone.
    """
    name = "draft" if draft else None
    config = EngineConfig(
        draft=name, max_sequences=4, max_context=200, max_step_tokens=64, cache_tokens=500,
        speculation="on" if draft else "off", method="draft" if draft else None, depth=3 if draft else None,
    )  # fmt: skip
    resolved = config.resolve(model_context=256, model_path="tiny", draft_path=name, backend="torch")
    capacity = Capacity(5, resolved.cache_tokens, resolved.max_context, resolved.max_step_tokens)
    loaded, *drafting = [
        TorchModel(path, TorchOptions("cpu"), tokenizer=ByteTokenizer()).start(capacity, 1)
        for path in (folder, draft)
        if path is not None
    ]
    proposers: dict[str, Proposer] = {"none": NoDraft(), "ngram": NgramProposer(1, 4)}
    if drafting:
        proposers["draft"] = DraftModelProposer(drafting[0], loaded.runner.vocab_size)
    engine = Engine(loaded, proposers, resolved, draft=drafting[0] if drafting else None)
    features: list[dict[str, Any]] = [
        {"temperature": 0.0},
        {"temperature": 0.9, "seed": 5},
        {"temperature": 0.0, "speculation": SpeculationParams(mode="on", method="ngram", max_depth=3)},
        {"temperature": 1.0, "seed": 6, "top_p": 0.9},
        {"temperature": 0.0, "logprobs": 1},
        {"temperature": 0.7, "seed": 8, "frequency_penalty": 0.5},
    ]
    requests: list[Request] = []
    scored: list[Request] = []
    for i in range(12 * count + 16):
        if with_scores and i % 12 == 6:
            engine.scheduler._max_scored_tokens = 9
            params = SamplingParams(max_tokens=i // 12 % 2, temperature=0.0, prompt_logprobs=0)
            scored.append(engine.submit(random_tokens(20, seed=77), params))
        if i % 12 == 0 and len(requests) < count:
            params = SamplingParams(max_tokens=9 + 5 * len(requests), ignore_eos=True, **features[len(requests) % 6])
            requests.append(engine.submit(random_tokens(3 + 7 * len(requests), seed=len(requests)), params))
        engine.step()
    while engine.has_requests:
        engine.step()
    for each in (loaded, *drafting):
        assert isinstance(each.runner, TorchRunner)
        each.runner.pool.check_integrity()
        each.runner.close()
    for request in scored:
        found, expected = ([each.logprob for each in one.prompt_logprobs] for one in (request, scored[0]))
        np.testing.assert_allclose(found, expected, atol=1e-4)
    return [request.tokens for request in requests]


@pytest.mark.parametrize("has_draft", [False, True])
def test_prompts_scored_beside_steps_begun_early_change_nothing(tiny, damaged, has_draft, monkeypatch):
    monkeypatch.setattr(EarlyStart, "is_worth", lambda *_: True)
    draft = damaged if has_draft else None
    assert stream_of_requests(tiny, draft, count=4, with_scores=True) == stream_of_requests(tiny, draft, count=4)


def test_logprobs_are_there_where_asked_for(tiny):
    on_device = start(tiny)
    logits = step(on_device, 0, 0, random_tokens(9))
    on_device.free(0)
    result = on_device.executor(StepPlan([Row(0, 0, random_tokens(9), 9)]), [])
    assert result.verdicts == []
    check(result.logits[2:5], logits[2:5])
    on_device.close()


@pytest.mark.parametrize("closeness", [0.02, 1.0])
@pytest.mark.parametrize("acceptance", ["exact", "rejection", "typical", "threshold"])
def test_verdicts_that_drawing_does_not_decide_are_the_hosts(acceptance, closeness):
    """Penalties, biases, masks, lossy rules, and drafts with probabilities."""
    vocab, generator = 60, np.random.default_rng([len(acceptance), int(closeness * 100)])
    threshold = 0.05 if acceptance == "threshold" else None
    cases, rows = list[Case](), list[Floats]()
    for i in range(60):
        params = SamplingParams(
            temperature=[0.0, 0.8, 1.3][i % 3],
            top_p=[1.0, 0.9][i % 2],
            seed=i if i % 5 == 0 else None,
            logit_bias={3: 2.0, 9: -1.5} if i % 4 == 0 else {},
            repetition_penalty=[1.0, 1.3][i % 7 == 0],
            frequency_penalty=[0.0, 0.6][i % 6 == 0],
            min_tokens=[0, 4][i % 8 == 0],
            speculation=SpeculationParams(acceptance=acceptance, threshold=threshold),
        )
        prompt = generator.integers(0, vocab, size=4).tolist()
        request = Request(i, params, prompt, 1000 + i, Shaper(params, prompt, frozenset({7})), cast(Any, None), 200)
        said = generator.integers(0, vocab, size=i % 4).tolist()
        request.tokens += said
        request.shaper.advance(said)
        depth = i % 5
        logits = (generator.normal(size=(depth + 1, vocab)) * 2).astype(np.float32)
        drafted = (logits[:depth] + generator.normal(size=(depth, vocab)) * closeness).astype(np.float32)
        draft = Draft([], "draft", None if matches_own_tokens(params) else [])
        for row in drafted:
            probs = request.shaper.probs(row, draft.tokens)
            token = int(generator.choice(vocab, p=probs.astype(np.float64) / probs.sum(dtype=np.float64)))
            draft.tokens.append(token)
            if draft.probs is not None:
                draft.probs = [*draft.probs, probs]
        cases.append(Case(request, draft if depth else None))
        rows.append(logits)
    together = np.concatenate(rows)
    expected = HostVerifier().verify(cases, together)
    assert device_verifier.verify(cases, torch.from_numpy(together)) == expected
    assert any(verdict.num_accepted for verdict in expected)


@pytest.mark.parametrize("depth", [1, 3, 6])
def test_drafts_made_on_the_device_change_nothing(tiny, damaged, depth):
    plain = generate(tiny, None, speculation="off")
    assert generate(tiny, damaged, speculation="on", method="draft", depth=depth) == plain


def test_verification_begun_behind_a_draft_changes_nothing(tiny, damaged, monkeypatch):
    """Most steps are used as they were started; additional rows run in a second step."""
    said, taken = {}, {}
    for is_begun in (True, False):
        count = taken[is_begun] = Counter[str]()
        for name in ("_take_ahead", "_run_rest"):
            monkeypatch.setattr(
                executor.DeviceExecutor, name, counted(getattr(executor.DeviceExecutor, name), name, count)
            )
        if not is_begun:
            monkeypatch.setattr(executor.DeviceExecutor, "begin_verifying", lambda *_: None)
        said[is_begun] = stream_of_requests(tiny, damaged)
        monkeypatch.undo()
    assert said[True] == said[False]
    assert taken[True]["_take_ahead"] > 20 and taken[True]["_run_rest"] > 0, taken
    assert not taken[False]["_take_ahead"]


@pytest.mark.parametrize("num_uncached", [1, 2, 9])
def test_a_draft_loop_says_what_single_steps_say(tiny, num_uncached):
    """Rows of different depths, one of depth 1; all but a few tokens are in the cache."""
    resolved = SamplingParams(max_tokens=50, temperature=0.0)
    drafting, stepping = start(tiny), start(tiny)
    requests = [fake_request(i, random_tokens(10 + 3 * i, seed=i), resolved) for i in range(3)]
    tasks = []
    for i, (request, depth) in enumerate(zip(requests, (4, 1, 6), strict=True)):
        begin = len(request.tokens) - max(num_uncached - i % 2, 1)
        step(drafting, i, 0, request.tokens[:begin])
        tasks.append(DraftTask(Row(i, begin, request.tokens[begin:], 1), request, depth))
    said = drafting.draft(tasks)
    for i, task in enumerate(tasks):
        tokens = list(task.request.tokens)
        logits = step(stepping, i, 0, tokens)
        expected = []
        for _ in range(task.depth):
            expected.append(int(logits[-1].argmax()))
            logits = step(stepping, i, len(tokens), expected[-1:])
            tokens.append(expected[-1])
        assert said[i].tokens == expected
        assert drafting.pool.length(i) == len(task.request.tokens) + task.depth - 1
    drafting.close()
    stepping.close()


def fake_request(number: int, tokens: list[int], params: SamplingParams) -> Request:
    writer: Any = None
    return Request(number, params, tokens, 3, Shaper(params, tokens, frozenset()), writer, 200)


@pytest.fixture(scope="module")
def damaged(tiny: Path, tmp_path_factory) -> Path:
    """A draft model: the tiny model with some noise, so that the target accepts some of its tokens."""
    folder: Path = tmp_path_factory.mktemp("draft")
    for file in tiny.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    torch.manual_seed(1)

    def disturb(tensors: dict[str, torch.Tensor]) -> None:
        for name, tensor in tensors.items():
            tensors[name] = tensor * (1 + 0.02 * torch.randn_like(tensor))

    change_weights(folder, disturb)
    return folder


# One clear message per defect of a model.


@pytest.fixture(scope="module")
def tiny(tmp_path_factory) -> Path:
    reference = Reference(tmp_path_factory.mktemp("tiny"), "llama3")
    return reference.folder


@pytest.fixture
def folder(tiny: Path, tmp_path: Path) -> Path:
    """A copy that a test may damage."""
    for file in tiny.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    return tmp_path


def change_config(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def change_weights(folder: Path, change: Any) -> None:
    path = folder / "model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path)


def refusal(folder: Path) -> str:
    with pytest.raises(ModelError) as caught:
        start(folder)
    return str(caught.value)


def test_an_unknown_architecture_is_named_with_the_known_ones(folder):
    change_config(folder, architectures=["MambaForCausalLM"])
    assert "is a MambaForCausalLM, which the torch backend does not run; it runs LlamaForCausalLM, " in refusal(folder)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"hidden_act": "gelu"}, "sets hidden_act to 'gelu', which the torch backend does not support"),
        ({"quantization_config": {"bits": 4}}, "sets quantization_config"),
        ({"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}}, "RoPE scaling is 'dynamic'"),
        ({"rope_parameters": LLAMA3 | {"factor": "x"}}, "has no usable rope_parameters.factor ('x')"),
        ({"rope_parameters": LLAMA3 | {"low_freq_factor": 4.0}}, "a low_freq_factor of 4.0 over 4.0"),
        ({"num_hidden_layers": None}, "has no usable num_hidden_layers (None)"),
        ({"num_key_value_heads": 3}, "do not divide evenly"),
        ({"rms_norm_eps": "small"}, "has no usable rms_norm_eps"),
        ({"intermediate_size": 128}, "of shape [64, 96] and its config.json asks for [64, 128]"),
        ({"num_hidden_layers": 4}, "lacks model.layers.3.input_layernorm.weight and 8 more"),
        ({"num_hidden_layers": 2}, "holds model.layers.2."),
        ({"architectures": ["Qwen3ForCausalLM"]}, "lacks model.layers.0.self_attn.q_norm.weight"),
        ({"vocab_size": 121}, "of shape [120, 64] and its config.json asks for [121, 64]"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_a_config_that_cannot_be_run_or_contradicts_the_weights(folder, changes, words):
    change_config(folder, **changes)
    assert words in refusal(folder)


def test_a_head_that_is_missing_and_not_tied(folder):
    change_weights(folder, lambda tensors: tensors.pop("lm_head.weight"))
    assert "lacks lm_head.weight" in refusal(folder)
    change_config(folder, tie_word_embeddings=None)
    start(folder).close()  # without tie_word_embeddings and a head, the embedding is the head


def test_broken_files(folder):
    shard = folder / "model.safetensors"
    whole = shard.read_bytes()
    for damaged in (whole[: len(whole) // 2], whole[:4], b"\xff" * 64):
        shard.write_bytes(damaged)
        assert "model.safetensors is damaged (" in refusal(folder)
    shard.unlink()
    assert "holds no .safetensors file" in refusal(folder)
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": "model-00001-of-00002.safetensors"}}))
    assert "lacks the shard model-00001-of-00002.safetensors that its index lists" in refusal(folder)
    index.write_text("{}")
    assert "index.json has no usable weight_map (None)" in refusal(folder)
    (folder / "config.json").write_text("{")
    assert "config.json is not JSON" in refusal(folder)
    (folder / "config.json").unlink()
    assert "has no readable config.json" in refusal(folder)


def test_shards_are_read_together(folder, tiny):
    tensors = list(load_file(folder / "model.safetensors").items())
    (folder / "model.safetensors").unlink()
    for i in range(2):
        save_file(dict(tensors[i::2]), folder / f"model-{i}.safetensors")
    tokens = random_tokens(10)
    np.testing.assert_array_equal(step(start(folder), 0, 0, tokens), step(start(tiny), 0, 0, tokens))


# Rules of the runner, and memory.


def test_a_row_that_does_not_continue_its_sequence_is_refused(tiny):
    runner = start(tiny)
    with pytest.raises(BackendError, match="a row starts at 3, but the cache of its sequence holds 0 tokens"):
        runner.forward(StepPlan([Row(0, 3, [1], 1)]))
    runner.close()
    with pytest.raises(BackendError, match="closed"):
        runner.forward(StepPlan([Row(0, 0, [1], 1)]))


def test_too_little_memory_is_said_in_figures_before_anything_is_loaded(tiny):
    huge = Capacity(max_sequences=8, cache_tokens=10**12, max_context=256, max_step_tokens=256)
    with pytest.raises(BackendError) as caught:
        start(tiny, huge)
    assert "GB for 1,000,000,000,768 tokens of cache" in str(caught.value)
    assert "lower cache_tokens or max_context" in str(caught.value)


def test_running_out_of_memory_names_the_flags():
    plan = MemoryPlan("big", weights=15_000_000_000, workspace=10**9, cache_token=131072, num_cache_tokens=8192)
    error = out_of_memory(RuntimeError("CUDA out of memory.\nmore"), plan, torch.device("cuda", 0))
    assert "15.00 GB for weights, 1.07 GB for its cache" in str(error)
    assert "lower cache_tokens, max_context or gpu_memory_utilization" in str(error)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_missing_cuda_is_an_error_only_where_it_was_asked_for(caplog):
    with pytest.raises(BackendError, match=r"torch cannot use CUDA here: .*; use device 'cpu'"):
        choose_device("cuda")
    assert choose_device("auto").type == "cpu"
    assert "runs on the CPU, which is slow" in caplog.text
