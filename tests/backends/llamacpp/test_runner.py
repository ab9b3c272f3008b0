"""The llama.cpp backend with the embedded model: its errors, and that its cache gives the same logits as a fresh one.

All tests use one thread: llama.cpp's threads wait for each other by spinning, which takes minutes on busy cores.
"""

from __future__ import annotations

import logging
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from benchmarks.gguf_edit import edited_copy, other_vocabulary
from outpace import LLM, SamplingParams
from outpace.backends import load
from outpace.backends.base import LoadedModel
from outpace.config import EngineConfig, SpeculationParams
from outpace.core import Row, StepPlan
from outpace.errors import BackendError, ModelError, UsageError
from outpace.models import llama_library as llama
from outpace.models.llama_library import ContextParams, Library, ModelParams, check_layout, load_library
from outpace.models.resolve import resolve_model

pytestmark = pytest.mark.model

CACHE_TOKENS = 512
TEXT = (
    "The quick brown fox jumps over the lazy dog. In 1492 Columbus sailed the ocean blue, and then he came back to "
    "Spain with many strange stories to tell."
)


def one_sentence(error: BaseException) -> str:
    sentence = str(error)
    assert "\n" not in sentence and "Traceback" not in sentence and len(sentence) > 40
    return sentence


# ---- the library


def test_the_installed_library_is_loaded_once():
    library = load_library()
    assert load_library() is library
    assert library.path.is_file()


@pytest.mark.parametrize("how", ["argument", "environment"])
def test_a_library_that_is_not_there_is_refused(monkeypatch, tmp_path, how):
    path = str(tmp_path / "libllama.so")
    monkeypatch.setenv(llama.LIBRARY_VARIABLE, path)
    with pytest.raises(BackendError) as caught:
        load_library(path if how == "argument" else None)
    sentence = one_sentence(caught.value)
    assert sentence.startswith(f"there is no llama.cpp library at {path}; use the one in {llama.PINNED}")
    assert llama.LIBRARY_VARIABLE in sentence


def test_a_file_that_is_no_library_is_refused(tmp_path):
    junk = tmp_path / "libllama.so"
    junk.write_bytes(b"this is not a shared library\n" * 40)
    with pytest.raises(BackendError) as caught:
        load_library(str(junk))
    assert f"the llama.cpp library {junk} cannot be loaded (" in one_sentence(caught.value)
    assert llama.PINNED in str(caught.value)


def test_a_library_without_our_functions_is_refused_with_the_first_that_is_missing():
    import _ctypes

    other = Path(_ctypes.__file__)  # a real shared library that is not llama.cpp
    if other.suffix not in (".so", ".dylib", ".pyd"):
        pytest.skip("ctypes is built into this interpreter")
    with pytest.raises(BackendError) as caught:
        Library(other)
    first = next(iter(llama._SIGNATURES))
    assert f"the llama.cpp library {other} has no function {first}; " in one_sentence(caught.value)


def shifted(params: Any, num_bytes: int) -> Any:
    """The same bytes in another build's layout: with an extra field of num_bytes at the beginning."""
    data = bytes(num_bytes) + bytes(params)
    return type(params).from_buffer_copy(data[: len(bytes(params))])


def defaults(**changed: Any) -> SimpleNamespace:
    library = load_library()
    model = changed.get("model", library.llama_model_default_params())
    context = changed.get("context", library.llama_context_default_params())
    return SimpleNamespace(llama_model_default_params=lambda: model, llama_context_default_params=lambda: context)


def test_the_layout_this_was_written_for_is_accepted():
    check_layout(defaults(), Path("lib.so"))


@pytest.mark.parametrize("num_bytes", [4, 8, 16])
@pytest.mark.parametrize("which", ["model", "context"])
def test_a_layout_shifted_by_a_field_is_refused_and_the_field_named(which, num_bytes):
    library = load_library()
    params: ModelParams | ContextParams
    params = library.llama_model_default_params() if which == "model" else library.llama_context_default_params()
    with pytest.raises(BackendError) as caught:
        check_layout(defaults(**{which: shifted(params, num_bytes)}), Path("lib.so"))
    sentence = one_sentence(caught.value)
    assert "the llama.cpp library lib.so has another binary interface than Outpace was written for" in sentence
    assert f"(llama_{which}_params." in sentence and " instead of " in sentence and llama.PINNED in sentence


@pytest.mark.parametrize(
    ("field", "value"), [("n_batch", 1024), ("flash_attn_type", 0), ("kv_unified", True), ("yarn_ext_factor", 0.0)]
)
def test_one_unexpected_default_is_enough_to_refuse(field, value):
    params = load_library().llama_context_default_params()
    setattr(params, field, value)
    with pytest.raises(BackendError, match=f"llama_context_params.{field} reads {value!r} instead of "):
        check_layout(defaults(context=params), Path("lib.so"))


# ---- the runner


@pytest.fixture(scope="module")
def model_path() -> Path:
    return resolve_model(None)


@pytest.fixture(scope="module")
def loaded(model_path) -> Iterator[LoadedModel]:
    config = EngineConfig(
        backend="llamacpp",
        max_context=256,
        cache_tokens=CACHE_TOKENS,
        max_step_tokens=128,
        max_sequences=4,
        threads=1,
        speculation="off",
    )
    target = load(config, model_path, None).target
    yield target
    target.runner.close()


@pytest.fixture
def runner(loaded):
    yield loaded.runner
    for seq in range(loaded.runner.capacity.max_sequences):
        loaded.runner.free(seq)


@pytest.fixture(scope="module")
def tokens(loaded) -> list[int]:
    return list(loaded.tokenizer.encode(TEXT))


def feed(runner: Any, tokens: Sequence[int], sizes: Sequence[int], *, seq: int = 0, start: int = 0) -> NDArray[Any]:
    """Logits of every token, fed in chunks of these sizes."""
    answers, at = [], start
    for size in sizes:
        answers.append(runner.forward(StepPlan([Row(seq, at, tokens[at : at + size], size)])).copy())
        at += size
    return np.concatenate(answers)


def logprobs(logits: NDArray[Any]) -> NDArray[np.float64]:
    x = logits.astype(np.float64)
    x -= x.max(axis=-1, keepdims=True)
    return np.asarray(x - np.log(np.exp(x).sum(axis=-1, keepdims=True)))


def largest_shift(a: NDArray[Any], b: NDArray[Any]) -> float:
    """The largest difference of the log-probability of a row's likeliest token, over all rows."""
    best = a.argmax(axis=-1)
    rows = np.arange(len(a))
    return float(np.abs(logprobs(a)[rows, best] - logprobs(b)[rows, best]).max())


# Measured on x86 with AVX2: exactly 0 in a context this short, for every grouping below. Other processors' kernels add
# in another order for one row than for several, which 8-bit activations turn into a few hundredths. A wrong token or
# position in the cache shifts it by more than 1 (the control below), so the limit is well between.
ROUNDING = 0.2


def assert_same_answers(a: NDArray[Any], b: NDArray[Any]) -> None:
    assert largest_shift(a, b) < ROUNDING
    top_two = np.sort(logprobs(a), axis=-1)[:, -2:]
    clear = top_two[:, 1] - top_two[:, 0] > ROUNDING
    assert clear.sum() > len(a) / 2
    assert (a.argmax(axis=-1) == b.argmax(axis=-1))[clear].all()


@pytest.fixture(scope="module")
def whole(loaded, tokens) -> NDArray[Any]:
    answers = feed(loaded.runner, tokens, [len(tokens)])
    loaded.runner.free(0)
    return answers


def test_a_wrong_token_in_the_cache_would_be_seen(runner, tokens, whole):
    wrong = [*tokens[:5], tokens[5] + 1, *tokens[6:]]
    assert largest_shift(whole[6:], feed(runner, wrong, [len(tokens)])[6:]) > 1.0


@pytest.mark.parametrize("size", [1, 2, 5, 20])
def test_chunks_give_the_answers_of_one_pass(runner, tokens, whole, size):
    sizes = [size] * (len(tokens) // size)
    assert_same_answers(whole[: sum(sizes)], feed(runner, tokens, sizes))


def test_only_the_logits_asked_for_come_back_and_they_cannot_be_written(runner, tokens, whole):
    assert runner.forward(StepPlan([Row(0, 0, tokens[:10], 0)])).shape == (0, runner.vocab_size)
    answers = runner.forward(StepPlan([Row(0, 10, tokens[10:20], 3)]))
    assert answers.shape == (3, runner.vocab_size) and answers.dtype == np.float32
    assert_same_answers(whole[17:20], answers)
    with pytest.raises(ValueError, match="read-only"):
        answers[0, 0] = 1.0


def test_after_truncate_the_rest_is_as_if_it_had_never_been(runner, tokens, whole):
    feed(runner, [*tokens[:20], *([7] * 30)], [50])
    runner.truncate(0, 20)
    assert_same_answers(whole[20:28], feed(runner, tokens, [3, 5], start=20))


def test_a_fork_goes_on_from_where_it_was_taken_and_leaves_the_source_alone(runner, tokens, whole):
    feed(runner, tokens, [30])
    runner.fork(0, 3, 20)
    feed(runner, [*tokens[:20], 7, 7, 7], [3], seq=3, start=20)  # the fork continues with other tokens
    runner.truncate(3, 20)
    assert_same_answers(whole[20:25], feed(runner, tokens, [5], seq=3, start=20))
    assert_same_answers(whole[30:34], feed(runner, tokens, [4], start=30))
    runner.free(0)
    assert_same_answers(whole[25:28], feed(runner, tokens, [3], seq=3, start=25))


def test_rows_of_different_lengths_share_a_pass_and_come_back_in_order(runner, tokens, whole):
    feed(runner, tokens, [10])
    feed(runner, tokens, [20], seq=1)
    rows = [Row(0, 10, tokens[10:13], 3), Row(2, 0, tokens[:8], 2), Row(1, 20, tokens[20:21], 1)]
    answers = runner.forward(StepPlan(rows)).copy()
    assert_same_answers(np.concatenate([whole[10:13], whole[6:8], whole[20:21]]), answers)


def test_a_freed_sequence_begins_anew(runner, tokens, whole):
    feed(runner, tokens[5:], [10])
    runner.free(0)
    assert_same_answers(whole[:10], feed(runner, tokens, [10]))


def test_more_tokens_than_the_cache_holds_is_an_error_and_not_a_crash(runner, tokens, whole):
    with pytest.raises(BackendError, match=r"llama\.cpp failed on a step of 128 tokens in 1 sequences"):
        for i in range(CACHE_TOKENS // 128 + 1):
            runner.forward(StepPlan([Row(1, 128 * i, [5] * 128, 1)]))
    runner.free(1)
    assert_same_answers(whole[:10], feed(runner, tokens, [10]))


# ---- the tokenizer


@pytest.mark.parametrize(
    "text",
    [
        "plain words, and  spaces\n\n\ttabs",
        "naïve café — “quotes” …",
        "数学很有趣。日本語も。",
        "😀👩‍👩‍👧‍👦🇩🇪",
        "עברית العربية हिन्दी",
        "\u0000 a NUL, a \u200b zero width space, \ufffd, \U0010ffff",
        "a" * 1000,
    ],
    ids=["plain", "accents", "cjk", "emoji", "scripts", "odd", "long"],
)
def test_text_survives_the_way_through_tokens(loaded, text):
    tokenizer = loaded.tokenizer
    ids = tokenizer.encode(text)
    assert b"".join(tokenizer.token_bytes(token) for token in ids).decode() == text
    assert all(0 <= token < tokenizer.vocab_size for token in ids)


def test_a_lone_surrogate_is_refused_in_a_sentence(loaded):
    with pytest.raises(UsageError, match=r"not valid Unicode text .*; remove lone surrogates"):
        loaded.tokenizer.encode("a\ud800b")


def test_generation_can_end(loaded):
    tokenizer = loaded.tokenizer
    assert tokenizer.end_ids and all(0 <= token < tokenizer.vocab_size for token in tokenizer.end_ids)
    assert tokenizer.encode(tokenizer.eos_text)[-1] in tokenizer.end_ids
    assert all(tokenizer.token_bytes(token) == b"" for token in tokenizer.end_ids)


def test_control_tokens_in_a_text_are_read_only_where_asked(loaded):
    tokenizer = loaded.tokenizer
    [read] = tokenizer.encode("<|im_end|>")
    spelled = tokenizer.encode("<|im_end|>", parse_special=False)
    assert read in tokenizer.end_ids
    assert len(spelled) > 1 and b"".join(map(tokenizer.token_bytes, spelled)) == b"<|im_end|>"


def test_the_vocabulary_is_whole(loaded):
    vocabulary = loaded.tokenizer.vocabulary()
    assert len(vocabulary) == loaded.tokenizer.vocab_size == loaded.runner.vocab_size == 49152
    assert vocabulary[loaded.tokenizer.encode("<|im_end|>")[0]][0] == b"<|im_end|>"


def test_the_model_describes_itself(loaded):
    assert loaded.description.startswith("llama ") and loaded.description.endswith("Q4_1")
    assert 130e6 < loaded.num_parameters < 170e6
    assert loaded.size_bytes > 50e6
    assert loaded.runner.capabilities.can_rewind


# ---- whole generations

PROMPTS = [
    "Repeat this list twice: red, green, blue.",
    "Count from 1 to 12, separated by commas.",
    "Name three animals.",
]
MAX_TOKENS = 32


@pytest.fixture(scope="module")
def llm(model_path) -> Iterator[LLM]:
    options: dict[str, Any] = {
        "backend": "llamacpp",
        "max_context": 256,
        "cache_tokens": CACHE_TOKENS,
        "max_step_tokens": 128,
        "threads": 1,
    }
    with LLM(draft=str(model_path), speculation="on", depth=4, prefix_reuse=False, **options) as made:
        yield made


def answers(llm: LLM, speculation: SpeculationParams, **sampling: Any) -> list[Any]:
    """Each prompt alone: in a batch, the shared passes would be part of the comparison."""
    params = SamplingParams(max_tokens=MAX_TOKENS, speculation=speculation, **sampling)
    return [llm.chat([{"role": "user", "content": p}], params)[0].outputs[0] for p in PROMPTS]


@pytest.mark.parametrize("sampling", [{"temperature": 0.0}, {"temperature": 0.8, "seed": 7}], ids=["greedy", "seeded"])
def test_every_proposer_says_what_plain_decoding_says(llm, sampling):
    """In a context this short, llama.cpp rounds the same for any number of rows in a pass, so equality is exact."""
    plain = answers(llm, SpeculationParams(mode="off"), **sampling)
    assert [a.speculation.num_drafted for a in plain] == [0, 0, 0]
    for method in ("ngram", "suffix", "draft"):
        drafted = answers(llm, SpeculationParams(method=method), **sampling)
        assert [a.token_ids for a in drafted] == [a.token_ids for a in plain], method
        assert [a.text for a in drafted] == [a.text for a in plain]
        assert sum(a.speculation.num_drafted for a in drafted) > 0, f"{method} drafted nothing: the test shows little"
        if method == "draft":  # the target drafts for itself with the same noise: nearly all tokens are accepted
            accepted = sum(a.speculation.num_accepted for a in drafted)
            assert accepted / sum(a.speculation.num_drafted for a in drafted) > 0.9


def test_the_chat_template_is_the_models_own(llm):
    text = llm.render_chat([{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}])
    assert text == "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"


def test_a_conversation_is_answered_and_ends_by_itself(llm):
    params = SamplingParams(temperature=0.0, max_tokens=80)
    [output] = llm.chat([{"role": "user", "content": "What is the capital of France? One word."}], params)
    [completion] = output.outputs
    assert "Paris" in completion.text
    assert completion.finish_reason == "stop" and completion.token_ids[-1] in llm.tokenizer.end_ids
    assert "<|im_end|>" not in completion.text


# ---- model files that cannot be used

SMALL: dict[str, Any] = {
    "backend": "llamacpp",
    "max_context": 128,
    "cache_tokens": 128,
    "threads": 1,
    "speculation": "off",
}


@pytest.mark.parametrize("share", [0.00001, 0.001, 0.5, 0.999])
def test_a_truncated_model_is_refused(model_path, tmp_path, share):
    broken = tmp_path / "broken.gguf"
    shutil.copy(model_path, broken)
    os.truncate(broken, int(broken.stat().st_size * share))
    with pytest.raises(ModelError) as caught:
        LLM(str(broken), **SMALL)
    assert str(broken) in one_sentence(caught.value)


def test_an_architecture_llama_cpp_does_not_know_is_named(model_path, tmp_path):
    path = edited_copy(model_path, tmp_path / "new.gguf", architecture="notamodel")
    with pytest.raises(ModelError) as caught:
        LLM(str(path), **SMALL)
    sentence = one_sentence(caught.value)
    assert f"{path} cannot be loaded by llama.cpp: " in sentence
    assert "notamodel" in sentence and "of an architecture this llama.cpp supports" in sentence


def test_a_draft_with_another_vocabulary_drafts_text_and_the_first_difference_is_logged(model_path, tmp_path, caplog):
    draft = other_vocabulary(model_path, tmp_path / "draft.gguf", token=1234, text="zebra")
    options: dict[str, Any] = {"backend": "llamacpp", "max_context": 128, "cache_tokens": 256, "threads": 1}
    params = SamplingParams(temperature=0.0, max_tokens=12)
    with LLM(**options) as plain:
        expected = plain.generate("The capital of France is", params)[0].outputs[0].token_ids
    with caplog.at_level(logging.INFO), LLM(draft=str(draft), speculation="on", depth=3, **options) as llm:
        found = llm.generate("The capital of France is", params)[0].outputs[0]
    assert "another vocabulary: token 1234 is " in caplog.text and "'zebra' in the draft" in caplog.text
    assert "string-level exact match" in caplog.text and "100% of its tokens" in caplog.text
    assert found.token_ids == expected and found.speculation.num_accepted > 0


# ---- regressions


def test_more_tokens_than_a_step_carries_is_an_error_of_the_backend(runner):
    with pytest.raises(BackendError):
        runner.forward(StepPlan([Row(0, 0, [5] * 129, 1)]))


def test_the_reason_of_a_failed_step_is_its_own(runner):
    library = runner._lib
    library._recent_errors.append("something from long ago")
    try:
        with pytest.raises(BackendError) as caught:
            for i in range(CACHE_TOKENS // 128 + 1):
                runner.forward(StepPlan([Row(1, 128 * i, [5] * 128, 1)]))
    finally:
        library.forget_errors()
    assert "long ago" not in str(caught.value)


@pytest.mark.skipif(sys.platform != "linux", reason="file names are bytes on Linux")
def test_a_file_name_that_is_no_utf_8_can_be_loaded(model_path, tmp_path):
    path = tmp_path / os.fsdecode(b"m\xff.gguf")
    path.symlink_to(model_path)
    LLM(str(path), **SMALL).close()


def test_a_closed_model_refuses_in_a_sentence():
    code = (
        "from outpace import LLM, OutpaceError\n"
        "llm = LLM(backend='llamacpp', max_context=128, cache_tokens=128, threads=1, speculation='off')\n"
        "llm.close()\n"
        "try: llm.generate('abc')\n"
        "except OutpaceError: pass\n"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True).returncode == 0
