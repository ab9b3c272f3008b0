"""llama.cpp's tokenizer: texts in pieces give the tokens of the whole text, in a time that grows with the text."""

from __future__ import annotations

import random
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from outpace.errors import UsageError
from outpace.models import gguf_tokenizer, text_pieces
from outpace.models.gguf_tokenizer import LlamaTokenizer
from outpace.models.llama_library import load_library
from outpace.models.long_runs import MAX_RUN_CHARS
from outpace.models.resolve import resolve_model
from tests.vocabulary_gguf import SPECIALS, write_bpe, write_spm

BITS = [
    *(text for text, _ in SPECIALS), "<x>", "x><", "tt<", ">tt", "<x", "<x><x>tt",
    "<|im_start|>", "<|im_end|>", "<|endoftext|>", "<|im_", "<th", "ink>", "<|end|",
    "!", " ", "  ", "\n", "\t", "\r\n", " \n ", "the", " the", "The cat", "don't", "I'll", "a", "aaaa", "wo", "w", "ow",
    "été", "naïve", "Ωmega", "Привет мир", "中", "文", "中文字。", "日本語です", "안녕 하세요", "مرحبا بكم", "नमस्ते",
    "🙂", "👨‍👩‍👧", "e\u0301", "\u0301", "\u200b", "\u00a0", "7", "1234", "½", "_", "...", "(", "\U000f0000", "\x00",
    "▁",
]  # fmt: skip


def texts(count: int, seed: int) -> list[str]:
    rng = random.Random(seed)
    made = ["".join(rng.choices(BITS, k=rng.randrange(1, 40))) for _ in range(count)]
    return made + [bit * n for bit in BITS for n in (1, 2, 3, 7, 20)]


Make = Callable[[Path], Path]
VOCABULARIES: dict[str, Make] = {
    "BPE": lambda folder: write_bpe(folder / "v.gguf"),
    "BPE that strips to the right": lambda folder: write_bpe(folder / "v.gguf", name="phi-3-tiny"),
    "BPE that strips to the left": lambda folder: write_bpe(folder / "v.gguf", splitter="jina-v2-code"),
    "BPE split by expressions": lambda folder: write_bpe(folder / "v.gguf", splitter="tekken"),
    "BPE of several words": lambda folder: write_bpe(folder / "v.gguf", splitter="superbpe"),
    "BPE with overlapping tokens": lambda folder: write_bpe(folder / "v.gguf", name="phi-3-tiny", overlapping=True),
    "SPM": lambda folder: write_spm(folder / "v.gguf"),
}


@pytest.fixture(params=[*VOCABULARIES, pytest.param("SmolLM2", marks=pytest.mark.model)])
def tokenizer(request, tmp_path) -> LlamaTokenizer:
    make = VOCABULARIES.get(request.param)
    return LlamaTokenizer(make(tmp_path) if make else resolve_model(None), load_library())


@pytest.mark.parametrize("piece_chars", [1, 9])
@pytest.mark.parametrize("parse_special", [True, False])
@pytest.mark.parametrize("add_special", [True, False])
def test_pieces_give_the_tokens_of_the_whole_text(tokenizer, monkeypatch, add_special, parse_special, piece_chars):
    monkeypatch.setattr(gguf_tokenizer, "WHOLE_CHARS", 0)
    monkeypatch.setattr(text_pieces, "_PIECE_CHARS", piece_chars)
    monkeypatch.setattr(text_pieces, "_PIECE_TOKENS", 2)
    num_cut = 0
    for text in texts(100, seed=4 * piece_chars + 2 * add_special + parse_special):  # others for each of the eight
        whole = tokenizer._tokenize(text, add_special, parse_special)
        pieces = list(tokenizer.pieces(text, add_special=add_special, parse_special=parse_special))
        assert [token for piece in pieces for token in piece] == whole, repr(text)
        num_cut += len(pieces) > 3  # the special tokens around the text are two
    assert num_cut > 25, "hardly any text was cut"


def test_what_the_vocabularies_of_these_tests_have(tmp_path):
    """Otherwise the test above would compare less than its names say."""

    def opened(kind: str) -> LlamaTokenizer:
        return LlamaTokenizer(VOCABULARIES[kind](tmp_path), load_library())

    assert any(token.strips_right for token in opened("BPE that strips to the right").specials.tokens)
    assert any(token.strips_left for token in opened("BPE that strips to the left").specials.tokens)
    assert opened("BPE")._keeps_words_apart and opened("BPE")._splits_by_loops
    assert opened("BPE").specials.has_clear_order
    assert not opened("BPE with overlapping tokens").specials.has_clear_order
    assert not opened("BPE split by expressions")._splits_by_loops
    spm = opened("SPM")
    assert not spm._keeps_words_apart, "each piece would begin with one more space"
    assert spm._added_around == ([0], [])
    assert spm.encode("a<s>a", add_special=False)[0] == spm.encode("a<s>a", add_special=False)[2], "with a space each"


class Counting:
    """A library that counts the bytes it tokenises, squared by the special tokens in one call."""

    def __init__(self, library: object, special: bytes) -> None:
        self._library, self._special = library, special
        self.work = 0

    def __getattr__(self, name: str) -> object:
        return getattr(self._library, name)

    def llama_tokenize(self, vocab: int, data: bytes, *rest: object) -> int:
        self.work += len(data) + data.count(self._special) ** 2
        return self._library.llama_tokenize(vocab, data, *rest)  # type: ignore[attr-defined,no-any-return]


@pytest.mark.parametrize(
    ("special", "overlapping"),
    [("<s>", False), ("<think>", False), ("\n\n\n", False), ("a</s>", False), ("wow", False), ("<think>", True)],
)
def test_many_special_tokens_do_not_make_one_expensive_call(tmp_path, special, overlapping):
    tokenizer = LlamaTokenizer(write_bpe(tmp_path / "v.gguf", overlapping=overlapping), load_library())
    tokenizer.encode("x" * 3000)  # looks at the vocabulary
    costs = []
    for count in (1000, 4000):
        library = tokenizer._lib = Counting(load_library(), special.encode())  # type: ignore[assignment]
        assert len(tokenizer.encode(special * count)) >= count / 2
        costs.append(library.work)
        tokenizer._lib = load_library()
    assert costs[1] < 5 * costs[0], "four times the text should be four times the work"


def test_a_long_text_comes_in_pieces_that_end_at_words(tmp_path):
    tokenizer = LlamaTokenizer(write_bpe(tmp_path / "v.gguf"), load_library())
    text = "the wowing cat sat\non a mat " * 10_000
    pieces = list(tokenizer.pieces(text))
    assert max(map(len, pieces)) < len(text) / 10
    assert [token for piece in pieces for token in piece] == tokenizer._tokenize(text, True, True)


@pytest.mark.parametrize("bit", ["a", " ", "!", "中", "7_"])
def test_long_runs_neither_overflow_the_stack_nor_end_the_process(tmp_path, bit):
    path = write_bpe(tmp_path / "v.gguf", splitter="deepseek-llm")
    program = f"""
from pathlib import Path
from outpace.errors import UsageError
from outpace.models.gguf_tokenizer import LlamaTokenizer
from outpace.models.llama_library import load_library
tokenizer = LlamaTokenizer(Path({str(path)!r}), load_library())
print(len(tokenizer.encode({bit!r} * 30_000)))
try:
    tokenizer.encode({bit!r} * 1_000_000)
except UsageError as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, f"status {done.returncode}: {done.stderr}"
    count, refusal = done.stdout.splitlines()
    assert int(count) > 1000
    assert "characters without a break, which this model's tokenizer cannot split; insert spaces" in refusal
    assert f"at most {MAX_RUN_CHARS // 2}" in refusal


def test_the_longest_token_bounds_how_many_a_text_can_have(tokenizer):
    longest = tokenizer.longest_token
    if longest is None:
        assert any(token.strips_left or token.strips_right for token in tokenizer.specials.tokens)
        return
    for text in texts(100, seed=3):
        assert len(tokenizer.encode(text, add_special=False)) >= len(text.encode()) / longest


def test_text_that_is_none_is_refused(tokenizer):
    with pytest.raises(UsageError, match="not valid Unicode text"):
        tokenizer.encode("\ud800")
