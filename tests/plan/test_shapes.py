"""Parameters computed from shapes against published counts; what steps read; caches."""

from __future__ import annotations

import json

import pytest

from outpace.errors import ModelError, UsageError
from outpace.models.hf_config import parse_config as backend_config
from outpace.plan.configs import parse_config
from outpace.plan.drafts import open_draft
from outpace.plan.known_models import KNOWN, find_known, similar_names, smaller_siblings
from outpace.plan.models import open_model
from outpace.plan.precision import PRECISIONS, precision
from outpace.plan.shapes import Shape, trained_head
from tests.tiny_folder import CONFIG
from tests.tiny_gguf import write_model

# As the hub counts the tensors of each model, text part only; Qwen3's small models without their second copy of the
# embeddings, DeepSeek-V3 without its prediction layer and its routing biases.
PUBLISHED = {
    "llama-2-7b": 6_738_415_616, "llama-2-13b": 13_015_864_320, "llama-2-70b": 68_976_648_192,
    "llama-3-8b": 8_030_261_248, "llama-3.1-8b": 8_030_261_248, "llama-3-70b": 70_553_706_496,
    "llama-3.1-70b": 70_553_706_496, "llama-3.3-70b": 70_553_706_496, "llama-3.1-405b": 405_853_388_800,
    "llama-3.2-1b": 1_235_814_400, "llama-3.2-3b": 3_212_749_824,
    "qwen2-0.5b": 494_032_768, "qwen2-1.5b": 1_543_714_304, "qwen2-7b": 7_615_616_512, "qwen2-72b": 72_706_203_648,
    "qwen2.5-0.5b": 494_032_768, "qwen2.5-1.5b": 1_543_714_304, "qwen2.5-3b": 3_085_938_688,
    "qwen2.5-7b": 7_615_616_512, "qwen2.5-14b": 14_770_033_664, "qwen2.5-32b": 32_763_876_352,
    "qwen2.5-72b": 72_706_203_648, "qwen3-0.6b": 596_049_920, "qwen3-1.7b": 1_720_574_976,
    "qwen3-4b": 4_022_468_096, "qwen3-8b": 8_190_735_360, "qwen3-14b": 14_768_307_200, "qwen3-32b": 32_762_123_264,
    "qwen3-30b-a3b": 30_532_122_624, "qwen3-235b-a22b": 235_093_634_560,
    "mistral-7b": 7_248_023_552, "mistral-7b-v0.1": 7_241_732_096, "mistral-nemo-12b": 12_247_782_400,
    "mistral-small-24b": 23_572_403_200, "mistral-large-123b": 122_610_069_504,
    "mixtral-8x7b": 46_702_792_704, "mixtral-8x22b": 140_630_071_296,
    "gemma-2b": 2_506_172_416, "gemma-7b": 8_537_680_896, "gemma-2-2b": 2_614_341_888, "gemma-2-9b": 9_241_705_984,
    "gemma-2-27b": 27_227_128_320, "gemma-3-1b": 999_885_952, "gemma-3-4b": 3_880_263_168,
    "gemma-3-12b": 11_766_034_176, "gemma-3-27b": 27_009_346_304,
    "smollm2-135m": 134_515_008, "smollm2-360m": 361_821_120, "smollm2-1.7b": 1_711_376_384,
    "deepseek-v2-lite": 15_706_484_224, "deepseek-v3": 671_026_404_352, "deepseek-r1": 671_026_404_352,
    "gpt-oss-20b": 20_914_757_184, "gpt-oss-120b": 116_829_156_672,
}  # fmt: skip


@pytest.mark.parametrize("name", PUBLISHED)
def test_parameters_follow_from_the_shape(name):
    assert KNOWN[name].shape.parameters == PUBLISHED[name]


def test_every_known_model_has_a_published_count_or_the_shape_of_one_that_has():
    checked = {KNOWN[name].shape for name in PUBLISHED}
    assert {known.name for known in KNOWN.values() if known.shape not in checked} == set()


@pytest.mark.parametrize(
    ("name", "billions"),
    [("mixtral-8x7b", 12.9), ("gpt-oss-120b", 5.1), ("gpt-oss-20b", 3.6), ("deepseek-v3", 37), ("qwen3-30b-a3b", 3.3)],
)
def test_active_parameters_of_experts_are_near_the_published_ones(name, billions):
    """Publishers disagree on whether embeddings count; the table leaves the input ones out."""
    assert KNOWN[name].shape.active_parameters / 1e9 == pytest.approx(billions, rel=0.1)


def test_more_tokens_read_more_experts_and_never_more_than_all():
    shape = KNOWN["mixtral-8x7b"].shape
    read = [shape.layer_parameters_read(tokens) for tokens in (1, 2, 8, 512)]
    assert read == sorted(read) and read[1] > 1.2 * read[0]
    assert read[-1] == pytest.approx(shape.layer_parameters)
    dense = KNOWN["llama-3-8b"].shape
    assert dense.layer_parameters_read(1) == dense.layer_parameters_read(64) == dense.layer_parameters


@pytest.mark.parametrize(
    ("written", "name"),
    [
        ("meta-llama/Meta-Llama-3.1-70B-Instruct", "llama-3.1-70b"),
        ("llama3.1:70b", "llama-3.1-70b"),
        ("Llama-3-70B", "llama-3-70b"),
        ("Qwen2.5 72B", "qwen2.5-72b"),
        ("Qwen/Qwen2.5-Coder-7B-Instruct-AWQ", "qwen2.5-coder-7b"),
        ("qwen2.5-coder-1.5b-instruct-q4_k_m.gguf", "qwen2.5-coder-1.5b"),
        ("google/gemma-3-27b-it", "gemma-3-27b"),
        ("gemma2:9b", "gemma-2-9b"),
        ("mistralai/Mistral-7B-Instruct-v0.3", "mistral-7b"),
        ("Mistral Large 2", "mistral-large-123b"),
        ("openai/gpt-oss-120b", "gpt-oss-120b"),
    ],
)
def test_names_are_found_in_usual_spellings(written, name):
    found = find_known(written)
    assert found is not None and found.name == name


@pytest.mark.parametrize(
    ("written", "fmt", "stored"),
    [
        ("Qwen/Qwen2.5-72B-Instruct-AWQ", "int4", "int4"),
        ("Qwen/Qwen2.5-72B-Instruct-GPTQ-Int8", "int8", "int8"),
        ("neuralmagic/Meta-Llama-3.1-70B-Instruct-FP8", "fp8", "fp8"),
        ("llama-3.1-70b-awq", "int4", "bf16"),
        ("qwen2.5-7b-instruct-q4_k_m", "q4_k_m", "bf16"),
        ("meta-llama/Llama-3.1-70B-Instruct", "bf16", "bf16"),
        ("deepseek-ai/DeepSeek-V3", "fp8", "fp8"),
    ],
)
def test_a_name_tells_the_format_of_its_weights(written, fmt, stored):
    model = open_model(written)
    assert (model.precision.name, model.stored) == (fmt, stored)
    assert open_model(written, "int8").precision.name == "int8"


def test_unknown_names_are_not_guessed():
    assert find_known("llama-9-700b") is None
    assert "llama-3.1-70b" in similar_names("llama-3.1-71b")
    with pytest.raises(ModelError, match=r"did you mean .*llama-3\.1-70b"):
        open_model("llama-3.1-71b")
    with pytest.raises(UsageError, match="name is empty"):
        open_model(" ")


def test_siblings_share_the_tokenizer_and_are_much_smaller():
    found = [each.name for each in smaller_siblings(KNOWN["llama-3.1-70b"])]
    assert found[0] == "llama-3.1-8b" and "llama-3.2-1b" in found and "llama-2-7b" not in found


def test_a_latent_cache_and_windows_are_small():
    v3 = KNOWN["deepseek-v3"].shape
    assert v3.cache_elements_per_token == 61 * 576  # 70 kB in bf16, as its authors report
    gemma = KNOWN["gemma-3-27b"].shape
    assert gemma.cached_elements(512) == 512 * gemma.cache_elements_per_token
    assert gemma.cached_elements(131_072) < 0.2 * 131_072 * gemma.cache_elements_per_token


def test_a_config_gives_the_shape_that_the_backend_reads():
    shape, _, fmt = parse_config(CONFIG, "config.json")
    theirs = backend_config(CONFIG)
    assert shape.cache_elements_per_token == theirs.cache_elements_per_token
    assert shape.layer_parameters == theirs.num_layer_parameters
    assert fmt == "bf16"


LLAMA = {
    "model_type": "llama", "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
    "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256, "max_position_embeddings": 131072,
}  # fmt: skip
GPT_OSS = {
    "model_type": "gpt_oss", "hidden_size": 2880, "intermediate_size": 2880, "num_hidden_layers": 24,
    "num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 64, "vocab_size": 201088, "attention_bias": True,
    "max_position_embeddings": 131072, "num_local_experts": 32, "num_experts_per_tok": 4, "sliding_window": 128,
    "quantization_config": {"quant_method": "mxfp4"}, "tie_word_embeddings": False,
}  # fmt: skip
DEEPSEEK = {
    "model_type": "deepseek_v2", "hidden_size": 2048, "intermediate_size": 10944, "num_hidden_layers": 27,
    "num_attention_heads": 16, "num_key_value_heads": 16, "vocab_size": 102400, "max_position_embeddings": 163840,
    "n_routed_experts": 64, "num_experts_per_tok": 6, "moe_intermediate_size": 1408, "n_shared_experts": 2,
    "first_k_dense_replace": 1, "kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128,
}  # fmt: skip


@pytest.mark.parametrize(
    ("config", "name", "fmt"),
    [(LLAMA, "llama-3.1-8b", "bf16"), (GPT_OSS, "gpt-oss-20b", "mxfp4"), (DEEPSEEK, "deepseek-v2-lite", "bf16")],
)
def test_configs_of_all_kinds_give_the_published_parameters(config, name, fmt):
    shape, _, found = parse_config(config, "config.json")
    assert shape.parameters == PUBLISHED[name] and found == fmt


@pytest.mark.parametrize(
    ("key", "value"),
    [("num_hidden_layers", None), ("num_hidden_layers", -3), ("hidden_size", "4096"), ("vocab_size", 0)],
)
def test_a_config_without_sizes_is_refused_by_name(tmp_path, key, value):
    values = {**LLAMA, key: value}
    (tmp_path / "config.json").write_text(json.dumps({k: v for k, v in values.items() if v is not None}))
    with pytest.raises(ModelError, match=f"config.json has no usable {key}"):
        open_model(str(tmp_path))


def test_negative_sizes_are_refused():
    with pytest.raises(ModelError, match="layers must be a whole number above 0; got -1"):
        Shape(layers=-1, width=8, hidden=8, heads=1, kv_heads=1, head_dim=8, vocab_size=8, context=8)
    with pytest.raises(ModelError, match="do not divide evenly"):
        Shape(layers=1, width=8, hidden=8, heads=3, kv_heads=2, head_dim=8, vocab_size=8, context=8)


@pytest.mark.parametrize(("family", "tied"), [("llama", True), ("qwen2", False), ("qwen3", True)])
def test_a_gguf_has_its_own_bytes_and_parameters(tmp_path, family, tied):
    path = write_model(tmp_path / "model.gguf", family, "Q8_0", tied=tied)
    model = open_model(str(path))
    assert model.shape.parameters == model.parameters
    assert model.weight_bytes == pytest.approx(path.stat().st_size, rel=0.2)  # the rest is the vocabulary
    assert model.precision.bytes_per_weight == pytest.approx(model.weight_bytes / model.parameters)
    assert (model.output_bytes == 0) is tied
    assert open_model(str(path), "bf16").weight_bytes == pytest.approx(2 * model.parameters)


def test_real_bytes_per_weight():
    assert PRECISIONS["int4"].bytes_per_weight == pytest.approx(4.156 / 8, abs=1e-3)
    assert PRECISIONS["q8_0"].bytes_per_weight == 34 / 32
    assert precision("AWQ") is PRECISIONS["int4"] and precision("Q4_K_M") is PRECISIONS["q4_k_m"]
    with pytest.raises(UsageError, match=r"no precision 'int3'; choose from"):
        precision("int3")
    llama = open_model("llama-3.1-70b", "int4")  # AWQ checkpoints of it have 39.8 GB
    assert llama.weight_bytes / 1e9 == pytest.approx(39.8, abs=0.1)
    assert open_model("gpt-oss-120b").weight_bytes / 1e9 == pytest.approx(65.2, abs=0.1)  # as published
    q4 = open_model("llama-3.1-8b", "q4_k_m")  # 4.92 GB as published
    assert q4.weight_bytes / 1e9 == pytest.approx(4.92, abs=0.02)


def test_a_head_is_as_large_as_one_that_was_trained():
    head = trained_head(KNOWN["llama-3.1-8b"].shape, 32_000)
    assert head.parameters == 424_701_952  # benchmarks/results/gpu_speculation_h200.json
    assert head.cache_elements_per_token == 2 * 8 * 128 + 3 * 4096
    embedded = trained_head(KNOWN["smollm2-135m"].shape, 16_384)
    assert embedded.parameters == pytest.approx(14.5e6, rel=0.01)  # benchmarks/results/head_smollm2_card.md


def test_drafts_of_every_kind_are_opened():
    target = open_model("llama-3.1-8b")
    kinds = {name: open_draft(name, target).kind for name in ("head", "self:int4", "ngram", "suffix", "llama-3.2-1b")}
    assert list(kinds.values()) == ["head", "self", "lookup", "lookup", "draft"]
    assert open_draft("self:int4", target).weight_bytes < target.weight_bytes / 2.5
    for name, words in (
        ("self:int9", "use one of self:int4, "),
        ("self:", "use one of"),
        ("", "draft's name is empty"),
    ):
        with pytest.raises(UsageError, match=words):
            open_draft(name, target)
    with pytest.raises(UsageError, match=r"self:int8 is no smaller than llama-3\.1-8b in fp8"):
        open_draft("self:int8", open_model("llama-3.1-8b", "fp8"))
