"""The simulator: every policy gets the same world, the report has its figures, and ours is not below plain."""

from __future__ import annotations

import argparse
import json
import math
from dataclasses import replace
from typing import Any

import pytest

from outpace.bench import simulate as command
from outpace.bench.simulate import PLAIN, compared, missed, policy_named, summarise
from outpace.bench.simulation.machines import DRAFTS, MACHINES, StepLaw
from outpace.bench.simulation.records import Record, RecordFile, code_of
from outpace.bench.simulation.rivals import FIXED_DEPTHS, AveragePerBucket, Fixed, SwitchOff, TableByBatch, all_rivals
from outpace.bench.simulation.runner import BUDGET, ORACLE, OURS, Simulation
from outpace.bench.simulation.scenarios import all_scenarios, quick_scenarios, seeded
from outpace.bench.simulation.world import Load, Proposing, Result, Scenario, constant, either, sliding, switching
from outpace.errors import UsageError

POLICIES = [PLAIN, *command.policy_names()]


def scenario(machine: str = "cpu-native", concurrency: int = 2, num: int = 8, **options: Any) -> Scenario:
    wanted = {"text": Proposing(constant(0.8)), "mean_output": 64, **options}
    return Scenario("short", machine, Load(concurrency, num), seed=5, **wanted)


def ratio(world: Scenario, policy: str | Any = OURS) -> float:
    return Simulation(world, policy).run().tokens_per_second / Simulation(world, Fixed(0)).run().tokens_per_second


# ---- the report


@pytest.fixture(scope="module")
def row() -> dict[str, Any]:
    worlds = [replace(scenario(model=Proposing(constant(0.6))), seed=seed) for seed in (5, 6)]
    results = {name: [Simulation(world, policy_named(name)).run() for world in worlds] for name in POLICIES}
    return compared(worlds[0], results)


def test_a_scenario_reports_every_policy_beside_the_others(row):
    assert set(row) == {"name", "concurrency", "drifts", "adversarial", "open_loop", "policies"}
    assert set(row["policies"]) == {OURS, ORACLE, BUDGET, *(rival.name for rival in all_rivals())}
    fixed = {f"fixed-{depth}" for depth in FIXED_DEPTHS}
    assert fixed | {"table-by-batch", "average-per-bucket", "switch-off"} == {rival.name for rival in all_rivals()}
    for name, figures in row["policies"].items():
        assert set(figures) - {"estimated_speedup"} == {
            "ratio_to_plain", "lowest", "p99_long", "p99_short", "ratio_to_oracle"
        }, name  # fmt: skip
        assert figures["p99_long"] is None, "no request is long here"
        assert all(math.isfinite(figures[key]) and figures[key] > 0 for key in ("ratio_to_plain", "p99_short"))
        assert figures["lowest"] <= figures["ratio_to_plain"]
    assert row["policies"][ORACLE]["ratio_to_oracle"] == 1.0
    assert "estimated_speedup" in row["policies"][OURS]


def test_p99_is_over_the_requests_of_all_seeds_by_their_length():
    plain = [Result(PLAIN, 100.0, [(64, 1.0)] * 50 + [(256, 2.0)]), Result(PLAIN, 200.0, [(64, 1.0)] * 50)]
    ours = [Result(OURS, 110.0, [(64, 1.0)] * 50 + [(300, 2.2)]), Result(OURS, 160.0, [(64, 1.1)] * 50)]
    found = compared(scenario(), {PLAIN: plain, OURS: ours})["policies"][OURS]
    assert found["p99_long"] == pytest.approx(1.1) and found["p99_short"] == pytest.approx(1.1)
    assert found["ratio_to_plain"] == pytest.approx((1.1 * 0.8) ** 0.5) and found["lowest"] == pytest.approx(0.8)


def test_the_report_has_the_worst_of_ours_and_is_json(row):
    other = json.loads(json.dumps(row))
    other["name"] = "bad"
    other["policies"][OURS] |= {"ratio_to_plain": 0.5, "lowest": 0.4, "p99_short": 3.0, "p99_long": 1.06}
    report = json.loads(json.dumps(summarise([row, other], POLICIES)))
    assert [each["name"] for each in report["scenarios"]] == ["short", "bad"]
    ours = report["policies"][OURS]
    assert (ours["lowest"], ours["p99_short"], ours["p99_long"]) == (0.4, 3.0, 1.06)
    assert ours["geometric_mean"] == pytest.approx((0.5 * row["policies"][OURS]["ratio_to_plain"]) ** 0.5)
    assert ours["of_oracle_stationary"] == pytest.approx(row["policies"][OURS]["ratio_to_oracle"])
    [listed] = [line for line in report["below_promise"] if line.startswith("bad")]
    assert all(text in listed for text in ("0.400 of plain", "long requests 1.060", "short requests 3.000"))
    assert all(name in command.as_text(report) for name in command.policy_names())


def test_nothing_done_is_a_report_too():
    assert "0 scenarios" in command.as_text(summarise([], POLICIES))


def options_of(*wanted: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    return parser.parse_args(["--quick", "--jobs", "1", "--seeds", "2", *wanted])


def test_the_command_writes_what_it_prints(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(command, "quick_scenarios", lambda: [scenario(num=3), replace(scenario(num=3), name="other")])
    path = tmp_path / "simulation.json"
    assert command.execute(options_of("--only", "oth", "--json", str(path), "--seeds-from", "x")) == 0
    report = json.loads(path.read_text())
    assert [each["name"] for each in report["scenarios"]] == ["other"] and report["seconds"] > 0
    assert (report["seeds_from"], report["seeds"]) == ("x", 2)
    printed = capsys.readouterr().out
    assert "1 scenarios, 2 seeds each, from x" in printed and OURS in printed and "table-by-batch" in printed


def test_what_is_on_file_is_not_simulated_again(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(command, "quick_scenarios", lambda: [scenario(num=3)])
    kept = tmp_path / "kept.jsonl"
    options = options_of("--resume", str(kept))
    assert command.execute(options) == 0
    first, lines = capsys.readouterr().out, kept.read_text().splitlines()
    assert len(lines) == 2 * len(POLICIES)
    kept.write_text("\n".join(lines[:-1]) + "\n" + lines[-1][:30])  # killed while writing the last line
    ran: list[str] = []

    def counted(world: Scenario, policy: Any) -> Simulation:
        ran.append(policy if isinstance(policy, str) else policy.name)
        return Simulation(world, policy)

    monkeypatch.setattr(command, "Simulation", counted)
    assert command.execute(options) == 0
    assert ran == [json.loads(lines[-1])["result"]["policy"]]
    assert capsys.readouterr().out == first


def test_a_number_of_seeds_that_cannot_be_is_refused():
    with pytest.raises(UsageError, match="--seeds 0"):
        command.execute(options_of("--seeds", "0"))


def test_what_other_code_made_is_simulated_again(tmp_path):
    result = Result("ours", 1.0, [(4, 1.0)])
    path = tmp_path / "kept.jsonl"
    RecordFile(path).add(Record("a", False, 1, code_of("ours"), result))
    RecordFile(path).add(Record("b", False, 1, "other", result))
    again = RecordFile(path)
    assert again.get("a", False, 1, "ours") == result
    assert again.get("a", True, 1, "ours") is None and again.get("b", False, 1, "ours") is None
    assert again.get("a", False, 2, "ours") is None


def test_missing_a_promise_is_said_only_of_ours(row):
    assert missed({"policies": {}}) == []
    low = {"lowest": 0.5, "p99_long": None, "p99_short": 1.0}
    assert missed({"policies": {ORACLE: low}}) == [] and missed({"policies": {OURS: low}}) == ["0.500 of plain"]


# ---- the world


def test_there_are_hundreds_of_scenarios_each_with_a_name_of_its_own():
    made = all_scenarios()
    assert len(made) >= 200
    assert len({each.name for each in made}) == len(made)
    assert {each.machine for each in made} == set(MACHINES)
    assert max(each.load.concurrency for each in made) == 256
    assert any(each.load.bursty for each in made) and any(each.load.intensity for each in made)
    assert any(each.drifts for each in made) and any(each.adversarial for each in made)
    assert {each.name for each in quick_scenarios()} < {each.name for each in made}


def test_seeds_differ_by_their_source_the_scenario_and_the_run():
    one, other = all_scenarios()[:2]
    made = [seeded(each, source, i).seed for each in (one, other) for source in ("a", "b") for i in range(5)]
    assert len(set(made)) == len(made)
    assert seeded(one, "a", 0).seed == made[0], "and are the same again"


def test_a_measured_draft_is_used_where_there_is_one():
    made = {each.name: each for each in all_scenarios()}
    assert made["h200 c32 model 0.8"].draft_law == DRAFTS["h200"]
    law = made["gpu-stairs c32 model 0.8"].draft_law
    assert law is not None and law.of(1, 16) == pytest.approx(0.12 * MACHINES["gpu-stairs"].of(1, 16))


def test_a_machine_with_stairs_charges_for_whole_ones():
    law = StepLaw((8, 16, 24), (1.0, 2.0, 4.0), stair=8)
    assert [law.of(1, n) for n in (1, 8, 9, 16, 17, 24, 25, 32)] == [1.0, 1.0, 2.0, 2.0, 4.0, 4.0, 6.0, 6.0]


def test_every_policy_meets_the_same_requests():
    world = scenario(model=Proposing(switching(0.1, 0.9, 20)))
    for ours, again in zip(world.requests(), world.requests(), strict=True):
        assert (ours.arrival, ours.prompt_length, ours.output_length) == (
            again.arrival,
            again.prompt_length,
            again.output_length,
        )
        assert ours.text is not None and again.text is not None and ours.model is not None and again.model is not None
        for one, other in ((ours.text, again.text), (ours.model, again.model)):
            assert (one.rate == other.rate).all() and (one.draws == other.draws).all()


@pytest.mark.parametrize("policy", [OURS, ORACLE, BUDGET, Fixed(3)], ids=["ours", "oracle", "budget", "fixed"])
def test_the_same_seed_gives_the_same_figures(policy):
    """The figures contain no time of this machine."""

    def figures(result: Result) -> tuple[Any, ...]:
        return result.tokens_per_second, result.tpots

    world = scenario(model=Proposing(constant(0.6)))
    assert figures(Simulation(world, policy).run()) == figures(Simulation(world, policy).run())
    other = replace(world, seed=6)
    assert figures(Simulation(other, policy).run()) != figures(Simulation(world, policy).run())


def test_plain_decoding_is_as_fast_as_the_machine_says():
    world = replace(scenario("compute-bound", concurrency=1, num=6), noise=0.0)
    result = Simulation(world, Fixed(0)).run()
    host = 80e-6  # per step and its token
    assert result.tokens_per_second == pytest.approx(1 / (MACHINES["compute-bound"].of(1, 1) + host))
    assert result.policy == PLAIN and result.estimated_speedup is None


def test_a_fixed_depth_gains_what_its_acceptance_and_costs_say():
    """With acceptance 0.8, three draft tokens give 1 + 0.8 + 0.64 + 0.512 tokens for a step of four."""
    world = replace(scenario("cpu-llamacpp", concurrency=1, num=60), noise=0.0)
    law, tokens = MACHINES["cpu-llamacpp"], 1 + 0.8 + 0.64 + 0.512
    seconds = law.of(1, 4) + 65e-6 + tokens * 30e-6
    assert ratio(world, Fixed(3)) == pytest.approx(tokens / seconds * (law.of(1, 1) + 80e-6), rel=0.05)


# ---- rivals


def test_a_table_by_batch_size_gets_shallower():
    depths = [TableByBatch().depth(size) for size in (1, 4, 8, 32, 64, 65, 256)]
    assert depths == sorted(depths, reverse=True) and depths[0] > 0 and depths[-1] == 0


def test_an_average_per_bucket_follows_what_is_accepted_there():
    rival = AveragePerBucket()
    for _ in range(50):
        rival.observe(4, 4, 12, 0)
        rival.observe(64, 64, 448, 448)
    assert rival.depth(4) < rival.depth(64)


def test_switching_off_is_for_good():
    rival = SwitchOff()
    rival.observe(1, 50, 200, 20)
    assert rival.depth(1) == 0
    rival.observe(1, 50, 200, 200)
    assert rival.depth(1) == 0


# ---- the oracle


ORACLE_WORLDS: dict[str, Scenario] = {
    "text": scenario(num=24, text=Proposing(constant(0.7))),
    "model": scenario("h200", concurrency=4, num=24, text=None, model=Proposing(constant(0.7)), draft_share=0.12),
    "steep": scenario("cpu-llamacpp", concurrency=4, num=24),
    "nothing pays": scenario("compute-bound", num=24),
    "dear draft": scenario("cpu-pair", num=24, text=None, model=Proposing(constant(0.9)), draft_share=None),
}


@pytest.mark.parametrize("name", ORACLE_WORLDS)
def test_no_fixed_depth_beats_the_oracle(name):
    """The oracle knows rates, not draws, so a fixed depth can be slightly faster by chance."""
    world = replace(ORACLE_WORLDS[name], noise=0.0)
    best = max(ratio(world, Fixed(depth)) for depth in (0, 1, 2, 3, 4, 6, 8))
    assert ratio(world, ORACLE) >= 0.985 * best


def test_the_oracle_is_bound_by_no_rule_about_single_requests():
    """Half of the requests gain nothing and get slower, but the batch as a whole is faster."""
    world = scenario(concurrency=8, num=60, mean_output=128, text=Proposing(either((0.05, 0.95))))
    assert ratio(world, ORACLE) > 1.2


# ---- ours


def long(machine: str = "cpu-native", concurrency: int = 2, **options: Any) -> Scenario:
    """As long as the scenarios of `outpace bench simulate`, so that the cost of exploration is spread out."""
    return scenario(machine, concurrency, 80, mean_output=128, **options)


# Nothing to gain, or much to lose by a wrong estimate.
LOSING: dict[str, Scenario] = {
    "nothing pays": long("compute-bound"),
    "model that is wrong": long("h200", 4, text=None, model=Proposing(constant(0.1))),
    "spiteful": long(text=Proposing(constant(0.9), rejects_after_draft=True)),
}
SHORT: dict[str, Scenario] = {
    "text that is right": scenario(num=12),
    "text that is wrong": scenario(num=12, text=Proposing(constant(0.1))),
    "vain": scenario(num=16, text=Proposing(constant(0.15), overconfidence=3.0)),
    "mixed": scenario(concurrency=8, num=32, text=Proposing(either((0.1, 0.9)))),
    "steep": scenario("cpu-llamacpp", concurrency=4, num=16),
    "stairs": scenario("stairs-of-8", concurrency=4, num=16, text=Proposing(constant(0.6))),
    "model": scenario("h200", concurrency=4, num=16, text=None, model=Proposing(constant(0.7))),
    "dear draft": scenario(num=12, text=None, model=Proposing(constant(0.8)), draft_share=0.4),
    "sliding": scenario(num=16, text=Proposing(sliding(0.9, 0.1))),
    "spiteful": scenario(num=64, text=Proposing(constant(0.9), rejects_after_draft=True)),
}


@pytest.mark.parametrize("world", [*SHORT.values(), *LOSING.values()], ids=[*SHORT, *LOSING])
def test_ours_is_not_slower_than_plain_decoding(world):
    assert ratio(world) >= 0.98


@pytest.mark.parametrize("name", ["model that is wrong", "spiteful"])
def test_ours_is_not_slower_from_a_cold_start_either(name):
    load = replace(LOSING[name].load, num_requests=16 if LOSING[name].model is None else 24)
    worlds = [replace(LOSING[name], load=load, mean_output=64, seed=seed) for seed in range(5, 11)]
    assert min(ratio(world) for world in worlds) >= 0.98


@pytest.mark.parametrize(("name", "least"), [("text that is right", 1.5), ("model", 1.2)])
def test_ours_gains_where_there_is_something_to_gain(name, least):
    assert ratio(SHORT[name]) > least


def test_the_estimate_is_about_what_was_gained():
    world = scenario(num=30)
    result = Simulation(world, OURS).run()
    plain = Simulation(world, Fixed(0)).run()
    assert result.estimated_speedup == pytest.approx(result.tokens_per_second / plain.tokens_per_second, rel=0.05)
