"""The cache under random operations: accept, reject, abort, preempt, share and evict, for thousands of steps.

There are three state machines. The first compares a block pool, with several block sizes, with a naive model of every
sequence. The second compares a token pool with a pool of single-token blocks. The third runs whole engines over a fake
model with too little memory, compares accounting, memory and requests after every step, and checks that every request
emitted exactly the tokens of plain decoding.
"""

from __future__ import annotations

import random

import hypothesis.strategies as st
import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from outpace.config import Method, SamplingParams, SpeculationMode, SpeculationParams
from outpace.core import Request
from outpace.kv.blocks import BlockPool
from tests.engine.test_engine import check, plainly, prompt_of
from tests.fakes import FakeModel, fake_engine, runner_of


class PoolMachine(RuleBasedStateMachine):
    """Really writes tokens into a list of blocks, so that a block shared by mistake gives a wrong token."""

    block_size = 1

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(24, self.block_size)
        self.memory: dict[int, list[int | None]] = {b: [None] * self.block_size for b in range(24)}
        self.expected: dict[int, list[int]] = {}
        self.next_seq = 0
        self.next_token = 0

    def pick(self, data: st.DataObject) -> int:
        return data.draw(st.sampled_from(sorted(self.expected)))

    @rule()
    def open(self) -> None:
        self.pool.open(self.next_seq)
        self.expected[self.next_seq] = []
        self.next_seq += 1

    @precondition(lambda self: self.expected)
    @rule(data=st.data(), num_tokens=st.integers(1, 9), share_kept=st.floats(0, 1))
    def write(self, data: st.DataObject, num_tokens: int, share_kept: float) -> None:
        """A speculative step: reserve, write everything, keep some."""
        seq = self.pick(data)
        before = (self.pool.num_free_blocks, self.pool.blocks(seq))
        copies = self.pool.reserve(seq, num_tokens)
        if copies is None:
            assert (self.pool.num_free_blocks, self.pool.blocks(seq)) == before, "a refusal changed something"
            return
        for source, target in copies:
            self.memory[target] = list(self.memory[source])
        kept = round(share_kept * num_tokens)
        length = len(self.expected[seq])
        for i in range(num_tokens):
            block = self.pool.blocks(seq)[(length + i) // self.block_size]
            self.memory[block][(length + i) % self.block_size] = self.next_token + i
        self.expected[seq] += [self.next_token + i for i in range(kept)]
        self.next_token += num_tokens
        self.pool.commit(seq, kept)

    @precondition(lambda self: self.expected)
    @rule(data=st.data(), share=st.floats(0, 1))
    def fork(self, data: st.DataObject, share: float) -> None:
        source = self.pick(data)
        num_tokens = round(share * len(self.expected[source]))
        self.pool.fork(source, self.next_seq, num_tokens)
        self.expected[self.next_seq] = self.expected[source][:num_tokens]
        self.next_seq += 1

    @precondition(lambda self: self.expected)
    @rule(data=st.data(), share=st.floats(0, 1))
    def rewind(self, data: st.DataObject, share: float) -> None:
        seq = self.pick(data)
        length = round(share * len(self.expected[seq]))
        self.pool.rewind(seq, length)
        del self.expected[seq][length:]

    @precondition(lambda self: self.expected)
    @rule(data=st.data())
    def close(self, data: st.DataObject) -> None:
        seq = self.pick(data)
        self.pool.close(seq)
        del self.expected[seq]

    @invariant()
    def books_and_memory_agree(self) -> None:
        self.pool.check_integrity()
        for seq, tokens in self.expected.items():
            blocks = self.pool.blocks(seq)
            held = [self.memory[blocks[i // self.block_size]][i % self.block_size] for i in range(len(tokens))]
            assert held == tokens, f"sequence {seq} lost its contents"


class PoolMachineOfFour(PoolMachine):
    block_size = 4


_THOROUGH = settings(max_examples=60, stateful_step_count=60, deadline=None, suppress_health_check=list(HealthCheck))
TestSingleCells = PoolMachine.TestCase
TestSingleCells.settings = _THOROUGH
TestBlocksOfFour = PoolMachineOfFour.TestCase
TestBlocksOfFour.settings = _THOROUGH


METHODS: tuple[Method, ...] = ("ngram", "suffix", "prediction", "draft")


def random_params(rng: random.Random) -> SamplingParams:
    speculation = SpeculationParams(mode="off")
    if rng.random() < 0.75:
        mode: SpeculationMode = "on" if rng.random() < 0.7 else "auto"
        speculation = SpeculationParams(mode=mode, method=rng.choice(METHODS), max_depth=rng.randrange(1, 9))
    return SamplingParams(
        temperature=rng.choice((0.0, 0.8, 1.3)),
        seed=rng.randrange(1000),
        top_p=rng.choice((1.0, 0.9)),
        frequency_penalty=rng.choice((0.0, 0.0, 0.6)),
        max_tokens=rng.randrange(1, 60),
        prediction="".join(rng.choices("abcdef", k=rng.randrange(80))),
        speculation=speculation,
    )


@pytest.mark.parametrize("seed", range(12))
def test_engines_short_of_memory_say_exactly_what_the_target_says(seed):
    rng = random.Random(seed)
    model = FakeModel(salt=seed)
    engine = fake_engine(
        model,
        speculation="on",
        max_context=96,
        cache_tokens=rng.choice((96, 150, 260)),
        max_sequences=rng.choice((2, 5)),
        max_step_tokens=rng.choice((7, 24)),
        prefix_reuse=rng.random() < 0.8,
    )
    families = [prompt_of(rng, rng.randrange(1, 60)) for _ in range(3)]
    alive: list[Request] = []
    num_checked = num_aborted = 0
    for _ in range(400):
        if rng.random() < 0.25 and len(alive) < 9:
            prompt = families[rng.randrange(3)] + prompt_of(rng, rng.randrange(1, 12))
            alive.append(engine.submit(prompt, random_params(rng)))
        if alive and rng.random() < 0.03:
            engine.abort(alive.pop(rng.randrange(len(alive))))
            num_aborted += 1
        engine.step()
        worked = engine.stats.num_prefill_tokens or engine.stats.num_decode_rows
        assert worked or not engine.has_requests, "a step did nothing: a livelock"
        check(engine)
        for request in [r for r in alive if r.finish_reason]:
            alive.remove(request)
            emitted = request.tokens[len(request.prompt) :]
            assert emitted == plainly(model, list(request.prompt), request.params, request.seed, max_length=96)
            num_checked += 1
    for request in alive:
        engine.abort(request)
    engine.scheduler.forget_kept()
    check(engine)
    assert runner_of(engine).num_cells == 0, "memory was leaked"
    assert num_checked >= 10 and num_aborted >= 1


def test_the_random_runs_meet_every_situation():
    """The run above is only a useful test if preemption and sharing happen in it."""
    rng = random.Random(99)
    engine = fake_engine(speculation="on", method="draft", max_context=96, cache_tokens=110, max_sequences=4)
    family = prompt_of(rng, 30)
    requests = [
        engine.submit(family + prompt_of(rng, 3), SamplingParams(temperature=0.0, max_tokens=50, ignore_eos=True))
        for _ in range(4)
    ]
    num_preempted = 0
    while engine.has_requests:
        engine.step()
        assert engine.stats.num_prefill_tokens or engine.stats.num_decode_rows, "a step did nothing: a livelock"
        check(engine)
        num_preempted += engine.stats.num_preempted
    assert num_preempted > 0
    assert any(r.num_shared for r in requests)
