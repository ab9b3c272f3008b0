"""The articles' tables, splits over GPUs, and the torch backend's own plan."""

from __future__ import annotations

from time import process_time

import pytest

from outpace.errors import UsageError
from outpace.plan import probe as probe_module
from outpace.plan.drafts import open_draft
from outpace.plan.guesses import Conditions
from outpace.plan.machines import MACHINES, custom, here, machine
from outpace.plan.memory import CAPTURED_ROWS, Deployment, divide, kept_rows
from outpace.plan.models import open_model
from outpace.plan.planning import make_plan, open_wanted
from outpace.plan.probe import Others, Probed

GB = 1e9


def nominal(target: str, draft: str, gpu: str = "h100", **options):
    ours = open_model("llama-3.1-70b", target)
    to = Deployment(machine(gpu), 2, utilization=1.0, nominal=True, **options)
    return divide(ours, open_draft("llama-3.1-8b", ours, draft), to)


@pytest.mark.parametrize(
    ("target", "draft", "weights", "left"),
    [("bf16", "bf16", 156, 4), ("int8", "bf16", 86, 74), ("int8", "int8", 78, 82), ("int4", "bf16", 51, 109),
     ("int4", "int4", 39, 121)],
)  # fmt: skip
def test_the_articles_table_for_two_h100(target, draft, weights, left):
    """The article gives 74 GB for the second row; for the others, 160 GB less the weights."""
    plan = nominal(target, draft)
    assert plan.weights == weights * GB
    assert plan.left == left * GB


def test_the_articles_figures_for_two_h200():
    plan = nominal("bf16", "bf16", "h200")
    assert plan.weights == 156 * GB and plan.left == 126 * GB
    assert sum(gpu.total for gpu in plan.gpus) == 282 * GB
    assert plan.left / nominal("int8", "bf16").left == pytest.approx(1.7, abs=0.01)


def test_a_draft_costs_its_weights_of_cache_one_for_one():
    target = open_model("llama-3.1-70b", "int8")
    to = Deployment(machine("h100"), 2, utilization=0.92, nominal=True)
    with_draft, without = (divide(target, each, to) for each in (open_draft("llama-3.1-8b", target), None))
    assert without.left - with_draft.left == pytest.approx(16 * GB)
    assert without.left == pytest.approx(2 * 0.92 * 80 * GB - 70 * GB)  # vLLM's formula


def test_real_weights_have_scales_and_whole_embeddings():
    target = open_model("llama-3.1-70b", "int4")
    plan = divide(target, None, Deployment(machine("h100"), 2))
    assert plan.weights / GB == pytest.approx(39.8, abs=0.1)
    assert plan.gpus[0].buffers > 0 and plan.gpus[0].usable == pytest.approx(0.9 * machine("h100").memory_bytes)


def test_a_draft_is_on_the_first_gpu_or_sharded():
    target = open_model("llama-3.1-70b", "int8")
    draft = open_draft("llama-3.1-8b", target)
    one = divide(target, draft, Deployment(machine("h100"), 2))
    both = divide(target, draft, Deployment(machine("h100"), 2, draft_gpus=2))
    assert [gpu.draft > 0 for gpu in one.gpus] == [True, False]
    assert one.gpus[0].draft == pytest.approx(draft.weight_bytes)
    assert [gpu.draft for gpu in both.gpus] == pytest.approx([draft.weight_bytes / 2] * 2)
    assert one.cache_tokens == one.gpus[0].tokens < one.gpus[1].tokens, "the fullest GPU decides"
    assert both.sequences > one.sequences


def test_cache_heads_are_split_until_each_gpu_has_one():
    target = open_model("llama-3.1-8b")  # 8 heads in the cache
    whole = divide(target, None, Deployment(machine("h200"))).gpus[0].token
    assert whole == 2 * 32 * 8 * 128 * 2
    for gpus, share in ((2, 1 / 2), (8, 1 / 8), (16, 1 / 8)):
        assert divide(target, None, Deployment(machine("h200"), gpus)).gpus[0].token == pytest.approx(share * whole)
    latent = open_model("deepseek-v3")
    assert divide(latent, None, Deployment(machine("h200"), 8)).gpus[0].token == 61 * 576 * 2


def test_sequences_at_a_context():
    target = open_model("llama-3.1-8b")
    plans = {n: divide(target, None, Deployment(machine("h200"), context=n)) for n in (2048, 8192, 32768)}
    assert plans[2048].sequences > 3 * plans[8192].sequences > 9 * plans[32768].sequences > 0
    short = divide(open_model("smollm2-135m"), None, Deployment(machine("l4"), context=10**6))
    assert short.context == 8192, "a model's own context is the limit"


def test_a_head_takes_its_hidden_states_too():
    target = open_model("llama-3.1-8b")
    with_head = divide(target, open_draft("head", target), Deployment(machine("h200")))
    without = divide(target, None, Deployment(machine("h200")))
    assert with_head.gpus[0].token - without.gpus[0].token == 2 * (2 * 8 * 128 + 3 * 4096)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"gpus": 0}, "gpus must be at least 1"),
        ({"utilization": 1.5}, "utilization must be above 0 and at most 1"),
        ({"gpus": 4, "draft_gpus": 2}, "1 GPU or on all 4"),
        ({"context": -1}, "context must be at least 1"),
    ],
)
def test_nonsense_is_refused(options, words):
    with pytest.raises(UsageError, match=words):
        Deployment(machine("h100"), **options)


def test_heads_that_do_not_divide_are_refused_with_what_does():
    with pytest.raises(UsageError, match=r"14 attention heads, which do not divide over 4 GPUs; use 1, 2"):
        divide(open_model("qwen2.5-0.5b"), None, Deployment(machine("h100"), 4))


def test_machines_are_found_or_suggested():
    assert machine("NVIDIA H100") is MACHINES["h100"] and machine("rtx_4090") is MACHINES["rtx-4090"]
    with pytest.raises(UsageError, match=r"no machine 'h101'.*did you mean h100"):
        machine("h101")
    assert custom("mine", 24, 500, 100).memory_bytes == pytest.approx(24e9)
    for each in MACHINES.values():
        assert each.memory_bytes < 1.08 * each.nominal_bytes and each.bandwidth > 5e10 and each.bf16 > 1e12


@pytest.mark.parametrize(
    ("driver", "gib", "name"),
    [
        ("NVIDIA H200", 140, "h200"), ("NVIDIA H100 80GB HBM3", 79, "h100"), ("NVIDIA H100 PCIe", 79, "h100-pcie"),
        ("NVIDIA A100-SXM4-80GB", 79, "a100-80gb"), ("NVIDIA A100-SXM4-40GB", 39, "a100-40gb"), ("Tesla T4", 15, "t4"),
        ("NVIDIA A10G", 22, "a10"), ("NVIDIA GeForce RTX 4090", 24, "rtx-4090"), ("NVIDIA RTX A6000", 47, "a6000"),
        ("NVIDIA RTX 6000 Ada Generation", 47, "rtx-6000-ada"), ("Tesla V100-SXM2-32GB", 32, "v100-32gb"),
        ("NVIDIA RTX PRO 6000 Blackwell Server Edition", 95, "rtx-pro-6000"),
    ],
)  # fmt: skip
def test_this_machines_gpu_is_found_by_its_drivers_name(monkeypatch, driver, gib, name):
    import subprocess

    answer = subprocess.CompletedProcess([], 0, f"{driver}, {gib * 1024}\n")
    monkeypatch.setattr("outpace.plan.machines.shutil.which", lambda _: "nvidia-smi")
    monkeypatch.setattr("outpace.plan.machines.subprocess.run", lambda *_, **__: answer)
    found = here(1)
    assert found.name == name and found.memory_bytes == gib * (1 << 30)


def test_this_machines_processor_is_measured(monkeypatch):
    monkeypatch.setattr("outpace.plan.machines.shutil.which", lambda _: None)
    found = here(1)
    assert not found.is_gpu and found.is_measured and found.memory_bytes > 1e8
    assert found.bandwidth > 1e8 and found.bf16 > 1e8


@pytest.mark.parametrize(
    ("shares", "num_tries", "is_told"), [([0.0], 1, False), ([0.6, 0.02], 2, False), ([0.6] * 3, 3, True)]
)
def test_a_busy_machine_is_measured_again_and_told(monkeypatch, shares, num_tries, is_told):
    """The fastest try counts; only if others took time in all of them is the figure in doubt."""
    tries = [Probed(1e9 * (i + 1), 1e9, share) for i, share in enumerate(shares)]
    left = iter(tries)
    monkeypatch.setattr("outpace.plan.machines.shutil.which", lambda _: None)
    monkeypatch.setattr(probe_module, "_tried", lambda threads: next(left))
    monkeypatch.setattr(probe_module, "sleep", lambda seconds: None)
    found = here(1)
    assert found.bandwidth == num_tries * 1e9 and next(left, None) is None
    target = open_model("smollm2-135m")
    told = make_plan(open_wanted(target, [], None, None), Deployment(found), Conditions())["assumptions"]
    assert any("60% of its processor time went to other programs" in each for each in told) is is_told


def test_the_time_of_others_leaves_out_our_own():
    others, begin = Others(), process_time()
    while process_time() - begin < 0.2:
        pass
    assert 0.0 <= others.share() <= 1.0
    ticks = iter([(100, 400), (200, 600)])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(probe_module, "_busy_and_all", lambda: next(ticks))
        patch.setattr(probe_module, "process_time", lambda: 0.0)
        assert Others().share() == pytest.approx(0.5)
        patch.setattr(probe_module, "_busy_and_all", lambda: (0, 0))
        assert Others().share() == 0.0


def test_the_h200_has_the_memory_that_its_driver_reports():
    assert machine("h200").memory_bytes == pytest.approx(150_109_880_320, rel=1e-3)  # benchmarks/results/gpu_h200.txt


# ---- the torch backend plans the same


def test_captured_rows_are_those_of_the_torch_backend():
    graphs = pytest.importorskip("outpace.backends.torch.execution.graphs")
    assert {rows: graphs.num_captured_tokens(rows) for rows in CAPTURED_ROWS} == CAPTURED_ROWS
    independent = pytest.importorskip("outpace.backends.torch.sampling.independent")
    assert [kept_rows(rows) for rows in (1, 8, 16, 64, 256)] == [independent.max_kept(n) for n in (1, 8, 16, 64, 256)]


@pytest.mark.parametrize("name", ["llama-3.1-8b", "llama-3.2-1b", "qwen2.5-0.5b"])
@pytest.mark.parametrize(
    ("precision", "kind"),
    [("bf16", None), ("fp8", "fp8"), ("int8", "int8"), ("int4_g32", "int4"), ("int4_g128", "int4-128")],
)
def test_weights_that_are_rounded_take_what_the_torch_backend_makes_of_them(name, precision, kind):
    torch = pytest.importorskip("torch")
    from outpace.backends.torch.model.loader import rounded
    from outpace.backends.torch.model.weights import all_dense, num_weight_bytes
    from outpace.models.hf_config import parse_config

    shape = open_model(name).shape
    config = parse_config({
        "architectures": ["Qwen2ForCausalLM" if shape.qkv_bias else "LlamaForCausalLM"], "hidden_size": shape.width,
        "intermediate_size": shape.hidden, "num_hidden_layers": shape.layers, "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads, "head_dim": shape.head_dim, "vocab_size": shape.vocab_size,
        "max_position_embeddings": shape.context, "rms_norm_eps": 1e-6,
    })  # fmt: skip
    formats = rounded(kind) if kind is not None else all_dense
    theirs = num_weight_bytes(config, tied=shape.tied, dtype=torch.bfloat16, formats=formats)
    assert open_model(name, precision).weight_bytes == pytest.approx(theirs, rel=0.005)


def test_weights_cache_and_workspace_are_those_of_the_torch_backend(tmp_path):
    runner = pytest.importorskip("outpace.backends.torch.runner")
    from outpace.backends.base import Capacity
    from outpace.backends.torch.device import TorchOptions
    from outpace.plan.memory import PAGE_TOKENS, PAGES_PER_SEQUENCE, _workspace
    from tests.tiny_folder import write_folder

    write_folder(tmp_path)
    capacity = Capacity(max_sequences=32, cache_tokens=1024, max_context=256, max_step_tokens=512)
    theirs = runner.TorchModel(tmp_path, TorchOptions("cpu", "bfloat16")).plan(capacity)
    ours = open_model(str(tmp_path))
    assert ours.weight_bytes == theirs.weights
    assert ours.shape.cache_elements_per_token * 2 == theirs.cache_token
    pages = -(-capacity.cache_tokens // PAGE_TOKENS) + PAGES_PER_SEQUENCE * capacity.max_sequences
    assert pages * PAGE_TOKENS == theirs.num_cache_tokens
    assert _workspace(ours.shape, Deployment(machine("epyc-9654"), sequences=16)) == theirs.workspace
