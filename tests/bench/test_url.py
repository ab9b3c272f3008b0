"""Servers by URL: the requests they get, the measured times, and their metrics pages."""

from __future__ import annotations

import pytest

from outpace.bench.loads import Closed, Open
from outpace.bench.server_metrics import between, read_metrics
from outpace.bench.settings import AUTO, PLAIN, Setting
from outpace.bench.url_target import UrlTarget
from outpace.bench.workloads import built_in
from outpace.errors import OutpaceError, UsageError
from tests.fake_openai_server import FakeServer

ON = Setting("on", AUTO.speculation)

NEW_VLLM = """\
# HELP vllm:spec_decode_num_drafts_total Number of spec decoding drafts.
# TYPE vllm:spec_decode_num_drafts_total counter
vllm:spec_decode_num_drafts_total{engine="0",model_name="llama"} 1000.0
# TYPE vllm:spec_decode_num_draft_tokens_total counter
vllm:spec_decode_num_draft_tokens_total{engine="0",model_name="llama"} 3000.0
# TYPE vllm:spec_decode_num_accepted_tokens_total counter
vllm:spec_decode_num_accepted_tokens_total{engine="0",model_name="llama"} 1500.0
# TYPE vllm:spec_decode_num_accepted_tokens_per_pos_total counter
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="llama",position="0"} 800.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="llama",position="1"} 500.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="llama",position="2"} 200.0
# TYPE vllm:e2e_request_latency_seconds histogram
vllm:e2e_request_latency_seconds_bucket{le="0.3",model_name="llama"} 4.0
vllm:e2e_request_latency_seconds_bucket{le="+Inf",model_name="llama"} 9.0
vllm:e2e_request_latency_seconds_sum{model_name="llama"} 3.5
vllm:e2e_request_latency_seconds_count{model_name="llama"} 9.0
"""
OLD_VLLM = """\
# TYPE vllm:spec_decode_draft_acceptance_rate gauge
vllm:spec_decode_draft_acceptance_rate{model_name="opt"} 0.65
# TYPE vllm:spec_decode_efficiency gauge
vllm:spec_decode_efficiency{model_name="opt"} 0.6
# TYPE vllm:spec_decode_num_accepted_tokens_total counter
vllm:spec_decode_num_accepted_tokens_total{model_name="opt"} 650.0
# TYPE vllm:spec_decode_num_draft_tokens_total counter
vllm:spec_decode_num_draft_tokens_total{model_name="opt"} 1000.0
# TYPE vllm:spec_decode_num_emitted_tokens_total counter
vllm:spec_decode_num_emitted_tokens_total{model_name="opt"} 830.0
"""
SGLANG = """\
# TYPE sglang:spec_accept_length gauge
sglang:spec_accept_length{model_name="glm",tp_rank="0"} 2.9
# TYPE sglang:spec_accept_rate gauge
sglang:spec_accept_rate{model_name="glm",tp_rank="0"} 0.27
"""
LLAMA_CPP = """\
# TYPE llamacpp:spec_decode_num_draft_tokens_total counter
llamacpp:spec_decode_num_draft_tokens_total 400
# TYPE llamacpp:spec_decode_num_accepted_tokens_total counter
llamacpp:spec_decode_num_accepted_tokens_total 100
# TYPE llamacpp:spec_decode_num_drafts_total counter
llamacpp:spec_decode_num_drafts_total 50
"""


def test_a_new_vllm_page_is_read_right():
    totals = between(read_metrics(""), read_metrics(NEW_VLLM))
    assert totals is not None
    assert (totals.num_drafted, totals.num_accepted) == (3000, 1500)
    assert totals.mean_accepted_length == pytest.approx(2.5)
    assert totals.accepted_per_position == [800, 500, 200] and totals.drafted_per_position == [1000] * 3


def test_only_what_happened_in_between_counts():
    later = NEW_VLLM.replace(" 1000.0", " 1100.0").replace(" 3000.0", " 3300.0").replace(" 1500.0", " 1590.0")
    totals = between(read_metrics(NEW_VLLM), read_metrics(later))
    assert totals is not None
    assert (totals.num_drafted, totals.num_accepted) == (300, 90)
    assert totals.mean_accepted_length == pytest.approx(1.9)
    quiet = between(read_metrics(NEW_VLLM), read_metrics(NEW_VLLM))
    assert quiet is not None and quiet.num_drafted == 0 and quiet.mean_accepted_length is None


def test_old_vllm_llama_cpp_and_sglang_pages():
    old = between(read_metrics(""), read_metrics(OLD_VLLM))
    assert old is not None
    assert (old.num_drafted, old.num_accepted) == (1000, 650)
    assert old.mean_accepted_length == pytest.approx(830 / 180)
    llama = between(read_metrics(""), read_metrics(LLAMA_CPP))
    assert llama is not None and llama.num_drafted == 400 and llama.mean_accepted_length == pytest.approx(3.0)
    sglang = between(read_metrics(SGLANG), read_metrics(SGLANG))
    assert sglang is not None and sglang.mean_accepted_length == pytest.approx(2.9)


@pytest.mark.parametrize("page", ["", "not metrics at all {", "# TYPE up gauge\nup 1\n", SGLANG.replace("2.9", "NaN")])
def test_pages_that_say_nothing_of_speculation(page):
    read = read_metrics(page)
    assert read.num_draft_tokens is None and read.accept_length is None


def test_both_servers_get_the_same_requests_and_are_compared():
    prompts = built_in("chat", 6)
    with FakeServer(seconds_per_token=0.004) as plain, FakeServer(seconds_per_token=0.004, pairs=True) as fast:
        target = UrlTarget(fast.url + "/v1/", plain.url)
        jobs = target.jobs(prompts, temperature=0.7, base_seed=5)
        slow_run = target.run(jobs, PLAIN, Closed(2))
        fast_run = target.run(jobs, ON, Closed(2))
        bodies = sorted(plain.bodies, key=lambda body: int(body["seed"]))
        assert [body["seed"] for body in bodies] == list(range(5, 11))
        assert [body["messages"] for body in bodies] == [list(prompt.messages) for prompt in prompts]
        assert bodies[0]["temperature"] == 0.7 and "speculation" not in bodies[0]
        assert plain.most_running == 2
    assert [trial.num_output for trial in slow_run.trials] == [prompt.max_tokens for prompt in prompts]
    assert all(a.same_answer(b) for a, b in zip(slow_run.trials, fast_run.trials, strict=True))
    assert slow_run.seconds > 1.3 * fast_run.seconds
    assert slow_run.reported is not None and slow_run.reported.num_drafted == 0
    assert fast_run.reported is not None and fast_run.reported.mean_accepted_length == pytest.approx(2.0)


def test_failures_are_failures_with_their_reason():
    with FakeServer() as server:
        target = UrlTarget(server.url, server.url)
        jobs = target.jobs(built_in("chat", 3), temperature=0.0)
        server.fail_next = 1
        run = target.run(jobs, PLAIN, Closed(1))
        assert "503" in str(run.trials[0].error) and run.trials[1].error is None
        server.break_next = 1
        run = target.run(jobs, PLAIN, Closed(1))
        assert "error in the stream" in str(run.trials[0].error) and "lost" in str(run.trials[0].error)


def test_open_loop_times_count_from_the_intended_arrival():
    """Requests arrive far faster than the server answers, so later ones wait longer."""
    with FakeServer(seconds_per_token=0.01) as server:
        target = UrlTarget(server.url, server.url)
        jobs = target.jobs(built_in("chat", 5), temperature=0.0)
        run = target.run(jobs, PLAIN, Open(200.0))
        assert server.most_running > 1
    assert all(trial.time_to_first_token >= 0.009 for trial in run.trials)


def test_an_outpace_server_is_asked_per_request_and_others_need_a_baseline():
    page = '# TYPE outpace_engine_steps_total counter\noutpace_engine_steps_total{{model_name="m"}} 1\n'
    with FakeServer(page="# nothing\n" + page) as ours, FakeServer() as theirs:
        target = UrlTarget(ours.url)
        jobs = target.jobs(built_in("chat", 1), temperature=0.0)
        target.run(jobs, PLAIN, Closed(1))
        target.run(jobs, AUTO, Closed(1))
        assert [body["speculation"] for body in ours.bodies] == [{"mode": "off"}, {"mode": "auto"}]
        assert ours.resets >= 2 and target.describe()["caches_emptied"]
        with pytest.raises(UsageError, match="--baseline-url"):
            UrlTarget(theirs.url)


def test_addresses_that_do_not_work():
    with pytest.raises(UsageError, match="not a URL"):
        UrlTarget("localhost:8000")
    with pytest.raises(OutpaceError, match="does not answer"):
        UrlTarget("http://127.0.0.1:9", "http://127.0.0.1:9")
