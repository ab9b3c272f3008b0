"""`--measure`: walking along the target's answers accepts exactly what the engine accepts."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import count
from typing import Any

import pytest

from benchmarks.gguf_edit import other_vocabulary
from outpace import LLM, SamplingParams, backends
from outpace.bench.workloads import Prompt, built_in
from outpace.cli import main
from outpace.config import EngineConfig
from outpace.errors import UsageError
from outpace.models.embedded import own_head
from outpace.models.resolve import resolve_model
from outpace.plan import measure as measure_module
from outpace.plan.agreement import HeadWalk, Text, Walk, by_lookup, by_model, chances, walk, write_answers
from outpace.plan.drafts import open_draft
from outpace.plan.measure import calibrated, measure_drafts, median_costs, saved_costs
from outpace.plan.models import open_model
from outpace.speculation.costs.curves import Costs, DraftCosts, StepCosts
from outpace.speculation.proposers.ngram import NgramProposer
from tests.tiny_gguf import write_model

DEPTH, NEW = 3, 24


def answered(output: list[int], max_tokens: int = 64) -> Text:
    return Text([1, 2], SamplingParams(temperature=0.0, seed=0, max_tokens=max_tokens), frozenset(), output)


def test_a_walk_counts_as_an_engine_does():
    own = [9, 1, 2, 9, 4, 5, 9, 9]  # of the draft; the target wrote 0 to 7
    found = walk(answered(list(range(8))), 2, lambda at, depth: own[at : at + depth])
    # at 1: 1 and 2 agree, the target adds 3; at 4: 4 and 5 agree, it adds 6; at 7: 9 differs
    assert found.steps == 3 and found.drafted == [3, 2] and found.accepted == [2, 2]
    assert found.tokens_per_step == pytest.approx(1 + 4 / 3)
    assert chances([found]) == pytest.approx((2 / 3, 1.0))


def test_a_walk_ends_with_the_answer():
    found = walk(answered(list(range(5)), max_tokens=5), 4, lambda at, depth: list(range(at, at + depth)))
    assert found.drafted == [1, 1, 1, 0] and found.accepted == [1, 1, 1, 0], "the last token is the target's own"
    assert chances([]) == () and chances([Walk([0, 0], [0, 0], [0, 0], 3)]) == ()


def test_lookups_walk_along_the_text():
    text = Text(
        [1, 2, 3, 4], SamplingParams(temperature=0.0, seed=0, max_tokens=32), frozenset(), [1, 2, 3, 4, 1, 2, 3, 4]
    )
    found = walk(text, 2, by_lookup(NgramProposer(2, 4), text))
    assert found.num_drafts < found.steps and sum(found.accepted) >= 2


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_draft_model_agrees_as_in_the_engine(tmp_path, temperature):
    """The draft is the target in fewer bits, so that it agrees often and not always."""
    target, draft = write_model(tmp_path / "t.gguf"), write_model(tmp_path / "d.gguf", kind="Q4_0")
    options: dict[str, Any] = {"backend": "native", "max_context": 256, "threads": 1}
    prompts = [[5, 6, 7, 8, 9], [40, 41, 42], [100, 3, 100, 3]]
    params = [SamplingParams(temperature=temperature, seed=i, max_tokens=NEW) for i in range(len(prompts))]
    loaded = backends.load(EngineConfig(model=str(target), draft=str(draft), **options), target, draft)
    assert loaded.draft is not None
    end_ids = loaded.target.tokenizer.end_ids
    texts = [Text(prompt, each, end_ids) for prompt, each in zip(prompts, params, strict=True)]
    write_answers(loaded.target.runner, texts)
    walks = [walk(text, DEPTH, by_model(loaded.draft.runner, text)) for text in texts]
    loaded.target.runner.close()
    loaded.draft.runner.close()
    with LLM(str(target), draft=str(draft), speculation="on", method="draft", depth=DEPTH, prefix_reuse=False,
             **options) as llm:  # fmt: skip
        outputs = [llm.generate([prompt], each)[0].outputs[0] for prompt, each in zip(prompts, params, strict=True)]
    assert [text.output for text in texts] == [list(output.token_ids) for output in outputs]
    for ours, output in zip(walks, outputs, strict=True):
        theirs, used = output.speculation, len(output.speculation.drafted_per_position)
        assert ours.drafted[:used] == theirs.drafted_per_position
        assert ours.accepted[:used] == theirs.accepted_per_position
    assert 0 < sum(sum(each.accepted) for each in walks) < sum(sum(each.drafted) for each in walks)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_draft_with_another_tokenizer_agrees_as_in_the_engine(tmp_path, temperature):
    target = write_model(tmp_path / "t.gguf")
    draft = other_vocabulary(write_model(tmp_path / "same.gguf", kind="Q4_0"), tmp_path / "d.gguf", 200, "zebra")
    options: dict[str, Any] = {"backend": "native", "max_context": 256, "threads": 1}
    planned = open_model(str(target))
    prompts = [Prompt(({"role": "user", "content": text},), "x", NEW) for text in ("a b a b", "hello you", "to be")]
    found = measure_drafts(planned, [open_draft(str(draft), planned)], prompts, [temperature], max_tokens=NEW,
                           depth=DEPTH, options=options)  # fmt: skip
    [by_temperature], [costs] = found.drafts.values(), found.draft_costs.values()
    walks = by_temperature[temperature].walks
    with LLM(str(target), draft=str(draft), speculation="on", method="draft", depth=DEPTH, prefix_reuse=False,
             **options) as llm:  # fmt: skip
        params = [SamplingParams(temperature=temperature, seed=i, max_tokens=NEW) for i in range(len(prompts))]
        texts = [prompt.messages[0]["content"] for prompt in prompts]
        outputs = [llm.generate([text], each)[0].outputs[0] for text, each in zip(texts, params, strict=True)]
    for ours, output in zip(walks, outputs, strict=True):
        theirs, used = output.speculation, len(output.speculation.drafted_per_position)
        assert ours.drafted[:used] == theirs.drafted_per_position
        assert ours.accepted[:used] == theirs.accepted_per_position
    assert sum(sum(each.accepted) for each in walks) > 0
    assert costs.drafts["draft"].draw_seconds > 0, "the bridge takes time on the host"


def test_tokens_that_were_asked_for_and_not_drafted_count_as_rejected():
    short = Walk([4, 1], [4, 1], [4, 4], steps=4, num_drafts=4)
    assert chances([short]) == (1.0, 0.25) and chances([short], is_lookup=True) == (1.0, 1.0)


def test_what_cannot_be_measured_is_refused(tmp_path):
    with pytest.raises(UsageError, match="only a name; give its GGUF file or folder"):
        measure_drafts(open_model("llama-3.1-8b"), [], built_in("chat", 1), [0.0])
    target = open_model(str(write_model(tmp_path / "t.gguf")))
    with pytest.raises(UsageError, match="leaves no room for a prompt"):
        measure_drafts(target, [open_draft("ngram", target)], built_in("chat", 1), [0.0], max_tokens=100_000)
    with pytest.raises(UsageError, match="nothing to compare"):
        measure_drafts(target, [open_draft("self:int4", target)], built_in("chat", 1), [0.0])


def test_the_command_measures_a_draft_and_a_lookup_together(tmp_path, capsys):
    target, draft = write_model(tmp_path / "t.gguf", width=128, num_layers=3), write_model(tmp_path / "d.gguf")
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text(
        "".join(json.dumps({"prompt": text}) + "\n" for text in ("a b a b a b", "hello", "to be or not"))
    )
    arguments = [str(target), str(draft), "--measure", "--prompts", str(prompts), "--max-tokens", str(NEW)]
    more = ["--threads", "1", "--context", "256", "--temperature", "0", "0.8", "--json"]
    assert main(["plan", *arguments, *more]) == 0
    found = json.loads(capsys.readouterr().out)
    assert "measured here" in found["assumptions"][0] and found["machine"]["is_measured"]
    by_kind = {each["kind"]: each for each in found["drafts"]}
    assert by_kind["draft"]["acceptance"]["source"] == by_kind["lookup"]["acceptance"]["source"] == "measured"
    assert by_kind["head"]["acceptance"]["source"] == "guessed", "it would have to be trained first"
    assert all(set(each) == {"0", "0.8"} for each in found["measured"].values()) and len(found["measured"]) == 2
    shares = {each["kind"]: found["measured"][each["name"]]["0"]["match_share"] for each in by_kind.values()
              if each["name"] in found["measured"]}  # fmt: skip
    assert shares["lookup"] < shares["draft"]
    assert main(["plan", *arguments, "--threads", "1", "--context", "256", "--gpu", "h200", "--json"]) == 0
    elsewhere = json.loads(capsys.readouterr().out)
    assert "bandwidth and arithmetic of h200; only the acceptance was measured here" in elsewhere["assumptions"][0]
    [there] = [each for each in elsewhere["drafts"] if each["kind"] == "draft"]
    assert there["acceptance"]["chances"] == by_kind["draft"]["acceptance"]["chances"]
    assert there["speed"]["step_seconds"] < by_kind["draft"]["speed"]["step_seconds"] or not there["speed"]["depth"]


def test_an_interrupted_measurement_keeps_what_it_has(tmp_path, monkeypatch, capsys):
    target = open_model(str(write_model(tmp_path / "t.gguf", width=128)))
    drafts = [open_draft(str(write_model(tmp_path / f"{name}.gguf", seed=i)), target) for i, name in enumerate("ab")]
    drafts = [replace(draft, name=name) for draft, name in zip(drafts, "ab", strict=True)]
    calls = count()

    def interrupted(*arguments):
        if next(calls) == 3:  # of the second draft
            raise KeyboardInterrupt
        return calibrated(*arguments)

    monkeypatch.setattr(measure_module, "calibrated", interrupted)
    options = {"threads": 1, "backend": "native"}
    found = measure_drafts(target, drafts, [Prompt(({"role": "user", "content": "a b"},), "x", 8)], [0.0], max_tokens=8,
                           options=options)  # fmt: skip
    assert set(found.drafts) == {"a"} and "interrupted" in capsys.readouterr().err
    assert found.of(drafts[1], 0.0) is None


def test_costs_that_the_engine_kept_are_found(tmp_path, monkeypatch):
    monkeypatch.setenv("OUTPACE_CACHE_DIR", str(tmp_path / "cache"))
    path = write_model(tmp_path / "t.gguf")
    assert saved_costs(path, None, 1) is None
    with LLM(str(path), threads=1, backend="native", max_context=256) as llm:
        llm.engine.calibrate()
        kept = llm.engine.costs
    assert kept is not None
    found = saved_costs(path, None, 1)
    assert found is not None and found.target.points == pytest.approx(kept.target.points)


def test_here_uses_what_the_engine_kept_of_target_and_draft(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("OUTPACE_CACHE_DIR", str(tmp_path / "cache"))
    target, draft = write_model(tmp_path / "t.gguf", width=128, num_layers=3), write_model(tmp_path / "d.gguf")
    with LLM(str(target), draft=str(draft), threads=1, backend="native", max_context=256) as llm:
        llm.engine.calibrate()
        kept = llm.engine.costs
        assert kept is not None
        kept.drafts["draft"].passes = StepCosts({1: 50 * kept.target.seconds(1, 1)})  # to be recognised
        llm.engine.keep_costs()
    assert main(["plan", str(target), str(draft), "--here", "--threads", "1", "--depth", "1", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["assumptions"][0].startswith("Costs: the target's steps and the drafts of d as the engine measured")
    speed = next(each["speed"] for each in found["drafts"] if each["kind"] == "draft")
    assert speed["step_seconds"] > 50 * kept.target.seconds(1, 1)


@pytest.mark.model
@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_a_head_agrees_as_in_the_engine(temperature):
    path = resolve_model(None)
    options: dict[str, Any] = {"threads": 1, "max_context": 512}
    prompts = [[1, 500, 600, 700, 800], [1, 9000, 33, 9000, 33]]
    params = [SamplingParams(temperature=temperature, seed=i, max_tokens=NEW) for i in range(len(prompts))]
    loaded = backends.load(EngineConfig(model=str(path), **options), path, own_head(path))
    runner, head = loaded.target.runner, loaded.target.runner.capabilities.head
    assert head is not None
    texts = [Text(p, each, loaded.target.tokenizer.end_ids) for p, each in zip(prompts, params, strict=True)]
    write_answers(runner, texts)
    walks = []
    for text in texts:
        at = HeadWalk(runner, head, text)
        walks.append(walk(text, DEPTH, at))
        at.close()
    runner.close()
    with LLM(str(path), speculation="on", method="head", depth=DEPTH, prefix_reuse=False, **options) as llm:
        outputs = [llm.generate([p], each)[0].outputs[0] for p, each in zip(prompts, params, strict=True)]
    assert [text.output for text in texts] == [list(output.token_ids) for output in outputs]
    for ours, output in zip(walks, outputs, strict=True):
        assert ours.accepted == output.speculation.accepted_per_position
        assert ours.drafted == output.speculation.drafted_per_position
    assert sum(sum(each.accepted) for each in walks) > 0


def test_one_disturbed_calibration_of_three_has_no_say():
    """Figures that not all calibrations reached count as well; what none has stays none."""
    quiet = Costs(
        StepCosts({1: 1.0, 4: 2.0}, row_seconds=0.1), {"draft": DraftCosts(StepCosts({1: 0.2}), one_pass=True)}
    )
    longer = Costs(StepCosts({1: 1.1, 4: 2.2, 8: 4.0}, row_seconds=0.1), {"draft": DraftCosts(StepCosts({1: 0.22}))})
    longer.drafts["draft"].catch_up = StepCosts({1: 0.2, 16: 0.5})
    busy = Costs(StepCosts({1: 9.0, 4: 9.0}, row_seconds=0.0), {"draft": DraftCosts(StepCosts({1: 7.0}))})
    found = median_costs([quiet, busy, longer])
    draft = found.drafts["draft"]
    assert found.target.points == {1: 1.1, 4: 2.2, 8: 4.0} and found.target.row_seconds == 0.1
    assert draft.passes is not None and draft.passes.points == {1: 0.22} and draft.one_pass
    assert draft.catch_up is not None and draft.catch_up.points == {1: 0.2, 16: 0.5}
    assert median_costs([quiet, busy]).drafts["draft"].catch_up is None
