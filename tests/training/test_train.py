"""Training on a tiny target: it learns, goes on where it stopped, and keeps what it has."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import numpy as np
import pytest

pytest.importorskip("torch", reason="torch is not installed; pip install outpace[distill]")

import torch

from outpace.errors import UsageError
from outpace.training import answers as answering
from outpace.training import data
from outpace.training import distill as distilling
from outpace.training import train as training
from outpace.training.batches import Texts, epochs, join, make_batch, plan_batches
from outpace.training.data import Answers, AnswerSettings, draft_vocabulary, load_answers, save_answers, write_answers
from outpace.training.display import Display
from outpace.training.distill import distill
from outpace.training.documents import Frame
from outpace.training.evaluate import evaluate, mean_overlaps, num_hits, tokens_a_step
from outpace.training.head import Head
from outpace.training.loss import DraftLoss
from outpace.training.settings import DistillSettings
from outpace.training.shards import load_sharded
from outpace.training.target import Target
from outpace.training.train import Progress, Trainer, TrainSettings
from outpace.training.write import Checkpoint, load_checkpoint, save_checkpoint
from tests.tiny_gguf import VOCAB_SIZE
from tests.tiny_training import CPU, SHAPE, random_texts, tiny_answers, tiny_head, tiny_prepared, tiny_target


@pytest.fixture(scope="module")
def target(tmp_path_factory) -> Target:
    return tiny_target(tmp_path_factory.mktemp("target"))


@pytest.fixture(scope="module")
def answers(target) -> Answers:
    return tiny_answers(target)


def trained(target: Target, answers: Answers, steps: int) -> tuple[Trainer, torch.Tensor]:
    head, kept = tiny_head(target, kept=torch.arange(VOCAB_SIZE))
    settings = TrainSettings(seconds=1e9, warm_up=1e-12, learning_rate=3e-3, shape=SHAPE)
    trainer = Trainer(target, head, kept, settings, Progress(), compile=False)
    batches = epochs(answers.train, SHAPE, 0, 0, CPU)
    for _ in range(steps):
        trainer.progress.seconds += 1
        trainer.step(next(batches))
    return trainer, kept


def test_training_raises_acceptance_far_above_a_random_head(target, answers):
    def figure(head, kept) -> float:
        return tokens_a_step(list(num_hits(target, head, kept, answers.train, SHAPE, rounded=False).values()), 3)

    trainer, kept = trained(target, answers, 60)
    untrained, _ = trained(target, answers, 0)
    after, before = figure(trainer.head, kept), figure(untrained.head, kept)
    for parameter in untrained.head.parameters.values():
        parameter.data.normal_()
    assert figure(untrained.head, kept) < 1.2
    assert after > before + 0.3  # start values alone already draft some repetitions
    assert after > 1.8


def test_the_loss_is_the_cross_entropy_to_the_restricted_distribution(target):
    head, kept = tiny_head(target)
    settings = TrainSettings(seconds=1e9, shape=SHAPE)
    texts = random_texts([30, 12])
    batch = make_batch(texts, 32, [0, 1], SHAPE, CPU)
    found = Trainer(target, head, kept, settings, Progress(), compile=False).batch_loss(batch)
    features = target.features(batch, head.config.taps)
    chains, expected = head.begin(features, batch), 0.0
    for k in range(SHAPE.num_steps):
        logits = chains.step(batch.shifted(1 + k), batch.entries) @ chains.output.T
        at, losses = 0, []
        for row, count in enumerate(batch.counts):
            for i in range(count - k):
                place = row * 32 + 5 + i + k  # the position whose target distribution the draft should have
                probs = (features.last[place] @ target.weights.head.T)[kept].softmax(-1)
                losses.append(-(probs * logits[at + i].log_softmax(-1)).sum())
            at += count
        assert len(losses) == batch.num_drafted[k]
        expected += 0.85**k * float(torch.stack(losses).detach().mean())
    assert float(found.detach()) == pytest.approx(expected, rel=1e-4)


def test_gradients_of_the_chunked_loss_are_autograds():
    torch.manual_seed(0)
    x, output = torch.randn(64, 16, requires_grad=True), torch.randn(40, 16, requires_grad=True)
    probs, weights = torch.randn(64, 40).softmax(-1), torch.rand(64)
    loss = DraftLoss(32)(x, output, probs, weights)
    plain = (weights * torch.nn.functional.cross_entropy(x @ output.T, probs, reduction="none")).sum()
    torch.testing.assert_close(loss, plain)
    for a, b in zip(
        torch.autograd.grad(2 * loss, [x, output]), torch.autograd.grad(2 * plain, [x, output]), strict=True
    ):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def test_hits_are_those_of_drafts_made_one_by_one(target, answers):
    trainer, kept = trained(target, answers, 30)
    texts = answers.held_greedy
    found = num_hits(target, trainer.head, kept, texts, SHAPE, rounded=False, max_depth=3)
    for text, hits in found.items():
        tokens, prompt = texts.tokens[texts.offsets[text] : texts.offsets[text + 1]], int(texts.prompt_lengths[text])
        for entry in range(0, len(hits), 5):
            drafted = greedy_draft(target, trainer.head, tokens[: prompt + entry + 1], 3)
            true = tokens[prompt + entry + 1 :][:3].tolist()
            equal = [a == b for a, b in zip(drafted, true, strict=False)]
            assert hits[entry] == (equal.index(False) if False in equal else len(equal))


@torch.no_grad()
def greedy_draft(target: Target, head, known, depth: int) -> list[int]:
    """A draft after `known` alone: the true continuation is not in the batch, so it cannot be seen."""
    drafted: list[int] = []
    padded = np.concatenate([known, [0] * (depth + 1)])
    texts = Texts(padded, np.array([0, len(padded)]), np.array([len(known) - 1]))
    batch = make_batch(texts, 64, [0], SHAPE, CPU)
    chains = head.begin(target.features(batch, head.config.taps), batch)
    tokens = batch.shifted(1)
    for _ in range(depth):
        row = chains.step(tokens, batch.entries[:1]) @ chains.output.T
        drafted.append(int(row.argmax()))
        tokens = torch.full_like(tokens, drafted[-1])
    return drafted


def test_replaying_counts_the_targets_own_token_of_each_step():
    assert tokens_a_step([np.array([0, 0, 0, 0])], 3) == 1.0
    assert tokens_a_step([np.array([3, 9, 9, 9, 1, 0])], 3) == 3.0  # steps at 0 and 4: 4 and 2 tokens
    assert tokens_a_step([np.array([3, 0, 1, 0])], 1) == 2.0  # at depth 1: steps at 0 and 2


def test_a_head_that_is_the_target_overlaps_wholly(target, answers):
    class Oracle(Head):
        def begin(self, features, batch, *, rounded=False):
            return OracleChains(features, batch)

    class OracleChains:
        def __init__(self, features, batch) -> None:
            self.output, self.step_number, self.features = target.weights.head, 0, features

        def step(self, tokens, rows):
            self.step_number += 1
            return self.features.last[(rows + self.step_number).clamp(max=len(tokens) - 1)]

    head, _ = tiny_head(target)
    oracle, kept = Oracle(head.config, target, head.parameters), torch.arange(VOCAB_SIZE)
    assert mean_overlaps(target, oracle, kept, answers.held_sampled, SHAPE, rounded=False) == pytest.approx([1.0] * 5)
    found = evaluate(
        target, oracle, kept, answers.held_greedy, answers.held_sampled, ["odd", "even"] * 2, SHAPE, rounded=False
    )
    assert found.coverage == 1.0
    assert found.tokens_a_step["all"][0] > 1.9
    assert found.tokens_a_step.keys() == {"all", "odd", "even"}


def test_spec_bench_has_a_row_for_mt_bench(target):
    names = ["writing", "roleplay", "reasoning", "math", "coding", "extraction", "stem", "humanities", "qa"]
    texts = random_texts([12] * 9)
    head, kept = tiny_head(target)
    found = evaluate(target, head, kept, texts, texts, names, SHAPE, rounded=False).tokens_a_step
    assert list(found) == ["all", "conversation", *names]
    hits = num_hits(target, head, kept, texts, SHAPE, rounded=False)
    assert found["conversation"][2] == tokens_a_step([hits[i] for i in range(8)], 3)
    assert found["qa"][2] == tokens_a_step([hits[8]], 3)


def test_every_text_is_in_one_batch_and_padding_is_small():
    texts = random_texts([int(n) for n in np.random.default_rng(0).integers(8, 380, 300)])
    plans = plan_batches(texts, SHAPE, seed=3)
    assert sorted(i for _, chosen in plans for i in chosen) == list(range(300))
    for length, chosen in plans:
        assert len(chosen) <= SHAPE.num_tokens // length
        assert all(texts.lengths[i] <= length for i in chosen)
    assert plans != plan_batches(texts, SHAPE, seed=4)
    assert texts.lengths.sum() > 0.7 * SHAPE.num_tokens * len(plans)


def test_epochs_go_on_where_an_interrupted_run_stopped():
    texts = random_texts([20] * 40)
    whole, rest = epochs(texts, SHAPE, 5, 0, CPU), epochs(texts, SHAPE, 5, 6, CPU)
    expected = [next(whole).texts for _ in range(10)][6:]
    assert [next(rest).texts for _ in range(4)] == expected


def test_the_draft_vocabulary_is_what_answers_say_most():
    texts = Texts(np.array([9, 9, 9, 4, 4, 7, 5, 5, 5]), np.array([0, 9]), np.array([3]))  # the prompt does not count
    assert draft_vocabulary(texts, 2, 12).tolist() == [4, 5]
    assert draft_vocabulary(texts, 99, 12).tolist() == list(range(12))


def test_answers_come_back_from_their_file_and_belong_to_one_target(answers, tmp_path):
    save_answers(answers, tmp_path, "abc", VOCAB_SIZE)
    found = load_answers(tmp_path, "abc")
    assert found is not None
    for name in ("train", "held_greedy", "held_sampled"):
        ours, theirs = getattr(answers, name), getattr(found, name)
        assert np.array_equal(ours.tokens, theirs.tokens)
        assert np.array_equal(ours.offsets, theirs.offsets)
        assert np.array_equal(ours.prompt_lengths, theirs.prompt_lengths)
    stored, _ = load_sharded(tmp_path, "answers")
    assert len(stored["train.prompt_lengths"]) < len(answers.train)  # prompts are not repeated
    assert load_answers(tmp_path / "elsewhere", "abc") is None
    nothing = replace(answers, held_greedy=join([], []), held_sampled=join([], []))
    save_answers(nothing, tmp_path / "nothing", "abc", VOCAB_SIZE)
    found = load_answers(tmp_path / "nothing", "abc")
    assert found is not None and len(found.held_greedy) == 0
    with pytest.raises(UsageError, match="another target's; delete"):
        load_answers(tmp_path, "other")


def test_half_of_the_first_answers_are_greedy_and_rounds_differ(target, answers):
    prepared = tiny_prepared(target)
    lengths = answers.train.prompt_lengths
    assert len(answers.train) > len(prepared.train)
    said: dict[bytes, list[bytes]] = {}
    for i in range(len(answers.train)):
        prompt = answers.train.tokens[answers.train.offsets[i] :][: lengths[i]].tobytes()
        said.setdefault(prompt, []).append(answers.train.answer(i).tobytes())
    assert sum(len(set(each)) == 2 for each in said.values()) > len(said) // 2


def test_prompts_of_the_targets_own_making_stand_in_its_template(target):
    prepared = tiny_prepared(target)
    settings = AnswerSettings(seconds=60.0, max_answer=32, max_rounds=1, num_own_prompts=100)
    found = write_answers(target, prepared, settings, lambda *_: None, lambda _: None)
    texts = found.train
    prompts = [texts.tokens[texts.offsets[i] :][: texts.prompt_lengths[i]].tolist() for i in range(len(texts))]
    own = [prompt for prompt in prompts if prompt[:2] == prepared.user_begin]
    assert 0 < len(own) <= found.num_own_prompts < 100
    assert all(prompt[-1:] == prepared.user_end and 256 not in prompt for prompt in own)


def test_texts_of_its_own_answers_become_long_prompts(target):
    frames = [Frame([257, 258, 7], [259]), Frame([257, 258], [8, 259])]
    prepared = replace(tiny_prepared(target), frames=frames)
    settings = AnswerSettings(seconds=30.0, max_answer=24, max_rounds=4, document_share=0.5, max_text=124)
    found = write_answers(target, prepared, settings, lambda *_: None, lambda _: None)
    assert found.num_documents == len(prepared.train)
    texts = found.train
    prompts = [texts.tokens[texts.offsets[i] :][: texts.prompt_lengths[i]].tolist() for i in range(len(texts))]
    long = [prompt for prompt in prompts if prompt[:2] == [257, 258]]
    assert long and all(len(prompt) <= 100 and prompt[-1] == 259 and 256 not in prompt for prompt in long)
    assert {prompt[2] == 7 for prompt in long} == {True, False}
    answers = [texts.answer(i).tolist() for i in range(len(texts))]
    text = long[0][3:11] if long[0][2] == 7 else long[0][2:10]
    assert any(text == answer[: len(text)] for answer in answers)  # it begins with an answer
    none = replace(settings, document_share=0.5, max_text=24 + max(len(prompt) for prompt in prepared.train))
    assert write_answers(target, prepared, none, lambda *_: None, lambda _: None).num_documents == 0  # no room


# The whole of a call.

SETTINGS = DistillSettings(
    minutes=0.05, answer_minutes=0.02, max_answer=16, draft_vocab_size=64, num_steps=2, batch_tokens=384
)


def run(target: Target, folder, out, **changes):
    settings = replace(SETTINGS, **changes)
    return distill(folder / "tiny.gguf", tiny_prepared(target), out, settings, CPU, Display())


def test_a_call_writes_a_head_with_card_and_log(tmp_path):
    target = tiny_target(tmp_path)
    found = run(target, tmp_path, tmp_path / "head")
    assert found is not None and found.num_texts > 0
    card = (tmp_path / "head" / "card.md").read_text()
    assert target.fingerprint in card and "| all |" in card and "| odd |" in card
    lines = [json.loads(line) for line in (tmp_path / "head" / "training.jsonl").read_text().splitlines()]
    assert lines[0]["steps"] >= 1 and lines[-1]["evaluation"]["num_texts"] == found.num_texts
    checkpoint = load_checkpoint(tmp_path / "head")
    assert checkpoint.progress.seconds >= 60 * SETTINGS.minutes
    assert checkpoint.config.draft_vocab_size == len(checkpoint.kept) == 64


class Clock:
    """Every look at it takes a hundredth of a second, on any machine."""

    now = 0.0

    def monotonic(self) -> float:
        self.now += 0.01
        return self.now


def test_a_limited_call_is_resumed_with_its_clock_and_answers(tmp_path, monkeypatch):
    clock = Clock()
    for module in (answering, data, distilling, training):
        monkeypatch.setattr(module, "time", clock)
    monkeypatch.setattr(distilling, "_FOR_THE_END", 0.0)
    target, out = tiny_target(tmp_path), tmp_path / "head"
    assert run(target, tmp_path, out, minutes=0.1, call_minutes=0.06) is None
    first, wrote = load_checkpoint(out), (out / "answers.safetensors").read_bytes()
    assert 0 < first.progress.seconds < 6
    settings = replace(SETTINGS, minutes=0.1)
    assert distill(tmp_path / "tiny.gguf", tiny_prepared(target), out, settings, CPU, Display(), resume=out) is not None
    second = load_checkpoint(out)
    assert second.progress.steps > first.progress.steps and second.progress.tokens > first.progress.tokens
    assert torch.equal(first.kept, second.kept)
    assert (out / "answers.safetensors").read_bytes() == wrote


def test_a_resumed_call_without_its_answers_writes_other_ones(tmp_path):
    target, out, elsewhere = tiny_target(tmp_path), tmp_path / "head", tmp_path / "elsewhere"
    run(target, tmp_path, out)
    settings = replace(SETTINGS, minutes=0.06)
    distill(
        tmp_path / "tiny.gguf", tiny_prepared(target), out, settings, CPU, Display(), resume=out,
        answers_folder=elsewhere,
    )  # fmt: skip
    first, second = (load_answers(folder, target.fingerprint) for folder in (out, elsewhere))
    assert first is not None and second is not None
    assert first.train.tokens.tolist() != second.train.tokens.tolist()
    assert first.held_greedy.tokens.tolist() == second.held_greedy.tokens.tolist()


def test_control_c_keeps_a_checkpoint(tmp_path, monkeypatch):
    target, out = tiny_target(tmp_path), tmp_path / "head"
    step = Trainer.step

    def interrupted(self, batch):
        if self.progress.steps == 3:
            raise KeyboardInterrupt
        return step(self, batch)

    monkeypatch.setattr(Trainer, "step", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run(target, tmp_path, out)
    assert load_checkpoint(out).progress.steps == 3


def test_control_c_keeps_the_answers_so_far(tmp_path, monkeypatch):
    target, out = tiny_target(tmp_path), tmp_path / "head"
    rounds = data._rounds

    def interrupted(*given):
        for number, ask in enumerate(rounds(*given)):
            if number == 150:  # 64 rows at once: the first answers have come back
                raise KeyboardInterrupt
            yield ask

    monkeypatch.setattr(data, "_rounds", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run(target, tmp_path, out, answer_minutes=1.0)
    found = load_answers(out, target.fingerprint)
    assert found is not None and 0 < len(found.train) < 150 and len(found.held_greedy) == 4


def test_prompts_prepared_for_another_target_are_refused(tmp_path):
    target = tiny_target(tmp_path)
    prepared = replace(tiny_prepared(target), fingerprint="0123", target="other.gguf")
    with pytest.raises(UsageError, match=r"prepared for other.gguf \(0123\) and the target is .*prepare"):
        distill(tmp_path / "tiny.gguf", prepared, tmp_path / "head", SETTINGS, CPU, Display())


def test_answers_to_other_held_out_prompts_are_refused(tmp_path):
    target, out = tiny_target(tmp_path), tmp_path / "head"
    run(target, tmp_path, out)
    prepared = tiny_prepared(target, num_held=3)
    with pytest.raises(UsageError, match=r"are to 4 held-out prompts and 3 were prepared; delete .*answers\*"):
        distill(tmp_path / "tiny.gguf", prepared, tmp_path / "new", SETTINGS, CPU, Display(), answers_folder=out)


def test_a_checkpoint_of_another_targets_head_is_refused(tmp_path):
    target, out = tiny_target(tmp_path), tmp_path / "head"
    head, kept = tiny_head(target)
    config = replace(head.config, target={"name": "other", "fingerprint": "0123"})
    save_checkpoint(Checkpoint(config, head.parameters, kept, Progress()), out)
    with pytest.raises(UsageError, match=r"a head for other \(0123\) and the target is .*; name that target"):
        distill(tmp_path / "tiny.gguf", tiny_prepared(target), out, SETTINGS, CPU, Display(), resume=out)


def test_the_learning_rate_warms_up_falls_and_warms_up_again_after_resuming(target):
    head, kept = tiny_head(target)
    settings = TrainSettings(seconds=100.0, learning_rate=1.0, shape=SHAPE)
    trainer = Trainer(target, head, kept, settings, Progress(), compile=False)

    def rate(seconds: float) -> float:
        trainer.progress.seconds = seconds
        return trainer.learning_rate()

    assert rate(0.0) < 0.02
    assert rate(4.0) == pytest.approx(0.5 * (1 + math.cos(0.04 * math.pi)))
    assert rate(50.0) == pytest.approx(0.5)
    assert rate(100.0) == pytest.approx(0.01)
    resumed = Trainer(target, head, kept, settings, Progress(seconds=50.0), compile=False)
    assert resumed.learning_rate() < 0.01
