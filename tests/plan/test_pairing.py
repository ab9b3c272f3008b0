"""Tokenizers, guesses, verdicts and advice."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from outpace.errors import UsageError
from outpace.plan.advice import advise, precision_table
from outpace.plan.bridge import HOST_SECONDS, bridge_of
from outpace.plan.drafts import open_draft
from outpace.plan.guesses import Conditions, Measured, ratio_evidence
from outpace.plan.known_models import KNOWN, KnownModel
from outpace.plan.machines import custom, machine
from outpace.plan.memory import Deployment, divide
from outpace.plan.models import open_model
from outpace.plan.pairing import judge, ranked
from outpace.plan.planning import make_plan, open_wanted
from outpace.plan.vocabularies import Compatibility, Vocabulary, compare, compare_tokens
from outpace.speculation.costs.curves import Costs, DraftCosts, StepCosts
from outpace.speculation.policy.tunables import TUNABLES
from outpace.speculation.proposers.text_bridge import ENOUGH_SHARED
from tests.tiny_gguf import write_model

H100 = Deployment(machine("h100"), 2, 0.92)


def pairing(target, draft: str, to: Deployment = H100, conditions: Conditions | None = None, **options):
    plain = divide(target, None, to)
    return judge(target, open_draft(draft, target), to, conditions or Conditions(), plain_memory=plain, **options)


@pytest.fixture(scope="module")
def llama():
    return open_model("llama-3.1-70b", "int8")


# ---- tokenizers

TOKENS = [b"<s>", b"a", b"b", b"c", b"d"]


def vocabulary(*tokens: bytes, is_byte_level: bool = True) -> Vocabulary:
    return Vocabulary(list(tokens), is_byte_level)


def test_identical_vocabularies():
    found = compare_tokens(vocabulary(*TOKENS), vocabulary(*TOKENS))
    assert found.verdict == "identical" and found.overlap == found.shared == 1.0 and not found.needs_bridge
    padded = compare_tokens(vocabulary(*TOKENS, b"", b""), vocabulary(*TOKENS))
    assert padded.verdict == "identical", "padding is no difference"


def test_extra_tokens_are_told_from_different_ones():
    found = compare_tokens(vocabulary(*TOKENS, b"<think>"), vocabulary(*TOKENS))
    assert found.verdict == "extra" and "the target has 1 more tokens, the first '<think>' (5)" in found.sentence
    assert found.overlap == pytest.approx(5 / 6) and found.shared == 1.0
    assert found.needs_bridge, "as the engine has it"


def test_the_first_difference_is_named():
    found = compare_tokens(vocabulary(*TOKENS), vocabulary(b"<s>", b"a", b"x", b"c", b"b", b"y"))
    assert found.verdict == "different" and found.needs_bridge and found.first_difference == 2
    assert found.overlap == pytest.approx(4 / 5) and found.shared == pytest.approx(4 / 6)
    assert "80.0%" in found.sentence and "token 2, 'b' in the target and 'x' in the draft" in found.sentence


def test_what_is_shared_does_not_depend_on_how_a_file_spells_it():
    """GPT-2's characters for bytes, and SentencePiece's mark for a space and names of bytes."""
    ours = vocabulary("Ġa".encode(), "Ċ".encode(), b"b")
    theirs = vocabulary("▁a".encode(), b"<0x0A>", b"c", is_byte_level=False)
    found = compare_tokens(ours, theirs)
    assert found.verdict == "different" and found.shared == pytest.approx(2 / 3)


def test_vocabularies_are_read_from_both_kinds_of_files(tmp_path):
    path = write_model(tmp_path / "a.gguf")
    gguf = open_model(str(path))
    assert compare(gguf, open_model(str(write_model(tmp_path / "b.gguf", seed=3)))).verdict == "identical"
    from outpace.models.gguf_header import read_strings

    tokens = [token.decode() for token in read_strings(path, "tokenizer.ggml.tokens")]
    assert len(tokens) == gguf.shape.vocab_size and read_strings(path, "no.such.key") == []
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({
        "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": 280,
    }))  # fmt: skip
    ids = {token: i for i, token in enumerate(tokens)}
    (folder / "tokenizer.json").write_text(json.dumps({"model": {"vocab": ids}, "added_tokens": []}))
    assert compare(gguf, open_model(str(folder))).verdict == "identical"
    ids[tokens[7]], ids[tokens[8]] = 8, 7
    (folder / "tokenizer.json").write_text(json.dumps({"model": {"vocab": ids}}))
    assert compare(gguf, open_model(str(folder))).first_difference == 7


def test_known_tokenizers_are_compared_by_name():
    assert compare(open_model("llama-3.1-70b"), open_model("llama-3.2-1b")).verdict == "identical"
    assert compare(open_model("qwen3-8b"), open_model("qwen2.5-0.5b")).verdict == "extra"
    assert compare(open_model("llama-3.1-70b"), open_model("qwen2.5-7b")).verdict == "different"


# ---- judging


def test_a_file_with_the_name_of_a_known_model_has_its_tokenizer(tmp_path, monkeypatch):
    file = write_model(tmp_path / "Tiny-1B-Instruct.Q8_0.gguf")
    shape = open_model(str(file)).shape
    for vocab_size, tokenizer in ((shape.vocab_size, "tiny"), (99, None)):
        known = KnownModel("tiny-1b", "tiny", "tiny", 1, replace(shape, vocab_size=vocab_size), "a/tiny")
        monkeypatch.setitem(KNOWN, "tiny-1b", known)
        assert open_model(str(file)).tokenizer == tokenizer
        verdict = compare(open_model("llama-3.1-8b"), open_model(str(file))).verdict
        assert verdict == ("different" if tokenizer else "unknown")


def test_a_guess_starts_from_the_policys_prior(llama):
    found = pairing(llama, "llama-3.1-8b")
    assert found.guess.source == "guessed" and found.chance == pytest.approx(TUNABLES.model_prior, abs=0.01)
    assert found.low.speedup < found.speed.speedup < found.high.speedup
    warm = pairing(llama, "llama-3.1-8b", conditions=Conditions(temperature=1.0))
    assert warm.chance < found.chance and warm.speed.speedup < found.speed.speedup
    assert pairing(llama, "llama-3.2-1b").chance < found.chance, "a smaller draft agrees less"
    code = pairing(llama, "llama-3.1-8b", conditions=Conditions(workload="code"))
    assert code.chance > found.chance


def test_given_and_measured_acceptance_replace_the_guess(llama):
    given = pairing(llama, "llama-3.1-8b", conditions=Conditions(acceptance=(0.7, 0.6)))
    assert given.guess.source == "given" and given.chance == pytest.approx(0.7) and given.low == given.high
    costs = Costs(StepCosts({1: 1.0, 64: 1.0}))
    measured = Measured((0.9,), draft_costs=DraftCosts(StepCosts({1: 0.1, 64: 0.1})))
    found = pairing(llama, "llama-3.1-8b", target_step=costs, measured=measured, conditions=Conditions(depth=2))
    assert found.guess.source == "measured" and found.speed.tokens_per_step == pytest.approx(1 + 0.9 + 0.81)
    assert found.speed.speedup == pytest.approx(2.71 / 1.2, rel=0.01)


def test_a_draft_larger_than_its_target_is_refused():
    with pytest.raises(UsageError, match="a draft must be smaller than its target, so name them the other way round"):
        pairing(open_model("llama-3.1-8b"), "llama-3.1-70b")


@pytest.mark.parametrize(
    ("target", "draft", "to", "words"),
    [
        ("llama-3.1-70b", "self:int4", H100, "on a single GPU only"),
        ("llama-3.1-8b", "self:int4", Deployment(machine("epyc-9654")), "on a single GPU only"),
        ("qwen3-30b-a3b", "self:int4", Deployment(machine("h200")), "experts to fp8 or int8 only"),
        ("llama-3.1-70b", "smollm2-135m", replace(H100, draft_gpus=2), "9 attention heads do not divide over 2 GPUs"),
    ],
)
def test_what_no_engine_runs_there_is_no_candidate(target, draft, to, words):
    found = pairing(open_model(target), draft, to)
    assert found.verdict == "cannot" and words in found.reason


def test_another_tokenizer_is_bridged_at_a_price(llama):
    """Names alone do not say how much is shared, so the plan names both ways."""
    found = pairing(llama, "qwen2.5-0.5b")
    assert found.verdict in ("use", "maybe") and found.bridge is not None and found.bridge.way == "text"
    assert "string-level exact match" in found.bridge.sentence and "intersection" in found.bridge.sentence
    assert pairing(llama, "qwen2.5-0.5b", conditions=Conditions(temperature=1.0)).bridge.way == "tokens"
    own = pairing(llama, "llama-3.2-1b")
    assert own.bridge is None and own.drafting.costs.drafts["draft"].draw_seconds == 0.0
    assert found.drafting.costs.drafts["draft"].draw_seconds == found.bridge.token_seconds > 0.0


@pytest.mark.parametrize(
    ("shared", "temperature", "way"), [(0.9, 0.0, "text"), (0.9, 1.0, "tokens"), (0.3, 1.0, "text")]
)
def test_the_way_is_the_engines(shared, temperature, way):
    different = Compatibility("different", "", 0.5, 0, shared)
    passes = StepCosts({1: 1e-3, 3: 1.4e-3})
    found = bridge_of(different, temperature, passes, 1000, machine("epyc-9654"))
    assert found is not None and found.way == way and (f"{shared:.0%}" in found.sentence)
    assert ("intersection" in found.sentence) == (shared > ENOUGH_SHARED)
    assert found.token_seconds == pytest.approx(HOST_SECONDS + 0.05e-3), "a token more in one of four passes"
    assert bridge_of(Compatibility("identical", ""), temperature, passes, 1000, machine("h100")) is None


def test_a_draft_that_takes_the_room_is_told(llama):
    found = pairing(llama, "llama-3.1-8b")
    assert found.verdict == "maybe" and "outweighs its gain when the cache is full" in found.reason
    plain = divide(llama, None, H100)
    assert found.full_load[1] < found.full_load[0] and found.memory.sequences < plain.sequences / 2
    sharded = pairing(llama, "llama-3.1-8b", replace(H100, draft_gpus=2))
    assert sharded.memory.sequences > found.memory.sequences


def test_where_the_gain_ends(llama):
    found = pairing(llama, "llama-3.1-8b", conditions=Conditions(depth=5))
    assert found.loss_from is not None
    turned = [each for each in found.at_depth if each.rows >= found.loss_from]
    assert all(each.speedup < 1 for each in turned) and found.at_depth[0].speedup > 1
    assert found.break_even is not None
    at = pairing(llama, "llama-3.1-8b", conditions=Conditions(depth=5, acceptance=(found.break_even,)))
    assert at.speed.speedup == pytest.approx(1.0, abs=0.01)


def test_the_ratio_of_costs_is_of_bytes_alone_and_of_operations_under_load():
    target = open_model("llama-3.1-8b")
    short = replace(H100, gpus=1, context=64)
    one, many = (pairing(target, "llama-3.2-1b", short, Conditions(rows=rows)) for rows in (1, 512))
    weights = open_model("llama-3.2-1b").bytes_read(1) / target.bytes_read(1)
    assert weights < one.cost_ratio < 1.4 * weights, "and launches of layers"
    active = open_model("llama-3.2-1b").shape.active_parameters / target.shape.active_parameters
    assert many.cost_ratio == pytest.approx(active, rel=0.3)
    assert pairing(target, "ngram", replace(H100, gpus=1)).cost_ratio == 0.0


def test_the_rule_of_sizes_comes_with_its_evidence():
    assert "within the rule" in ratio_evidence(9)
    assert "larger draft than the rule" in ratio_evidence(3)
    assert "1:140" in ratio_evidence(57)


def test_the_fastest_usable_draft_comes_first(llama):
    names = ("llama-3.1-8b", "llama-3.2-1b", "qwen2.5-0.5b", "self:int4", "ngram")
    order = [each.draft.name for each in ranked([pairing(llama, name) for name in names])]
    assert order[0] == "llama-3.2-1b" and order[-1] == "self:int4"


def test_a_guess_costs_a_draft_no_place_and_the_memory_it_takes_does(llama):
    """`auto` decodes plainly where a draft does not pay, but it does not give memory back."""
    sure = pairing(llama, "ngram")
    guess, heavy = (replace(sure, verdict="maybe", speed=replace(sure.speed, speedup=1.3)) for _ in range(2))
    heavy = replace(heavy, kept_when_full=0.5)
    no, equal = replace(sure, verdict="no"), replace(sure, verdict="maybe")
    assert ranked([no, heavy, equal, sure, guess]) == [guess, sure, equal, heavy, no]


def test_a_draft_that_takes_most_of_the_room_is_not_advised(llama):
    """The articles' 8B beside a 70B on two GPUs of 80 GB: faster for one request, less than half with a full cache."""
    found = pairing(llama, "llama-3.1-8b")
    assert found.speed.speedup > pairing(llama, "ngram").speed.speedup and found.kept_when_full < 0.5
    assert advice_for(llama, ["llama-3.1-8b"])["advice"]["decision"] == "another_draft"


def test_a_surer_draft_is_named_beside_a_faster_one():
    """A 0.5B with another tokenizer is faster for one request, and takes room that a full machine would miss."""
    report = advice_for(open_model("llama-3.1-8b"), ["qwen2.5-0.5b"], Deployment(machine("h100"), context=4096))
    named, sure = (
        next(draft for draft in report["drafts"] if draft["name"] == name) for name in ("qwen2.5-0.5b", "ngram")
    )
    assert (named["verdict"], sure["verdict"]) == ("maybe", "use")
    assert named["speed"]["speedup"] > sure["speed"]["speedup"]
    order = [draft["name"] for draft in report["drafts"]]
    assert order.index("qwen2.5-0.5b") < order.index("ngram")
    assert report["advice"]["headline"].startswith("Try ")
    assert any("ngram is surer: " in each for each in report["advice"]["sentences"])


@pytest.mark.parametrize(
    ("options", "words"),
    [({"workload": "poetry"}, "no workload 'poetry'"), ({"temperature": -1.0}, "temperature must be"),
     ({"acceptance": (1.5,)}, "a share between 0 and 1")],
)  # fmt: skip
def test_conditions_are_checked(options, words):
    with pytest.raises(UsageError, match=words):
        Conditions(**options)


# ---- advice


def advice_for(target, drafts, to=H100, conditions=None):
    wanted = open_wanted(target, drafts, None, None)
    return make_plan(wanted, to, conditions or Conditions())


def test_advice_names_a_draft_a_depth_and_flags(llama):
    report = advice_for(llama, ["llama-3.2-1b"])
    advice = report["advice"]
    assert advice["decision"] == "this_draft" and advice["headline"].startswith("Use llama-3.2-1b: ")
    text = " ".join(advice["sentences"])
    assert "the policy's prior for a draft model, 1:57 is below the rule" in text
    assert f"A pass of it takes {report['drafts'][0]['cost_ratio']:.0%} of a plain step" in text
    assert report["drafts"][0]["family"] == "llama-3"
    assert any("accepted over tried" in each for each in advice["watch"]) and report["assumptions"]


def test_a_sharded_draft_is_said_to_be_for_other_engines(llama):
    report = advice_for(llama, ["llama-3.2-1b"], replace(H100, draft_gpus=2))
    assert any("Outpace runs it whole on the first GPU" in each for each in report["assumptions"])


def test_advice_when_nothing_fits():
    report = advice_for(open_model("llama-3.1-70b"), ["llama-3.1-8b"], Deployment(machine("h100"), 1))
    advice = report["advice"]
    assert advice["decision"] == "does_not_fit" and "does not fit 1 x h100" in advice["headline"]
    assert any("--precision int4" in each for each in advice["sentences"])
    assert any("--gpus" in each for each in advice["sentences"])
    hopeless = advice_for(open_model("llama-3.1-405b"), [], Deployment(custom("tiny", 4, 100, 10)))
    assert "smaller model, a larger machine" in hopeless["advice"]["sentences"][0]


def test_advice_without_a_draft_where_none_pays():
    conditions = Conditions(rows=128, acceptance=(0.05,))
    report = advice_for(open_model("llama-3.1-8b"), ["llama-3.2-1b"], Deployment(machine("h200")), conditions)
    named = next(draft for draft in report["drafts"] if draft["name"] == "llama-3.2-1b")
    assert named["verdict"] == "no" and report["advice"]["decision"] in ("no_draft", "another_draft")
    assert any(each.startswith("llama-3.2-1b: it is not faster") for each in report["advice"]["sentences"])


def test_alternatives_are_added(llama):
    small = open_model("llama-3.1-8b")
    kinds = {draft["kind"] for draft in advice_for(small, [], replace(H100, gpus=1))["drafts"]}
    assert kinds == {"draft", "head", "self", "lookup"}
    several = advice_for(llama, [])["drafts"]
    assert {draft["kind"] for draft in several} == {"draft", "head", "lookup"}, "copies are made on one GPU only"
    assert len(open_wanted(llama, ["head", "ngram", "head"], None, None).named) == 2, "a draft named twice counts once"


def test_candidates_are_ranked_and_others_named(tmp_path):
    target = open_model(str(write_model(tmp_path / "target.gguf", width=128, hidden=256, num_layers=4)))
    folder = tmp_path / "drafts"
    folder.mkdir()
    write_model(folder / "small.gguf")
    write_model(folder / "large.gguf", width=256, hidden=512, num_layers=8)
    (folder / "broken.gguf").write_bytes(b"GGUF")
    (folder / "notes.txt").write_text("not a model")
    wanted = open_wanted(target, [], None, folder)
    assert [draft.name for draft in wanted.others if draft.kind == "draft"] == ["small.gguf"]
    assert set(wanted.skipped) == {"broken.gguf", "large.gguf"} and "no fewer than" in wanted.skipped["large.gguf"]
    with pytest.raises(UsageError, match="is not a folder"):
        open_wanted(target, [], None, folder / "notes.txt")


def test_the_table_of_precisions_follows_the_gpu(llama):
    draft = open_draft("llama-3.1-8b", llama)
    assert [row.target for row in precision_table(llama, draft, H100)] == ["bf16", "fp8", "fp8", "int4", "int4"]
    old = Deployment(machine("a100"), 2)
    assert [row.target for row in precision_table(llama, None, old)] == ["bf16", "int8", "int4"]


def test_more_requests_than_fit_are_told(llama):
    few, many = (advice_for(llama, ["llama-3.2-1b"], conditions=Conditions(rows=rows)) for rows in (4, 64))
    told = [[each for each in report["advice"]["sentences"] if "the others wait" in each] for report in (few, many)]
    assert not told[0] and told[1] and f"Only {many['memory']['sequences']} sequences" in told[1][0]


def test_advice_needs_no_named_draft(llama):
    plain = divide(llama, None, H100)
    found = advise(llama, [], [], plain, H100, Conditions())
    assert found.decision == "no_draft" and "--speculation off" in found.commands["outpace"]
