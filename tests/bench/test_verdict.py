"""The verdict on synthetic runs with known speeds: good and bad ones, tails, unsuitable drafts, too little data."""

from __future__ import annotations

import re

import pytest

from outpace.bench.plan import Plan
from outpace.bench.results import suspects
from tests.bench_results import cell, flat, made_results

BOTH = ("json", "story")


def kinds(results):
    return {finding["kind"] for finding in results["verdict"]["findings"]}


def sentence(results, kind):
    return next(f["sentence"] for f in results["verdict"]["findings"] if f["kind"] == kind)


def test_a_good_case_is_recommended_with_its_figures():
    cold, warm = flat(BOTH, auto=1.5, suffix_4=1.45), flat(BOTH, auto=1.4, suffix_4=1.3)
    results = made_results([cell(cold, BOTH), cell(warm, BOTH, temperature=0.7)])
    verdict = results["verdict"]
    assert verdict["decision"] == "use" and verdict["setting"] == "auto"
    assert "1.45x" in verdict["sentence"] or "1.44x" in verdict["sentence"]
    assert verdict["commands"]["outpace"] == "outpace serve --model m.gguf --speculation auto"
    assert '"num_speculative_tokens": 4' in verdict["commands"]["vllm"]
    assert sentence(results, "equality").startswith("All 48 answers")
    assert "1.50x" in sentence(results, "temperature")


def test_a_bad_case_is_left_off():
    results = made_results(
        [cell(flat(BOTH, suffix_4=0.8), BOTH), cell(flat(BOTH, suffix_4=0.7), BOTH, temperature=1.5)]
    )
    verdict = results["verdict"]
    assert verdict["decision"] == "leave_off"
    assert verdict["commands"]["outpace"].endswith("--speculation off")
    assert verdict["commands"]["llama.cpp"] == "llama-server -m m.gguf"


def test_a_mixed_workload_is_split_by_class():
    speeds = {"off": {"json": 1.0, "story": 1.0}, "suffix:4": {"json": 1.8, "story": 0.8}}
    results = made_results([cell(speeds, BOTH, num_blocks=24)])
    verdict = results["verdict"]
    assert verdict["decision"] == "use_for_some"
    assert verdict["classes_that_gain"] == ["json"] and verdict["classes_that_lose"] == ["story"]
    assert "json at 1.79x" in verdict["sentence"] and "story at 0.80x" in verdict["sentence"]
    assert "story" in verdict["commands"]["requests that lose"]


def test_no_difference_leaves_auto_on_and_says_it_is_free():
    results = made_results([cell(flat(BOTH, auto=1.0), BOTH, num_blocks=30)])
    assert results["verdict"]["decision"] == "leave_off"
    assert "costs nothing here" in results["verdict"]["sentence"]


@pytest.mark.parametrize("options", [{"num_blocks": 2}, {"num_blocks": 5}])
def test_too_little_data_is_said_to_be_too_little(options):
    results = made_results([cell(flat(BOTH, auto=1.1), BOTH, **options)])
    assert results["verdict"]["decision"] == "too_little_data"
    assert results["verdict"]["commands"] == {}


def test_enough_blocks_with_a_wide_interval_are_no_difference_beyond_noise():
    results = made_results([cell(flat(BOTH, auto=1.1), BOTH, num_blocks=8, noise=0.6)])
    verdict = results["verdict"]
    assert verdict["decision"] == "no_difference" and verdict["commands"] == {}
    assert re.match(r"No difference beyond noise: with auto, \d\.\d\dx \(0\.\d\d to \d\.\d\d\)", verdict["sentence"])


def test_nothing_to_compare_with_gives_no_verdict():
    results = made_results([cell({"auto": {"json": 1.0, "story": 1.0}}, BOTH)])
    assert results["verdict"]["decision"] == "too_little_data"
    assert "no verdict" in results["verdict"]["sentence"]


def mixed_tail():
    """Three quarters of the requests gain, one quarter loses: the median is better and the tail worse."""
    classes = ("json", "json", "json", "story")
    speeds = {"off": {"json": 1.0, "story": 1.0}, "suffix:4": {"json": 1.6, "story": 0.5}}
    return cell(speeds, classes, temperature=1.0, concurrency=4, num_blocks=8)


def test_a_worse_tail_behind_a_better_median_is_named_with_its_class():
    results = made_results([mixed_tail()])
    text = sentence(results, "tail")
    assert "at P50" in text and "at P99" in text
    assert "the class that loses is story" in text


def test_the_culprit_is_run_alone_to_confirm():
    results = made_results([mixed_tail()])
    (plan,) = suspects(results, Plan((mixed_tail()[0],), {}, 1.0))
    assert plan.purpose == "confirm" and plan.only_class == "story"
    assert [setting.name for setting in plan.settings] == ["off", "suffix:4"]
    assert (plan.temperature, plan.load.name) == (1.0, "4 at once")
    alone = cell({"off": {"story": 1.0}, "suffix:4": {"story": 0.7}}, ("story",), temperature=1.0, concurrency=4,
                 purpose="confirm", only_class="story", num_blocks=8)  # fmt: skip
    text = sentence(made_results([mixed_tail(), alone]), "tail")
    assert "run alone it has 0.7" in text and "confirms it" in text


def test_an_even_workload_has_no_tail_to_speak_of():
    results = made_results([cell(flat(BOTH, suffix_4=1.4), BOTH, concurrency=4, num_blocks=8)])
    assert "tail" not in kinds(results)
    assert suspects(results, Plan((), {}, 1.0)) == []


@pytest.mark.parametrize(
    ("speed", "rate", "share", "kind", "words"),
    [
        (0.5, 0.04, 0.3, "draft_mismatched", "does not belong to this target"),
        (0.8, 0.4, 0.3, "draft_weak", "too weak"),
        (0.9, 0.8, 0.6, "draft_big", "too big"),
        (1.6, 0.8, 0.3, "draft_fits", "fits"),
    ],
)
def test_drafts_are_judged_by_what_they_cost_and_bring(speed, rate, share, kind, words):
    made = cell(flat(BOTH, draft_4=speed), BOTH, acceptance={"draft:4": rate}, draft_share=share)
    assert words in sentence(made_results([made]), kind)


def test_uneven_acceptance_and_the_best_fixed_setting_are_reported():
    grid = cell(flat(BOTH, suffix_4=1.2), BOTH, acceptance={"suffix:4": 0.3})
    sweep = cell(flat(BOTH, auto=1.3, suffix_2=1.1, suffix_8=1.4), BOTH, purpose="sweep")
    results = made_results([grid, sweep])
    assert "at most 30%" in sentence(results, "low_acceptance")
    assert "the best is suffix:8 with 1.39x" in sentence(results, "best_fixed")


def test_failures_are_shown_as_failures():
    plan, paired = cell(flat(BOTH, auto=1.5), BOTH)
    paired.runs["auto"][0].trials[0].error = "the server answered 503: too busy"
    results = made_results([(plan, paired)])
    assert "1 of 12 requests failed with auto" in sentence(results, "failures")
    assert results["cells"][0]["settings"]["auto"]["num_failed"] == 1
    assert results["cells"][0]["settings"]["auto"]["good_share"] == pytest.approx(11 / 12)


def test_a_server_that_keeps_its_caches_is_mentioned():
    results = made_results([cell(flat(BOTH, auto=1.5), BOTH)], caches_emptied=False)
    assert "keeps its caches" in sentence(results, "kept_caches")
