"""Derived machines of several GPUs, and the simulated fleet of replicas."""

from __future__ import annotations

from dataclasses import replace

import pytest

from outpace.bench.simulation.fleet import Fleet, simulate
from outpace.bench.simulation.machines import MACHINES
from outpace.bench.simulation.sharded import LLAMA_70B, SHARDED, communication_seconds, sharded_law
from outpace.ray.prefixes import goes_to_cached


def test_a_rank_does_its_share_and_the_sums_come_on_top():
    for num, name in ((2, "70b-2xh200"), (4, "70b-4xh200"), (8, "70b-8xh200")):
        alone = MACHINES["h200"].of(1, 1) * 69.5 / 8.03 / num
        assert SHARDED[name].of(1, 1) == pytest.approx(alone + communication_seconds(LLAMA_70B, num, 1))
    assert sharded_law(LLAMA_70B, 1).of(1, 1) == pytest.approx(MACHINES["h200"].of(1, 1) * 69.5 / 8.03)


def test_a_step_cannot_be_faster_than_reading_its_weights():
    for name, law in SHARDED.items():
        num = int(name.split("-")[1][0])
        assert law.of(1, 1) > 2 * LLAMA_70B.num_parameters / num / 4.8e12


def test_routing_by_prefix_finds_more_prefixes_and_makes_nobody_wait_longer():
    fleet = Fleet(num_replicas=50, load=0.85, num_requests=6000)
    found = {rule: simulate(fleet, rule) for rule in ("random", "better of two", "least busy", "prefix")}
    assert found["prefix"].hit_share > 1.8 * found["least busy"].hit_share
    assert found["prefix"].mean_wait < found["least busy"].mean_wait < found["random"].mean_wait
    assert found["prefix"].p99_wait <= found["least busy"].p99_wait


def test_an_idle_fleet_waits_for_prefills_alone():
    fleet = Fleet(num_replicas=20, load=0.05, num_requests=2000)
    assert simulate(fleet, "least busy").p99_wait == pytest.approx(fleet.prefill_seconds)
    whole_cache = replace(fleet, num_cached=fleet.num_prefixes)
    assert simulate(whole_cache, "prefix").mean_wait < simulate(whole_cache, "least busy").mean_wait


def test_a_request_does_not_wait_for_a_prefix_while_another_replica_is_free():
    assert goes_to_cached(7, 0, at_once=8)
    assert not goes_to_cached(8, 0, at_once=8)
    assert goes_to_cached(9, 8, at_once=8)
    assert not goes_to_cached(12, 8, at_once=8)
