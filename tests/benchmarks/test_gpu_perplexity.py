"""The perplexity of a tiny model in every format, on the CPU."""

from __future__ import annotations

import json
import math
import random

import numpy as np
import pytest

pytest.importorskip("torch", reason="torch is not installed; pip install outpace[torch]")

from benchmarks import gpu_perplexity
from tests.numpy_reference import ReferenceModel
from tests.tiny_gguf import write_model

NUM_POSITIONS = 600  # a whole window and a part of one


def test_every_format_is_measured_beside_the_file_itself(tmp_path, capsys):
    model = write_model(tmp_path / "tiny.gguf", "qwen2", "Q8_0", tied=False)
    rng, vocab = random.Random(0), ReferenceModel.load(model).logits([1]).shape[1]
    tokens = [rng.randrange(vocab) for _ in range(NUM_POSITIONS + 50)]
    (tmp_path / "tokens.json").write_text(json.dumps({"text": "random", "tokens": tokens}))
    gpu_perplexity.main(
        [f"--positions={NUM_POSITIONS}", "run", str(model), str(tmp_path / "tokens.json"), str(tmp_path / "out"),
         "--device=cpu", "--threads=1"]
    )  # fmt: skip
    found = json.loads((tmp_path / "out.json").read_text())
    rows = {row["setting"]: row for row in found["settings"]}
    assert found["positions"] == NUM_POSITIONS and found["dtype"] == "float32"
    assert list(rows) == [
        "not rounded", "as stored", "int8", "fp8", "int4, groups of 32", "int4, groups of 128", "KV cache int8",
        "KV cache fp8",
    ]  # fmt: skip
    surprise = list[float]()
    for text in gpu_perplexity.windows(tokens, NUM_POSITIONS):
        logits = ReferenceModel.load(model).logits(text[:-1]).astype(np.float64)
        logits -= np.log(np.exp(logits - logits.max(-1, keepdims=True)).sum(-1, keepdims=True)) + logits.max(
            -1, keepdims=True
        )
        surprise += (-logits[np.arange(len(logits)), text[1:]]).tolist()
    assert rows["not rounded"]["perplexity"] == pytest.approx(math.exp(np.mean(surprise)), rel=1e-4)
    kl = {name: row["mean_kl"] for name, row in rows.items()}
    assert abs(kl["as stored"]) < 1e-6 < kl["int8"] < kl["fp8"] < kl["int4, groups of 32"]
    assert kl["int8"] / 10 < kl["KV cache int8"] < kl["KV cache fp8"] < kl["int4, groups of 32"]
    assert rows["int8"]["bits_per_weight"] < 9 < rows["not rounded"]["bits_per_weight"] == 32
    assert "KV cache fp8" in capsys.readouterr().out and "KV cache fp8" in (tmp_path / "out.txt").read_text()
