"""The native backend: compared with numpy, and bit-exact for every split of tokens into steps."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from outpace import LLM, SamplingParams, SpeculationParams
from outpace.backends.base import Capacity
from outpace.backends.llamacpp.runner import LlamaModel
from outpace.backends.native.build import BuildError, find_compiler, run_tests
from outpace.backends.native.library import load_library
from outpace.backends.native.model_file import ModelFile
from outpace.backends.native.runner import NativeModel, NativeRunner, pages_needed
from outpace.core import CompletionOutput, Row, StepPlan
from outpace.errors import BackendError, ModelError
from outpace.models.gguf_model import Unsupported
from outpace.models.llama_library import load_library as load_llama
from outpace.models.resolve import resolve_model
from tests.numpy_reference import Floats, ReferenceModel, mean_kl
from tests.tiny_gguf import FAMILIES, TYPES, VOCAB_SIZE, write_model

try:
    load_library()
except BackendError as error:
    pytest.skip(str(error), allow_module_level=True)

CAPACITY = Capacity(max_sequences=8, cache_tokens=1024, max_context=512, max_step_tokens=256)
EXTRA_MODELS = "OUTPACE_TEST_MODELS"  # further GGUF files to check, separated by colons


def start(path: Path, *, threads: int = 2, capacity: Capacity = CAPACITY) -> NativeRunner:
    runner = NativeModel(path, load_llama()).start(capacity, threads).runner
    assert isinstance(runner, NativeRunner)
    return runner


def step(runner: NativeRunner, seq: int, start: int, tokens: list[int]) -> Floats:
    """A copy of all logits of one row."""
    return runner.forward(StepPlan([Row(seq, start, tokens, len(tokens))])).copy()


def with_llama(path: Path, tokens: list[int]) -> Floats:
    runner = LlamaModel(path, load_llama()).start(CAPACITY, 1).runner  # its threads wait by spinning
    logits = runner.forward(StepPlan([Row(0, 0, tokens, len(tokens))])).copy()
    runner.close()
    return logits


def in_chunks(runner: NativeRunner, seq: int, tokens: list[int], sizes: list[int]) -> Floats:
    logits, at = [], 0
    for size in sizes:
        if at < len(tokens):
            logits.append(step(runner, seq, at, tokens[at : at + size]))
            at += size
    return np.concatenate(logits)


def random_tokens(n: int, seed: int = 0, vocab_size: int = VOCAB_SIZE) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(vocab_size) for _ in range(n)]


def identical(a: Floats, b: Floats) -> bool:
    return a.shape == b.shape and a.tobytes() == b.tobytes()


# The C++ tests: every kernel against plain loops, on random shapes.


@pytest.mark.slow
def test_every_kernel_equals_its_scalar_reference():
    try:
        find_compiler()
    except BuildError as error:
        pytest.skip(str(error))
    assert run_tests(sanitize=False) == 0


# Accuracy, compared with float32 on the dequantised weights.


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("kind", TYPES)
def test_logits_are_those_of_the_numpy_reference(tmp_path, family, kind):
    path = write_model(tmp_path / "tiny.gguf", family, kind, tied=kind != "Q8_0")
    tokens = random_tokens(70)
    expected = ReferenceModel.load(path).logits(tokens)
    runner = start(path)
    found = step(runner, 0, 0, tokens)
    runner.close()
    if kind in ("F32", "F16", "BF16"):  # only the cache is rounded, to halves
        np.testing.assert_allclose(found, expected, atol=0.02 * expected.std())
        assert mean_kl(expected, found) < 2e-5
    else:  # activations are rounded to 8 bits, as llama.cpp rounds them
        assert mean_kl(expected, found) < 1.5 * mean_kl(expected, with_llama(path, tokens)) + 1e-4


@pytest.mark.parametrize(
    "options",
    [
        {"rope_factors": True},
        {"metadata": {"rope.scaling.type": "linear", "rope.scaling.factor": 4.0}},
        {"head_dim": 32},
        {"head_dim": 8, "metadata": {}},
        {"num_heads": 2, "num_kv_heads": 2, "width": 128, "head_dim": 128},
        {"num_heads": 8, "num_kv_heads": 1},
        {"hidden": 104},
        {"tied": False},
    ],
    ids=str,
)
@pytest.mark.parametrize("family", FAMILIES)
def test_shapes_and_rope_variants_match_the_reference(tmp_path, family, options):
    path = write_model(tmp_path / "tiny.gguf", family, "F32", **options)
    tokens = random_tokens(40)
    runner = start(path)
    assert mean_kl(ReferenceModel.load(path).logits(tokens), step(runner, 0, 0, tokens)) < 1e-5
    runner.close()


@pytest.mark.parametrize("family", FAMILIES)
def test_yarn_agrees_with_llamacpp(tmp_path, family):
    metadata = {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0, "rope.scaling.original_context_length": 128}
    path = write_model(tmp_path / "tiny.gguf", family, "F32", width=256, metadata=metadata)
    tokens = random_tokens(200)
    runner = start(path)
    assert mean_kl(with_llama(path, tokens), step(runner, 0, 0, tokens)) < 1e-4
    runner.close()


# Bit-exactness.


@pytest.fixture(scope="module", params=["tiny Q4_K qwen3", pytest.param("SmolLM2", marks=pytest.mark.model)])
def model_path(request, tmp_path_factory) -> Path:
    if request.param == "SmolLM2":
        return resolve_model(None)
    return write_model(tmp_path_factory.mktemp("model") / "tiny.gguf", "qwen3", "Q4_K")


@pytest.fixture(scope="module")
def runner(model_path) -> Iterator[NativeRunner]:
    runner = start(model_path)
    yield runner
    runner.close()


@pytest.fixture(scope="module")
def text(runner) -> list[int]:
    return random_tokens(150, vocab_size=min(runner.vocab_size, 20000))


@pytest.fixture(scope="module")
def alone(runner, text) -> Floats:
    """The expected logits: every token decoded alone."""
    logits = in_chunks(runner, 0, text, [1] * len(text))
    runner.free(0)
    return logits


@pytest.mark.parametrize("size", [2, 3, 4, 5, 7, 8, 9, 13, 16, 17, 31, 32, 33, 64, 150])
def test_prefill_in_chunks_of_any_size_gives_the_same_bits(runner, text, alone, size):
    chunked = in_chunks(runner, 1, text, [size] * len(text))
    runner.free(1)
    assert identical(chunked, alone)


def test_drafts_of_any_depth_rewound_give_the_same_bits(runner, text, alone):
    rng = random.Random(1)
    at = 0
    while at < len(text):
        depth = min(rng.randrange(17), len(text) - at - 1)
        kept = rng.randrange(depth + 1) + 1
        wrong = random_tokens(depth + 1 - kept, seed=at)
        found = step(runner, 2, at, text[at : at + kept] + wrong)
        assert identical(found[:kept], alone[at : at + kept])
        runner.truncate(2, at + kept)
        at += kept
    runner.free(2)


def test_sharing_a_step_with_others_gives_the_same_bits(runner, text, alone):
    rng = random.Random(2)
    lengths = [0] * 6
    for _ in range(30):
        rows, spans = [], []
        for seq in rng.sample(range(6), rng.randrange(1, 7)):
            count = min(rng.choice([1, 1, 2, 5, 20]), len(text) - lengths[seq])
            if count:
                num_logits = rng.randrange(count + 1)
                rows.append(Row(seq, lengths[seq], text[lengths[seq] : lengths[seq] + count], num_logits))
                lengths[seq] += count
                spans += list(range(lengths[seq] - num_logits, lengths[seq]))
        if rows:
            assert identical(runner.forward(StepPlan(rows)), alone[spans])
    for seq in range(6):
        runner.free(seq)
    runner.pool.check_integrity()


@pytest.mark.parametrize("at", [1, 31, 32, 33, 40, 64, 100])
def test_a_fork_gives_the_same_bits_and_leaves_its_source_alone(runner, text, alone, at):
    step(runner, 0, 0, text[:110])
    runner.fork(0, 1, at)
    other = random_tokens(30, seed=9)
    step(runner, 1, at, other)  # writes into a copy of the shared page
    runner.truncate(1, at)
    assert identical(step(runner, 1, at, text[at:]), alone[at:])
    assert identical(step(runner, 0, 110, text[110:]), alone[110:])
    runner.free(0)
    runner.free(1)
    runner.pool.check_integrity()
    assert runner.pool.num_free_blocks == runner.pool.num_blocks


@pytest.mark.parametrize("threads", [1, 3])
def test_the_number_of_threads_does_not_change_a_bit(model_path, text, alone, threads):
    other = start(model_path, threads=threads)
    assert identical(in_chunks(other, 0, text[:60], [1, 2, 4, 30, 1, 22]), alone[:60])
    other.close()


def test_the_pool_honours_the_engines_books_at_their_tightest(model_path):
    """Fork every sequence in the middle of a page and fill it to the last token that the engine allows."""
    capacity = Capacity(max_sequences=8, cache_tokens=256, max_context=256, max_step_tokens=256)
    runner = start(model_path, capacity=capacity)
    assert runner.pool.num_blocks == pages_needed(capacity, 32)
    tokens = random_tokens(200)
    step(runner, 0, 0, tokens[:40])
    for seq in range(1, 8):
        runner.fork(0, seq, 33)
    for seq in range(1, 8):  # 40 shared, and up to 30 more for each of 7: 250 of 256
        step(runner, seq, 33, tokens[:30])
    runner.pool.check_integrity()
    runner.close()


# Through the engine.


PROMPTS = (
    "Repeat this line three times: the quick brown fox jumps over the lazy dog.",
    "def add(a, b):\n    return a + b\n\ndef add(a, b):\n    return",
    "List the days of the week, then list them again.",
)


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    """The model drafts for itself, where a request asks for it."""
    with LLM(draft=str(resolve_model(None)), backend="native", speculation="on", prefix_reuse=False, threads=1) as made:
        assert made.config.backend == "native"
        yield made


@pytest.mark.model
@pytest.mark.parametrize("params", [{"temperature": 0.0}, {"temperature": 0.8, "top_p": 0.95, "seed": 7}], ids=str)
def test_speculation_changes_nothing_with_any_proposer(llm, params):
    def outputs(**options: Any) -> list[CompletionOutput]:
        sampling = SamplingParams(max_tokens=48, speculation=SpeculationParams(**options), **params)
        return [output.outputs[0] for output in llm.generate(list(PROMPTS), sampling, progress=False)]

    plain = outputs(mode="off")
    for method in ("ngram", "suffix", "draft"):
        for depth in (2, 7):
            found = outputs(mode="on", method=method, max_depth=depth)
            assert [each.token_ids for each in found] == [each.token_ids for each in plain], (method, depth)
            assert sum(each.speculation.num_accepted for each in found) > 0, (
                "nothing was accepted, so nothing was tested"
            )


@pytest.mark.model
@pytest.mark.parametrize("params", [{"temperature": 0.0}, {"temperature": 0.8, "top_p": 0.95, "seed": 7}], ids=str)
def test_a_prediction_changes_no_token(params):
    """Right, with edits, of another text, or cut: with speculation on, auto and off."""
    sampling, prompt = SamplingParams(max_tokens=64, **params), PROMPTS[0]
    with LLM(backend="native", threads=1) as llm:
        plain = llm.generate(prompt, replace(sampling, speculation=SpeculationParams(mode="off")))[0].outputs[0]
        text = plain.text
        edited = text[:40] + " and so on" + text[60:]
        for predicted in (text, edited, text[30:], "Lorem ipsum dolor sit amet. " * 20):
            for mode, method in (("on", "prediction"), ("auto", None), ("off", None)):
                how = SpeculationParams(mode=mode, method=method)  # type: ignore[arg-type]
                asked = replace(sampling, prediction=predicted, speculation=how)
                found = llm.generate(prompt, asked)[0].outputs[0]
                assert found.token_ids == plain.token_ids, (predicted, mode)
                if predicted is text and mode == "on":
                    assert found.speculation.rejected_prediction_tokens == 0 and found.speculation.steps <= 16


@pytest.mark.model
def test_it_agrees_with_llamacpp_about_the_next_token():
    path = resolve_model(None)
    tokens = NativeModel(path, load_llama()).tokenizer.encode(
        "Speculative decoding drafts several tokens with a small model and verifies them all at once with a large one. "
        "Because reading the weights costs more than computing with them, verifying four tokens takes hardly longer "
        "than verifying one, and every accepted token is a step saved. The bicycle, invented in the nineteenth "
        "century, changed how people moved through cities: it was cheap, quick, and needed neither hay nor coal."
    )
    expected = with_llama(path, tokens)
    runner = start(path)
    found = step(runner, 0, 0, tokens)
    assert mean_kl(expected, found) < 5e-3
    # Where they disagree, the two tokens are nearly equal: 8-bit activations amplify the last bit of every sum.
    rows = np.flatnonzero(expected.argmax(-1) != found.argmax(-1))
    gaps = found[rows].max(-1) - found[rows, expected[rows].argmax(-1)]
    assert len(rows) < 0.12 * len(tokens) and (gaps < 0.15).all()
    runner.close()


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in os.environ.get(EXTRA_MODELS, "").split(":") if name] or [None])
def test_further_models_agree_with_llamacpp_and_to_the_bit(name):
    if name is None:
        pytest.skip(f"{EXTRA_MODELS} names no files")
    tokens = NativeModel(Path(name), load_llama()).tokenizer.encode(
        "def fibonacci(n):\n    if n < 2:\n        return n\n    return fibonacci(n - 1) + "
    )
    expected = with_llama(Path(name), tokens)
    ours = start(Path(name))
    found = in_chunks(ours, 0, tokens, [1] * len(tokens))
    assert identical(in_chunks(ours, 1, tokens, [5, 1, 9, 2, 100]), found)
    # Without the first token: in some models its activations are too large for 8 bits.
    assert mean_kl(expected[1:], found[1:]) < 1e-2
    assert (expected[1:].argmax(-1) == found[1:].argmax(-1)).mean() > 0.9
    ours.close()


# Errors and their messages.


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"family": "gemma"}, "architecture is 'gemma'"),
        ({"metadata": {"expert_count": 8}}, "a mixture of experts"),
        ({"metadata": {"attention.sliding_window": 128}}, "sliding window"),
        ({"metadata": {"rope.scaling.type": "longrope", "rope.scaling.factor": 2.0}}, "RoPE scaling, 'longrope'"),
        ({"metadata": {"rope.scaling.type": "linear", "rope.scaling.factor": -1.0}}, "factor of -1"),
        ({"change": {"blk.1.ffn_up.weight": None}}, "no tensor blk.1.ffn_up.weight"),
        ({"change": {"blk.0.ffn_up.bias": np.zeros(96, np.float32)}}, "unknown tensor 'blk.0.ffn_up.bias'"),
        ({"change": {"blk.0.attn_k.weight": np.zeros((24, 64), np.float32)}}, "where [64, 32] is expected"),
        ({"change": {"blk.0.attn_k.weight": np.zeros((32, 64), np.int8)}}, "which has no kernel"),
        ({"change": {"output_norm.weight": np.zeros(64, np.int32)}}, "but floats are expected"),
        ({"change": {"blk.7.ffn_norm.weight": np.zeros(64, np.float32)}}, "unknown tensor 'blk.7.ffn_norm.weight'"),
        ({"num_heads": 4, "num_kv_heads": 3}, "do not divide evenly"),
        ({"head_dim": 12}, "do not divide evenly"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_model_it_cannot_run_is_refused_with_the_reason(tmp_path, options, sentence):
    path = write_model(tmp_path / "tiny.gguf", **options)
    with pytest.raises(Unsupported) as caught:
        ModelFile(path, load_library())
    assert sentence in str(caught.value)


def test_an_explicit_native_that_cannot_be_is_an_error_and_auto_falls_back(tmp_path, caplog):
    path = write_model(tmp_path / "tiny.gguf", metadata={"attention.sliding_window": 128})
    with pytest.raises(ModelError, match=r"the native backend cannot run .* it has attention over a sliding window"):
        LLM(str(path), backend="native")
    with caplog.at_level("INFO", "outpace.backends"), LLM(str(path), speculation="off") as llm:
        assert llm.config.backend == "llamacpp"
    assert "sliding window" in caplog.text


def test_auto_takes_the_native_backend_where_it_can(tmp_path):
    with LLM(str(write_model(tmp_path / "tiny.gguf")), speculation="off") as llm:
        assert llm.config.backend == "native"
        assert llm.engine._runner.capabilities.exact_to_the_bit


def test_a_truncated_file_is_a_sentence(tmp_path):
    path = write_model(tmp_path / "tiny.gguf")
    path.write_bytes(path.read_bytes()[:-5000])
    with pytest.raises(ModelError, match="truncated"):
        NativeModel(path, load_llama())


@pytest.mark.model
def test_loading_takes_little_more_memory_than_the_packed_weights():
    script = """
import sys
from pathlib import Path
from resource import RUSAGE_SELF, getrusage
from outpace.backends.native.library import load_library
from outpace.backends.native.model_file import ModelFile
file = ModelFile(Path(sys.argv[1]), load_library())
before = getrusage(RUSAGE_SELF).ru_maxrss
file.load(2)
unit = 1 if sys.platform == "darwin" else 1024
print((getrusage(RUSAGE_SELF).ru_maxrss - before) * unit / file.packed_bytes)
"""
    done = subprocess.run(
        [sys.executable, "-c", script, str(resolve_model(None))], capture_output=True, text=True, check=True
    )
    assert float(done.stdout) < 1.3


def test_too_little_memory_is_a_sentence(tmp_path, monkeypatch):
    monkeypatch.setattr("outpace.backends.native.runner.available_bytes", lambda: 1000)
    with pytest.raises(BackendError, match=r"of memory are available; set a smaller cache_tokens"):
        start(write_model(tmp_path / "tiny.gguf"))


def test_wrong_tokens_and_positions_are_errors_not_crashes(runner):
    with pytest.raises(BackendError, match="not in the vocabulary"):
        step(runner, 7, 0, [runner.vocab_size])
    runner.free(7)
    with pytest.raises(BackendError, match="not in the vocabulary"):
        step(runner, 7, 0, [-1])
    with pytest.raises(BackendError, match="a row starts at 5"):
        step(runner, 7, 5, [1])
    runner.free(7)
    runner.pool.check_integrity()


def test_headers_with_random_damage_never_crash(tmp_path):
    """A file with a few changed header bytes either loads or gives an error message."""
    whole = write_model(tmp_path / "tiny.gguf").read_bytes()
    rng = random.Random(5)
    metadata_end, tensors_begin = whole.index(b"tokenizer.ggml.model"), whole.index(b"token_embd.weight")
    tensors_end = whole.rindex(b"output_norm.weight") + 60
    outcomes: dict[str, int] = {"loaded": 0, "unsupported": 0, "damaged": 0}
    for _ in range(400):
        damaged = bytearray(whole)
        for _ in range(rng.randrange(1, 4)):
            low, high = rng.choice([(24, metadata_end), (tensors_begin, tensors_end)])
            damaged[rng.randrange(low, high)] = rng.randrange(256)
        path = tmp_path / "damaged.gguf"
        path.write_bytes(damaged)
        library = load_library()
        try:
            library.destroy(ModelFile(path, library).load(1))
            outcomes["loaded"] += 1
        except Unsupported:
            outcomes["unsupported"] += 1
        except (ModelError, BackendError):
            outcomes["damaged"] += 1
    assert min(outcomes.values()) > 10, outcomes
