"""A model sharded over several processes gives what one process gives, and a dead process is one clear sentence."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch", reason="torch is not installed; pip install outpace[torch]")
pytest.importorskip("safetensors", reason="safetensors is not installed; pip install outpace[torch]")
pytest.importorskip("tokenizers", reason="tokenizers is not installed; pip install outpace[torch]")

import torch

from outpace import LLM, SamplingParams
from outpace.backends.torch.model.loader import open_checkpoint
from outpace.backends.torch.model.weights import EMBEDDING, all_dense, named_tensors
from outpace.backends.torch.parallel.leader import LeadingModel
from outpace.backends.torch.parallel.peaks import combined, peak, tokens_of
from outpace.backends.torch.parallel.shard import Shard, load_shard, num_shard_bytes
from outpace.backends.torch.runner import TorchRunner
from outpace.backends.torch.storage import dense, plain_tensor
from outpace.backends.torch.storage.planar import Planar
from outpace.backends.torch.storage.scaled import Scaled
from outpace.config import SpeculationParams
from outpace.core import Row, StepPlan
from outpace.errors import BackendLost, UsageError
from outpace.models.hf_config import parse_config
from outpace.structured import StructuredOutput
from tests.server_helper import LiveServer, wait_until
from tests.tiny_folder import CONFIG, write_folder
from tests.tiny_gguf import write_model
from tests.tiny_head import write_head

FAMILIES: dict[str, dict[str, Any]] = {
    # The vocabulary is not a multiple of the ranks.
    "llama": {"vocab_size": 321},
    # With more ranks than key heads, some hold the same.
    "qwen3": {
        "architectures": ["Qwen3ForCausalLM"], "head_dim": 16, "tie_word_embeddings": False, "num_attention_heads": 8,
    },
}  # fmt: skip
SMALL: dict[str, Any] = {"backend": "torch", "device": "cpu", "threads": 1, "max_context": 96, "cache_tokens": 128}
PROMPTS = ["the cat sat", "on the mat the cat sat on the mat the", "mat mat mat mat mat"]


def runner_of(llm: LLM) -> TorchRunner:
    runner = llm._target.runner
    assert isinstance(runner, TorchRunner)
    return runner


def model_of(llm: LLM) -> LeadingModel:
    model = runner_of(llm).model
    assert isinstance(model, LeadingModel)
    return model


def pids(llm: LLM) -> list[int]:
    return [process.pid for process in model_of(llm).leader._processes]


def params(method: Any, **sampling: Any) -> SamplingParams:
    speculation = SpeculationParams(mode="off") if method == "none" else SpeculationParams(mode="on", method=method)
    if method == "grammar":
        sampling["structured"] = StructuredOutput(regex="(the cat sat on the mat )+")
    return SamplingParams(max_tokens=12, speculation=speculation, ignore_eos=True, **sampling)


def tokens(llm: LLM, wanted: SamplingParams) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in llm.generate(PROMPTS, wanted)]


def logits(llm: LLM) -> Any:
    """Of a prompt in two chunks and some single tokens, beside another sequence."""
    runner = runner_of(llm)
    text = [int(token) for token in np.random.default_rng(0).integers(4, 300, 60)]
    found = []
    for begin, end in ((0, 33), (33, 50), (50, 51), (51, 52)):
        rows = [Row(0, begin, text[begin:end], end - begin), Row(1, begin, text[begin + 5 : end + 5], 1)]
        found.append(runner.forward(StepPlan(rows)).copy())
    runner.free(0)
    runner.free(1)
    return np.concatenate(found)


class Pair:
    """The same model in one process and in several."""

    def __init__(self, folder: Path, family: str, drafting: str, num_ranks: int) -> None:
        target = folder / "target"
        target.mkdir()
        write_folder(target, **FAMILIES[family])
        self.config = parse_config(CONFIG | FAMILIES[family])
        if drafting == "head":
            draft = write_head(folder / "head.gguf", target, width=32, head_dim=FAMILIES[family].get("head_dim", 8))
        else:
            draft = folder / "draft"
            draft.mkdir()
            write_folder(draft, seed=1, **FAMILIES[family] | {"num_hidden_layers": 1})
        options = SMALL | {"draft": str(draft)}
        self.methods = ("none", "ngram", "suffix", "prediction", "grammar", drafting)
        self.whole = LLM(str(target), **options)
        self.sharded = LLM(str(target), tensor_parallel_size=num_ranks, **options)

    def check(self) -> None:
        expected = logits(self.whole)
        assert np.abs(logits(self.sharded) - expected).max() < 1e-5 * np.abs(expected).max()
        drafted = dict.fromkeys(self.methods, 0)
        greedy, filtered, unfiltered = ({"temperature": 0.0}, {"temperature": 0.9, "top_p": 0.9}, {"temperature": 1.0})
        for number, method in enumerate(self.methods):
            for sampling in (greedy, {**(unfiltered if number % 2 else filtered), "seed": 5}):
                wanted = params(method, **sampling)
                if method == "prediction":
                    answer = self.whole.generate(PROMPTS[0], params("none", **sampling))[0].outputs[0].text
                    wanted = replace(wanted, prediction=answer)
                outputs = self.sharded.generate(PROMPTS, wanted)
                assert [each.outputs[0].token_ids for each in outputs] == tokens(self.whole, wanted), (method, sampling)
                drafted[method] += sum(each.outputs[0].speculation.num_drafted for each in outputs)
        assert all(count > 0 for method, count in drafted.items() if method != "none"), drafted

    def check_gathered(self) -> None:
        """Greedy requests need two numbers per rank and token; others, also in the same batch, need the logits."""
        group = model_of(self.sharded).group
        gathered, widths = group.to_first, set[int]()

        def counted(x: Any) -> Any:
            widths.add(x.shape[1])
            return gathered(x)

        group.to_first = counted  # type: ignore[method-assign]
        greedy, seeded = params("none", temperature=0.0), params("none", temperature=0.9, seed=5)
        whole = Shard(0, group.size).num_vocab_rows(self.config)
        for wanted, expected in (
            ([greedy] * 3, 2),
            ([replace(greedy, speculation=params(self.methods[-1]).speculation)] * 3, 2),
            ([greedy, seeded, greedy], whole),
            ([greedy, greedy, replace(greedy, logprobs=1)], whole),
        ):
            widths.clear()
            found, whole_ones = (llm.generate(PROMPTS, wanted) for llm in (self.sharded, self.whole))
            assert [a.outputs[0].token_ids for a in found] == [b.outputs[0].token_ids for b in whole_ones]
            assert max(widths) == expected
        group.to_first = gathered  # type: ignore[method-assign]

    def check_preemption(self) -> None:
        """Three requests of more than 48 tokens do not fit into 128."""
        wanted = replace(params("suffix", temperature=0.8, seed=3), max_tokens=45)
        num_preempted = 0
        taken = self.sharded.engine.scheduler.take_preempted

        def counted() -> Any:
            nonlocal num_preempted
            found = taken()
            num_preempted += len(found)
            return found

        self.sharded.engine.scheduler.take_preempted = counted  # type: ignore[method-assign]
        assert tokens(self.sharded, wanted) == tokens(self.whole, wanted)
        assert num_preempted > 0

    def check_scores(self) -> None:
        """Log-probabilities of prompt and answer, and embeddings."""
        wanted = replace(params("none", temperature=0.0), max_tokens=4, logprobs=2, prompt_logprobs=1)
        for prompt in PROMPTS:
            found, expected = (llm.generate(prompt, wanted)[0] for llm in (self.sharded, self.whole))
            assert found.outputs[0].logprobs is not None and expected.outputs[0].logprobs is not None
            for mine, other in zip(found.outputs[0].logprobs, expected.outputs[0].logprobs, strict=True):
                assert mine.token_id == other.token_id and mine.logprob == pytest.approx(other.logprob, abs=1e-4)
        for one, another in zip(self.sharded.embed(PROMPTS), self.whole.embed(PROMPTS), strict=True):
            assert np.abs(one - another).max() < 1e-5

    def close(self) -> None:
        children = pids(self.sharded)
        self.whole.close()
        self.sharded.close()
        assert not any(Path(f"/proc/{pid}").exists() for pid in children)


@pytest.fixture(scope="module", params=[("llama", "draft"), ("qwen3", "head")])
def pair(request, tmp_path_factory) -> Iterator[Pair]:
    family, drafting = request.param
    pair = Pair(tmp_path_factory.mktemp("model"), family, drafting, 2)
    yield pair
    pair.close()


def test_logits_and_tokens_of_two_ranks_are_those_of_one_process(pair):
    pair.check()


def test_greedy_requests_need_no_logits_of_other_ranks(pair):
    pair.check_gathered()


def test_preempted_requests_too(pair):
    pair.check_preemption()


def test_scores_and_embeddings_too(pair):
    pair.check_scores()


@pytest.mark.slow
@pytest.mark.parametrize("num_ranks", [2, 4])
@pytest.mark.parametrize("drafting", ["draft", "head"])
@pytest.mark.parametrize("family", list(FAMILIES))
def test_the_same_for_every_family_with_two_and_four_ranks(tmp_path, family, drafting, num_ranks):
    pair = Pair(tmp_path, family, drafting, num_ranks)
    pair.check()
    pair.check_gathered()
    pair.check_preemption()
    pair.check_scores()
    pair.close()


@pytest.mark.parametrize("quantization", ["int4", pytest.param("int8", marks=pytest.mark.slow)])
def test_quantised_weights_are_those_of_one_process(tmp_path, quantization):
    """Also where a rank's columns are not whole groups of 4 bits, as those of the MLP's second matrix here."""
    changes = {"num_attention_heads": 8, "head_dim": 32, "intermediate_size": 320, "vocab_size": 321}
    options = SMALL | {"quantization": quantization}
    folder = str(write_folder(tmp_path, **changes))
    with LLM(folder, **options) as whole, LLM(folder, tensor_parallel_size=2, **options) as sharded:
        parts = [type(weight) for weight in runner_of(sharded).model.weights.tensors]
        assert parts.count(Planar if quantization == "int4" else Scaled) > parts.count(torch.Tensor) / 4
        expected = logits(whole)
        assert np.abs(logits(sharded) - expected).max() < 1e-4 * np.abs(expected).max()
        wanted = params("none", temperature=0.0)
        assert tokens(sharded, wanted) == tokens(whole, wanted)


@pytest.mark.parametrize("kind", ["Q4_K", "Q6_K", "Q8_0"])
def test_the_parts_of_a_stored_matrix_hold_its_values(tmp_path, kind):
    checkpoint = open_checkpoint(
        write_model(tmp_path / "model.gguf", kind=kind, width=256, hidden=512, num_heads=8, num_kv_heads=4)
    )
    config, cpu = checkpoint.config, torch.device("cpu")
    whole = dict(checkpoint.tensors(cpu, all_dense))
    for rank in range(2):
        shard = Shard(rank, 2)
        formats = shard.formats(checkpoint.stored, config)
        weights = load_shard(checkpoint, shard, torch.float32, cpu, checkpoint.stored)
        assert weights.num_bytes == num_shard_bytes(checkpoint, shard, torch.float32, checkpoint.stored)
        for name, place in named_tensors(weights, shard.of(config)).items():
            assert isinstance(place, Planar) == (formats(name) is not None), name
            expected = shard.part(name, whole.get(name, whole[EMBEDDING]), config)
            assert torch.equal(dense(place, torch.float32), dense(expected, torch.float32)), name


def test_a_killed_rank_ends_the_engine_within_seconds_also_while_nothing_runs(tmp_path):
    llm = LLM(str(write_folder(tmp_path)), tensor_parallel_size=2, **SMALL)
    server = LiveServer(llm.engine, llm.tokenizer, 96)
    body = {"prompt": "the cat", "max_tokens": 3, "speculation": {"mode": "off"}}
    assert server.post("/v1/completions", body)[0] == 200
    began = time.monotonic()
    os.kill(pids(llm)[0], signal.SIGKILL)
    wait_until(lambda: not server._thread.is_alive(), 10)
    assert time.monotonic() - began < 5
    sentence = "rank 1 of 2 of the model was killed by signal 9, so nothing can be computed any more; restart"
    assert server.async_engine.failure == sentence
    with pytest.raises(BackendLost, match=sentence):
        runner_of(llm).forward(StepPlan([Row(0, 0, [5], 1)]))
    llm.close()


def test_a_rank_killed_during_a_step_ends_the_request_with_the_same_sentence(tmp_path):
    llm = LLM(str(write_folder(tmp_path)), tensor_parallel_size=2, **SMALL)
    stream = iter(llm.stream("the cat sat", replace(params("none"), max_tokens=60)))
    next(stream)
    os.kill(pids(llm)[0], signal.SIGSTOP)  # the next step waits for this rank
    os.kill(pids(llm)[0], signal.SIGKILL)
    began = time.monotonic()
    with pytest.raises(BackendLost, match="rank 1 of 2 of the model was killed by signal 9"):
        for _ in stream:
            pass
    assert time.monotonic() - began < 5
    llm.close()


def test_a_model_that_cannot_be_split_evenly_says_what_is_possible():
    config = parse_config(CONFIG)
    with pytest.raises(UsageError, match="3 ranks cannot share evenly; set tensor_parallel_size to one of 1, 2, 4"):
        Shard(0, 3).check(config)


@pytest.mark.parametrize(("vocab_size", "num_ranks"), [(8, 2), (9, 2), (9, 4), (5, 4)])
def test_of_equal_logits_the_first_token_wins_also_across_ranks(vocab_size, num_ranks):
    """For every choice of the tokens that share the largest logit."""
    choices = torch.arange(1, 2**vocab_size)[:, None] >> torch.arange(vocab_size)[None, :] & 1
    logits, rows = choices.float() - 2.0, -(-vocab_size // num_ranks)  # padding would be larger than any of them
    parts = [peak(logits[:, rank * rows : (rank + 1) * rows], rank * rows) for rank in range(num_ranks)]
    assert torch.equal(tokens_of(combined(parts)), logits.argmax(dim=1))


def test_the_parts_of_all_ranks_are_the_whole():
    config = parse_config(CONFIG)
    shards = [Shard(rank, 2) for rank in range(2)]
    head = torch.arange(5.0)[:, None]
    assert torch.equal(
        torch.cat([plain_tensor(shard.part("lm_head.weight", head, config)) for shard in shards])[:5], head
    )
    for name, shape, dim in (
        ("model.layers.0.self_attn.q_proj.weight", (32, 32), 0),
        ("model.layers.0.self_attn.k_proj.bias", (16,), 0),
        ("model.layers.0.self_attn.o_proj.weight", (32, 32), 1),
        ("model.layers.0.mlp.up_proj.weight", (48, 32), 0),
        ("model.layers.0.mlp.down_proj.weight", (32, 48), 1),
    ):
        tensor = torch.randn(shape)
        parts = [plain_tensor(shard.part(name, tensor, config)) for shard in shards]
        assert torch.equal(torch.cat(parts, dim), tensor), name
    norm = torch.randn(32)
    assert all(shard.part("model.norm.weight", norm, config) is norm for shard in shards)
