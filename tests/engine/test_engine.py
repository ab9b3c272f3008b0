"""The engine over a fake model: scheduling, drafts, sharing and interrupts do not change the tokens."""

from __future__ import annotations

import random
from collections import Counter

import numpy as np
import pytest

from outpace.config import SamplingParams, SpeculationParams
from outpace.core import Request
from outpace.decoding.sampling import Shaper, choose
from outpace.engine.engine import Engine
from outpace.errors import UsageError
from outpace.speculation.proposers.draft_model import DraftModelProposer
from tests.fakes import EOS, FakeModel, fake_engine, runner_of

METHODS = ["none", "ngram", "suffix", "draft"]


def plainly(model: FakeModel, prompt: list[int], params: SamplingParams, seed: int, max_length: int = 256) -> list[int]:
    """The reference: the target alone, one token at a time, without an engine."""
    shaper = Shaper(params, prompt, frozenset({EOS}) | frozenset(params.stop_token_ids))
    tokens = list(prompt)
    while len(tokens) < min(len(prompt) + params.max_tokens, max_length):
        logits = model.logits(tokens)
        greedy = params.is_greedy
        token = shaper.greedy(logits, ()) if greedy else choose(shaper.probs(logits, ()), seed, len(tokens))
        tokens.append(token)
        shaper.advance([token])
        if token == EOS or token in params.stop_token_ids:
            break
    return tokens[len(prompt) :]


def run(engine: Engine, requests: list[Request]) -> list[list[int]]:
    while engine.has_requests:
        engine.step()
        assert engine.stats.num_prefill_tokens or engine.stats.num_decode_rows, "a step that did nothing: a livelock"
        check(engine)
    return [r.tokens[len(r.prompt) :] for r in requests]


def check(engine: Engine) -> None:
    """Check that the scheduler, the caches and the requests agree."""
    engine.scheduler.check_integrity()
    runner = runner_of(engine)
    for request in engine.scheduler.running:
        assert request.seq is not None
        assert runner.sequences.get(request.seq, []) == request.tokens[: request.num_computed]
    drafter = engine._proposers.get("draft")
    if isinstance(drafter, DraftModelProposer):
        drafter._cache.check_integrity()
        held = drafter._runner.sequences  # type: ignore[attr-defined]
        for request in engine.scheduler.running:
            seq = drafter._sequences.get(request.id)
            if seq is not None:
                assert held.get(seq, []) == request.tokens[: drafter._cache.length(seq)]


def prompt_of(rng: random.Random, length: int) -> list[int]:
    return [rng.randrange(97, 103) for _ in range(length)]


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("depth", [1, 4, 8])
@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(temperature=0.0, max_tokens=40),
        SamplingParams(temperature=0.8, seed=11, max_tokens=40),
        SamplingParams(temperature=1.0, seed=3, top_p=0.9, top_k=12, min_p=0.02, max_tokens=40),
        SamplingParams(temperature=0.0, repetition_penalty=1.3, frequency_penalty=0.5, max_tokens=40),
        SamplingParams(
            temperature=0.9, seed=5, presence_penalty=0.7, logit_bias={97: 2.0}, min_tokens=9, max_tokens=40
        ),
        SamplingParams(temperature=0.0, bad_words=[[97], [98, 99], [99, 100, 101]], max_tokens=40),
        SamplingParams(temperature=0.9, seed=7, bad_words=[[a, b] for a in range(97, 100) for b in (97, 98)]),
    ],
    ids=["greedy", "seeded", "filters", "penalties", "bias", "bad words", "seeded bad words"],
)
def test_speculation_never_changes_greedy_or_seeded_output(method, depth, params):
    model = FakeModel()
    mode = "off" if method == "none" else "on"
    options = {} if mode == "off" else {"method": method, "depth": depth}
    engine = fake_engine(model, speculation=mode, **options)
    rng = random.Random(depth)
    prompts = [prompt_of(rng, n) for n in (1, 5, 20, 33, 70)]
    requests = [engine.submit(p, params) for p in prompts]
    emitted = run(engine, requests)
    assert emitted == [plainly(model, p, params, r.seed) for p, r in zip(prompts, requests, strict=True)]
    if method != "none":
        assert sum(r.spec.num_accepted for r in requests) > 0, "nothing was ever accepted: the test shows little"
        assert sum(r.spec.num_drafted - r.spec.num_accepted for r in requests) > 0


def test_auto_keeps_the_same_tokens_too():
    model = FakeModel()
    params = SamplingParams(temperature=0.0, max_tokens=60)
    prompt = prompt_of(random.Random(1), 30)
    for method in METHODS[1:]:
        engine = fake_engine(model, speculation="auto", method=method)
        request = engine.submit(prompt, params)
        assert run(engine, [request]) == [plainly(model, prompt, params, 0)]


def test_a_perfect_draft_is_accepted_whole_with_a_bonus_token_each_step():
    engine = fake_engine(draft_noise=0.0, speculation="on", method="draft", depth=4)
    request = engine.submit([97, 98, 99], SamplingParams(temperature=0.0, max_tokens=21, ignore_eos=True))
    run(engine, [request])
    # The first token comes from the prompt; twenty more in four steps of 4 accepted + 1 bonus.
    assert request.spec.steps == 4
    assert request.spec.accepted_per_position == [4, 4, 4, 4]
    assert request.spec.mean_accepted_length == 5.0


def test_an_unseeded_neural_draft_is_judged_by_block_verification_and_loses_nothing():
    """Frequencies of the first two tokens over many unseeded requests match the target's."""
    model = FakeModel(vocab_size=258, order=1, sharpness=1.0)
    engine = fake_engine(model, speculation="on", method="draft", depth=2, prefix_reuse=False, draft_noise=0.5)
    params = SamplingParams(temperature=1.0, top_k=3, max_tokens=3)
    check_law(engine, model, params, frozenset({EOS}))


def check_law(engine: Engine, model: FakeModel, params: SamplingParams, end_ids: frozenset[int]) -> list[Request]:
    """Check that the outputs of many unseeded requests have the target's frequencies; returns the requests."""
    prompt, num = [97, 98], 1500
    expected: dict[tuple[int, ...], float] = {}

    def walk(emitted: tuple[int, ...], mass: float) -> None:
        if len(emitted) == params.max_tokens or (emitted and emitted[-1] in end_ids):
            expected[emitted] = mass
            return
        probs = Shaper(params, prompt, end_ids).probs(model.logits([*prompt, *emitted]), ())
        for token in np.flatnonzero(probs):
            walk((*emitted, int(token)), mass * float(probs[token]))

    walk((), 1.0)
    requests = [engine.submit(prompt, params) for _ in range(num)]
    while engine.has_requests:
        engine.step()
    counts = Counter(tuple(request.tokens[len(prompt) :]) for request in requests)
    assert set(counts) <= set(expected)
    chi2 = sum((counts[emitted] - num * p) ** 2 / (num * p) for emitted, p in expected.items())
    assert chi2 < len(expected) + 5 * np.sqrt(2 * len(expected)), f"chi-square {chi2:.1f} over {len(expected)} outcomes"
    return requests


def test_a_shared_prompt_is_computed_once():
    engine = fake_engine(speculation="off", cache_tokens=2048)
    prompt = prompt_of(random.Random(2), 60)
    params = SamplingParams(temperature=0.7, max_tokens=5, ignore_eos=True)
    requests = [engine.submit(prompt, params) for _ in range(4)]
    run(engine, requests)
    runner = runner_of(engine)
    # 60 for the first, 1 for each of the three others (its last token, for the logits), then 4 decoding steps each.
    assert runner.num_computed == 60 + 3 + 4 * 4
    assert [r.num_shared for r in requests] == [0, 59, 59, 59]


def test_a_prefix_is_shared_only_by_requests_with_the_same_salt():
    engine = fake_engine(speculation="off", cache_tokens=2048)
    prompt = prompt_of(random.Random(2), 60)
    params = SamplingParams(temperature=0.0, max_tokens=5, ignore_eos=True)
    together = [engine.submit(prompt, params, cache_salt=salt) for salt in ("a", "b", "", "a")]
    run(engine, together)
    assert [r.num_shared for r in together] == [0, 0, 0, 59]  # running requests
    later = [engine.submit(prompt, params, cache_salt=salt) for salt in ("b", "c", "")]
    run(engine, later)
    assert [r.num_shared for r in later] == [59, 0, 59]  # kept prefixes
    assert len({tuple(r.tokens) for r in [*together, *later]}) == 1


def test_a_finished_conversation_serves_its_next_turn():
    engine = fake_engine(speculation="off")
    first = engine.submit(
        prompt_of(random.Random(3), 50), SamplingParams(temperature=0.0, max_tokens=10, ignore_eos=True)
    )
    run(engine, [first])
    second = engine.submit([*first.tokens, 97, 98, 99], SamplingParams(temperature=0.0, max_tokens=4))
    run(engine, [second])
    assert second.num_shared == len(first.tokens) - 1, "all but the last token emitted, which was never computed"


def test_a_long_prompt_is_read_in_chunks_while_others_decode():
    engine = fake_engine(speculation="off", max_step_tokens=16, max_sequences=2)
    short = engine.submit([97, 98], SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True))
    engine.step()
    long = engine.submit(prompt_of(random.Random(4), 100), SamplingParams(temperature=0.0, max_tokens=2))
    num_before = short.num_output
    while long.num_output == 0:
        engine.step()
        check(engine)
    assert short.num_output - num_before >= 6, "decoding continued during the prefill"
    assert max(sum(step) for step in runner_of(engine).steps) <= 16


def test_waiting_requests_start_in_the_order_of_priority_and_then_of_submission():
    engine = fake_engine(max_sequences=1, max_step_tokens=16, prefix_reuse=False)
    params = SamplingParams(temperature=0.0, max_tokens=3)
    numbers = [0, 2, 1, 0, -1, 2, 0, 1]
    requests = [engine.submit([97 + i], params, priority=number) for i, number in enumerate(numbers)]
    emitted = run(engine, requests)
    begun = sorted(range(len(numbers)), key=lambda i: requests[i].admitted_at or 0.0)
    assert begun == sorted(range(len(numbers)), key=lambda i: numbers[i])  # sorted is stable
    assert emitted == [plainly(FakeModel(), list(r.prompt), params, 0) for r in requests]


def test_a_preempted_request_returns_before_others_of_its_priority_only():
    engine = fake_engine(max_sequences=1, prefix_reuse=False)
    first, low, equal, high = (engine.submit([97], SamplingParams(max_tokens=9), priority=n) for n in (0, 5, 0, -1))
    engine.scheduler.waiting.remove(high)
    engine.step()
    engine.scheduler.add(high)
    assert engine.scheduler.running == [first] and list(engine.scheduler.waiting) == [high, equal, low]
    engine.scheduler._preempt(first)
    assert list(engine.scheduler.waiting) == [high, first, equal, low]


def test_memory_running_out_preempts_and_loses_nothing():
    model = FakeModel()
    engine = fake_engine(
        model, speculation="on", method="suffix", max_context=100, cache_tokens=120, prefix_reuse=False
    )
    rng = random.Random(5)
    params = SamplingParams(temperature=0.9, seed=1, max_tokens=60, ignore_eos=True)
    prompts = [prompt_of(rng, 20) for _ in range(4)]
    requests = [engine.submit(p, params) for p in prompts]
    num_preempted = 0
    while engine.has_requests:
        engine.step()
        check(engine)
        num_preempted += engine.stats.num_preempted
    assert num_preempted > 0
    for prompt, request in zip(prompts, requests, strict=True):
        assert request.tokens[20:] == plainly_ignoring_eos(model, prompt, params, 1)


def plainly_ignoring_eos(model: FakeModel, prompt: list[int], params: SamplingParams, seed: int) -> list[int]:
    shaper = Shaper(params, prompt, frozenset())
    tokens = list(prompt)
    for _ in range(params.max_tokens):
        tokens.append(choose(shaper.probs(model.logits(tokens), ()), seed, len(tokens)))
        shaper.advance(tokens[-1:])
    return tokens[len(prompt) :]


def test_drafts_shrink_before_anyone_is_pushed_out():
    engine = fake_engine(speculation="on", method="draft", depth=8, max_context=40, cache_tokens=40, draft_noise=0.0)
    request = engine.submit(
        prompt_of(random.Random(6), 20), SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)
    )
    run(engine, [request])
    assert request.num_output == 20 and request.num_preemptions == 0


def test_abort_frees_everything_at_any_stage():
    engine = fake_engine(speculation="on", method="draft", depth=3, max_sequences=2, prefix_reuse=False)
    requests = [engine.submit(prompt_of(random.Random(i), 30), SamplingParams(max_tokens=30)) for i in range(4)]
    engine.step()
    engine.step()
    for request in requests:
        engine.abort(request)
        check(engine)
    assert not engine.has_requests
    assert runner_of(engine).num_cells == 0
    assert {r.finish_reason for r in requests} == {"abort"}


def test_a_backend_that_cannot_rewind_decodes_plainly():
    model = FakeModel()
    engine = fake_engine(model, can_rewind=False, speculation="on", method="ngram", depth=4)
    prompt = [97, 98, 99] * 6
    request = engine.submit(prompt, SamplingParams(temperature=0.0, max_tokens=20))
    assert run(engine, [request]) == [plainly(model, prompt, request.params, 0)]
    assert request.spec.num_drafted == 0


def test_each_request_may_choose_its_own_speculation():
    engine = fake_engine(speculation="on", method="suffix", depth=4)
    prompt = [97, 98, 99] * 6

    def submit(**options: object) -> Request:
        speculation = SpeculationParams(**options)  # type: ignore[arg-type]
        return engine.submit(prompt, SamplingParams(temperature=0.0, max_tokens=24, speculation=speculation))

    off, ngram, shallow, draft = submit(mode="off"), submit(method="ngram"), submit(max_depth=1), submit(method="draft")
    run(engine, [off, ngram, shallow, draft])
    assert off.spec.num_drafted == 0
    assert ngram.spec.proposers <= {"ngram"} and draft.spec.proposers == {"draft"}
    assert len(shallow.spec.drafted_per_position) <= 1


def test_lossy_acceptance_happens_only_when_named():
    def lenient(speculation: SpeculationParams) -> int:
        engine = fake_engine(speculation="on", method="draft", depth=3, draft_noise=0.6)
        params = SamplingParams(temperature=1.2, max_tokens=40, ignore_eos=True, speculation=speculation)
        requests = [engine.submit(prompt_of(random.Random(i), 12), params) for i in range(6)]
        run(engine, requests)
        return sum(r.spec.num_lenient for r in requests)

    assert lenient(SpeculationParams()) == 0
    assert lenient(SpeculationParams(acceptance="rejection")) == 0
    assert lenient(SpeculationParams(acceptance="typical")) > 0
    assert lenient(SpeculationParams(acceptance="threshold", threshold=0.05)) > 0


def test_max_tokens_and_context_end_a_request_with_length():
    engine = fake_engine(speculation="on", method="draft", depth=8, max_context=64)
    params = SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=7)
    by_tokens = engine.submit([97], params)
    by_context = engine.submit(prompt_of(random.Random(8), 60), SamplingParams(temperature=0.0, ignore_eos=True))
    run(engine, [by_tokens, by_context])
    assert (by_tokens.num_output, by_tokens.finish_reason) == (7, "length")
    assert (len(by_context.tokens), by_context.finish_reason) == (64, "length")


def test_a_broken_step_leaves_a_clean_engine(monkeypatch):
    model = FakeModel()
    engine = fake_engine(model, speculation="on", method="draft", depth=3)
    prompt = [97, 98, 99] * 3
    engine.submit(prompt, SamplingParams(max_tokens=30))
    engine.step()
    engine.step()
    monkeypatch.setattr(engine._runner, "forward", lambda plan: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        engine.step()
    monkeypatch.undo()
    engine.reset()
    check(engine)
    assert not engine.has_requests
    again = engine.submit(prompt, SamplingParams(temperature=0.0, max_tokens=30))
    assert run(engine, [again]) == [plainly(model, prompt, again.params, 0)]


@pytest.mark.parametrize(
    ("prompt", "options", "sentence"),
    [
        ([], {}, "the prompt is empty"),
        ([97] * 256, {}, "the prompt has 256 tokens and the context holds 256"),
        ([999], {}, "token 999 in prompt is not in the vocabulary"),
        ([97], {"logit_bias": {5000: 1.0}}, "token 5000 in logit_bias"),
        ([97], {"stop_token_ids": [5000]}, "token 5000 in stop_token_ids"),
    ],
)
def test_requests_that_cannot_run_are_refused_in_a_sentence(prompt, options, sentence):
    with pytest.raises(UsageError, match=sentence):
        fake_engine().submit(prompt, SamplingParams(**options))


def test_a_method_that_is_not_loaded_is_refused():
    engine = fake_engine()
    del engine._proposers["draft"]
    with pytest.raises(UsageError, match="'draft' is not loaded"):
        engine.submit([97], SamplingParams(speculation=SpeculationParams(method="draft")))


def test_a_step_in_which_nobody_was_asked_to_draft_spends_nothing_on_drafting():
    """Deciding is free if it is hidden behind a running pass; any drafting time would make it count."""
    for method, is_asked in (("none", False), ("draft", True)):
        engine = fake_engine(FakeModel(), speculation="on" if is_asked else "off", method=method if is_asked else None)
        engine.submit([97, 98, 99], SamplingParams(temperature=0.0, max_tokens=8))
        engine.step()
        engine.step()
        assert engine.stats.num_decode_rows == 1 and (engine.stats.draft_seconds > 0) == is_asked


def test_estimated_speedup_and_stats_are_filled():
    engine = fake_engine(speculation="on", method="draft", depth=4)
    request = engine.submit([97, 98, 99], SamplingParams(temperature=0.0, max_tokens=32, ignore_eos=True))
    engine.step()
    engine.step()
    assert engine.stats.num_decode_rows == 1 and engine.stats.num_drafted == 4
    assert engine.stats.forward_seconds > 0 and engine.stats.draft_seconds > 0
    run(engine, [request])
    assert request.spec.estimated_speedup is not None and request.spec.estimated_speedup > 0
