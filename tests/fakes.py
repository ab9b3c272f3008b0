"""A tiny model behind the real protocols.

`FakeRunner` returns logits that are a pure function of the tokens in its cache. If the engine leaves a wrong token
there, or feeds one at a wrong position, the output changes. The runner also counts cache cells like a real backend, and
asserts that no call is one that a real backend could not do.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from outpace.backends.base import Capabilities, Capacity, LoadedModel
from outpace.config import EngineConfig, ResolvedConfig
from outpace.core import StepPlan
from outpace.engine.engine import Engine
from outpace.models.special_tokens import SpecialToken, SpecialTokens
from outpace.speculation.proposers.base import NoDraft, Proposer
from outpace.speculation.proposers.draft_model import DraftModelProposer
from outpace.speculation.proposers.grammar import GrammarProposer
from outpace.speculation.proposers.ngram import NgramProposer
from outpace.speculation.proposers.prediction import PredictionProposer
from outpace.speculation.proposers.suffix import SuffixProposer

EOS, BOS = 256, 257


class ByteTokenizer:
    """Tokens 0 to 255 are bytes; then follow EOS and BOS."""

    vocab_size = 258
    bos_text = "<s>"
    eos_text = "</s>"
    specials = SpecialTokens([SpecialToken(EOS, "</s>", is_control=True), SpecialToken(BOS, "<s>", is_control=True)])
    longest_token: int | None = len("</s>")
    chat_template: str | None = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}assistant:"

    @property
    def end_ids(self) -> frozenset[int]:
        return frozenset({EOS})

    def encode(self, text: str, *, add_special: bool = True, parse_special: bool = True) -> list[int]:
        return [t for piece in self.pieces(text, add_special=add_special, parse_special=parse_special) for t in piece]

    def pieces(self, text: str, *, add_special: bool = True, parse_special: bool = True) -> Iterator[list[int]]:
        """Bytes in pieces of 256; with `parse_special`, the texts of EOS and BOS are tokens."""
        yield [BOS] if add_special else []
        places = self.specials.places(text) if parse_special else []
        start = 0
        for place in places:
            yield from _bytes_in_pieces(text[start : place.start])
            yield [place.token.id]
            start = place.end
        yield from _bytes_in_pieces(text[start:])

    def token_bytes(self, token: int) -> bytes:
        return bytes([token]) if token < 256 else b""

    def vocabulary(self) -> list[tuple[bytes, int]]:
        return [(bytes([t]) if t < 256 else b"<%d>" % t, 0) for t in range(self.vocab_size)]


def _bytes_in_pieces(text: str) -> Iterator[list[int]]:
    data = list(text.encode())
    for start in range(0, len(data), 256):
        yield data[start : start + 256]


class FakeModel:
    """Logits depend on the last `order` tokens of the context and its length modulo 7: text repeats, not trivially.

    Two models with the same salt agree; `noise` mixes in another model's logits, for drafts that are sometimes right.
    """

    width = 8  # of hidden states

    def __init__(
        self, vocab_size: int = 258, *, salt: int = 0, order: int = 3, noise: float = 0.0, sharpness: float = 3.0
    ) -> None:
        self.vocab_size = vocab_size
        self._salt, self._order, self._noise, self._sharpness = salt, order, noise, sharpness
        self._memory: dict[tuple[int, ...], NDArray[np.float32]] = {}

    def logits(self, context: Sequence[int]) -> NDArray[np.float32]:
        state = (len(context) % 7, *context[-self._order :])
        if state not in self._memory:
            row = self._opinion(state, self._salt)
            if self._noise:
                row = (1 - self._noise) * row + self._noise * self._opinion(state, self._salt + 1)
            self._memory[state] = (self._sharpness * row).astype(np.float32)
        return self._memory[state]

    def state(self, context: Sequence[int]) -> NDArray[np.float64]:
        seed = zlib.crc32(np.array([self._salt, *context], np.int64).tobytes())
        return np.random.default_rng(seed).normal(size=self.width)

    def _opinion(self, state: tuple[int, ...], salt: int) -> NDArray[np.float64]:
        seed = zlib.crc32(np.array([salt, *state], np.int64).tobytes())
        # A few tokens are much likelier, so that texts repeat and lookups find drafts.
        rng = np.random.default_rng(seed)
        row = rng.normal(size=self.vocab_size) * 0.5
        row[rng.integers(97, 103, size=3)] += 3.0
        return row


class FakeRunner:
    def __init__(self, model: FakeModel, capacity: Capacity, *, can_rewind: bool = True) -> None:
        self.model = model
        self.capacity = capacity
        self.capabilities = Capabilities(can_rewind=can_rewind, states=self.states, state_width=FakeModel.width)
        self.vocab_size = model.vocab_size
        self.sequences: dict[int, list[int]] = {}
        self._cells: dict[int, list[int]] = {}  # an id for each cached token; forks share ids
        self._next_cell = 0
        self.num_forwards = 0
        self.num_computed = 0
        self.steps: list[list[int]] = []  # row lengths of every forward

    def forward(self, plan: StepPlan) -> NDArray[np.float32]:
        self.num_forwards += 1
        self.steps.append([len(row.tokens) for row in plan.rows])
        assert 0 < plan.num_tokens <= self.capacity.max_step_tokens, "a step over the token budget"
        seqs = [row.seq for row in plan.rows]
        assert len(set(seqs)) == len(seqs), "a sequence twice in one step"
        logits = []
        self._contexts: list[list[int]] = []
        self._keeps_states = plan.needs_states
        for row in plan.rows:
            assert 0 <= row.seq < self.capacity.max_sequences
            held = self.sequences.setdefault(row.seq, [])
            cells = self._cells.setdefault(row.seq, [])
            assert row.start == len(held), f"row starts at {row.start}, cache holds {len(held)}"
            for i, token in enumerate(row.tokens):
                assert 0 <= token < self.vocab_size
                held.append(token)
                cells.append(self._next_cell)
                self._next_cell += 1
                if len(row.tokens) - i <= row.num_logits:
                    logits.append(self.model.logits(held))
                    self._contexts.append(list(held) if plan.needs_states else [])
            assert len(held) <= self.capacity.max_context
            self.num_computed += len(row.tokens)
        assert self.num_cells <= self.capacity.cache_tokens, "more cache used than there is"
        return np.array(logits, np.float32).reshape(-1, self.vocab_size)

    def states(self, begin: int, end: int) -> NDArray[np.float32]:
        assert self._keeps_states, "the plan did not ask for states"
        assert end <= len(self._contexts)
        return np.array([self.model.state(context) for context in self._contexts[begin:end]], np.float32)

    @property
    def num_cells(self) -> int:
        return len({cell for cells in self._cells.values() for cell in cells})

    def truncate(self, seq: int, num_tokens: int) -> None:
        assert self.capabilities.can_rewind, "this backend cannot rewind"
        assert num_tokens <= len(self.sequences[seq])
        del self.sequences[seq][num_tokens:], self._cells[seq][num_tokens:]

    def fork(self, source: int, target: int, num_tokens: int) -> None:
        assert target not in self.sequences and num_tokens <= len(self.sequences[source])
        self.sequences[target] = self.sequences[source][:num_tokens]
        self._cells[target] = self._cells[source][:num_tokens]

    def free(self, seq: int) -> None:
        self.sequences.pop(seq, None)
        self._cells.pop(seq, None)

    def close(self) -> None:
        self.sequences.clear()


def fake_config(**options: object) -> ResolvedConfig:
    defaults: dict[str, object] = {"max_context": 256, "cache_tokens": 1024, "max_sequences": 4, "max_step_tokens": 64}
    wanted = EngineConfig(**{**defaults, **options})  # type: ignore[arg-type]
    return wanted.resolve(model_context=16384, model_path="fake", draft_path=wanted.draft)


def fake_loaded(
    model: FakeModel, config: ResolvedConfig, *, can_rewind: bool = True, tokenizer: ByteTokenizer | None = None
) -> LoadedModel:
    capacity = Capacity(
        max_sequences=2 * config.max_sequences,
        cache_tokens=config.cache_tokens,
        max_context=config.max_context,
        max_step_tokens=config.max_step_tokens,
    )
    runner = FakeRunner(model, capacity, can_rewind=can_rewind)
    return LoadedModel(runner, tokenizer or ByteTokenizer(), "fake", 0, 0)


def fake_engine(
    model: FakeModel | None = None,
    *,
    draft_noise: float = 0.3,
    can_rewind: bool = True,
    tokenizer: ByteTokenizer | None = None,
    **options: object,
) -> Engine:
    """An engine over the fake model, with every proposer; the draft model is the target with some noise."""
    model = model or FakeModel()
    config = fake_config(draft="fake", **options)
    draft = fake_loaded(FakeModel(model.vocab_size, salt=model._salt, order=model._order, noise=draft_noise), config)
    target_loaded = fake_loaded(model, config, can_rewind=can_rewind, tokenizer=tokenizer)
    proposers: list[Proposer] = [
        NoDraft(),
        GrammarProposer(),
        NgramProposer(config.ngram_min, config.ngram_max),
        SuffixProposer(config.suffix_store_tokens),
        PredictionProposer(),
        DraftModelProposer(draft, model.vocab_size),
    ]
    return Engine(target_loaded, {p.name: p for p in proposers}, config, draft=draft)


def runner_of(engine: Engine) -> FakeRunner:
    runner = engine._runner
    assert isinstance(runner, FakeRunner)
    return runner


def draft_runner_of(engine: Engine) -> FakeRunner:
    assert engine._draft_model is not None
    runner = engine._draft_model.runner
    assert isinstance(runner, FakeRunner)
    return runner
