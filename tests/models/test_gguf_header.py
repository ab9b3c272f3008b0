"""The GGUF header reader: correct for complete files, and a ModelError for any other bytes."""

from __future__ import annotations

import struct
import time
from pathlib import Path

import gguf
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from outpace.errors import ModelError
from outpace.models.embedded import SMOLLM2
from outpace.models.gguf_header import BLOCK_SIZES, MAX_HEADER_BYTES, read_header
from outpace.models.resolve import resolve_model


def write_tiny(path: Path, **options) -> Path:
    writer = gguf.GGUFWriter(path, "llama", **options)
    writer.add_block_count(2)
    writer.add_float32("llama.rope.freq_base", 10000.0)
    writer.add_bool("tokenizer.ggml.add_bos_token", True)
    writer.add_string("tokenizer.chat_template", "{{ messages }} é")
    writer.add_array("tokenizer.ggml.tokens", ["<s>", "", "hello", "wörld"])
    writer.add_array("tokenizer.ggml.scores", [0.0, -1.0, -2.0, -3.0])
    writer.add_tensor("token_embd.weight", np.ones((4, 8), dtype=np.float32))
    writer.add_tensor("output_norm.weight", np.ones(5, dtype=np.float16))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture(scope="module")
def tiny(tmp_path_factory) -> bytes:
    return write_tiny(tmp_path_factory.mktemp("gguf") / "tiny.gguf").read_bytes()


def read_bytes(tmp_path: Path, data: bytes):
    path = tmp_path / "model.gguf"
    path.write_bytes(data)
    return read_header(path)


def string(text: str) -> bytes:
    return struct.pack("<Q", len(text)) + text.encode()


def head(*, tensors: int = 0, keys: int = 0, version: int = 3) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", version, tensors, keys)


def tensor(name: str, shape: tuple[int, ...], kind: int, offset: int = 0) -> bytes:
    dims = struct.pack(f"<I{len(shape)}Q", len(shape), *shape)
    return string(name) + dims + struct.pack("<IQ", kind, offset)


def test_reads_what_the_gguf_package_writes(tmp_path):
    path = write_tiny(tmp_path / "tiny.gguf")
    header = read_header(path)
    assert (header.version, header.architecture, header.num_tensors) == (3, "llama", 2)
    assert header.metadata["llama.block_count"] == 2
    assert header.metadata["llama.rope.freq_base"] == 10000.0
    assert header.metadata["tokenizer.ggml.add_bos_token"] is True
    assert header.metadata["tokenizer.chat_template"] == "{{ messages }} é"
    assert "tokenizer.ggml.tokens" not in header.metadata
    assert [t.name for t in header.tensors] == ["token_embd.weight", "output_norm.weight"]
    assert header.tensors[0].shape == (8, 4)
    assert [t.num_bytes for t in header.tensors] == [128, 10]
    assert header.expected_size is not None
    assert 0 <= path.stat().st_size - header.expected_size < 32  # the writer pads the last tensor


def test_block_sizes_are_those_of_the_gguf_package():
    known = {int(kind): size for kind, size in gguf.GGML_QUANT_SIZES.items() if int(kind) in BLOCK_SIZES}
    assert len(known) > 25  # an older package has fewer types
    assert known == {kind: BLOCK_SIZES[kind] for kind in known}


def test_any_missing_tensor_byte_is_noticed(tmp_path, tiny):
    end = read_bytes(tmp_path, tiny).expected_size
    assert end is not None
    assert read_bytes(tmp_path, tiny[:end]).num_tensors == 2
    with pytest.raises(ModelError, match=rf"truncated: its header promises {end:,} bytes but it has {end - 1:,}"):
        read_bytes(tmp_path, tiny[: end - 1])


def test_unknown_tensor_type_skips_the_size_check(tmp_path):
    header = read_bytes(tmp_path, head(tensors=1) + tensor("w", (1024,), kind=9999))
    assert header.expected_size is None
    assert header.tensors[0].num_bytes is None


def test_alignment_of_the_file_is_used(tmp_path):
    key = string("general.alignment") + struct.pack("<II", 4, 256)
    data = head(tensors=1, keys=1) + key + tensor("w", (2,), kind=0)
    assert read_bytes(tmp_path, data.ljust(264, b"\0")).expected_size == 256 + 8


@pytest.mark.parametrize(
    ("data", "gist"),
    [
        (b"", "is empty; download or copy it again"),
        (b"GGUF\3\0", "truncated: it ends after 6 bytes"),
        (b"PK\3\4" + bytes(40), "not a GGUF file .it looks like a zip archive"),
        (struct.pack("<Q", 80) + b'{"__metadata__":{}}', "not a GGUF file .it looks like safetensors"),
        (b"version https://git-lfs.example/spec/v1\n", "looks like a Git LFS pointer"),
        (b"<!DOCTYPE html>", "looks like a web page"),
        (b"tjgg" + bytes(40), "a GGML file from before GGUF"),
        (bytes(64), "unfinished download"),
        (b"hello world", "it starts with b'hell'"),
        (head(version=1), "GGUF version 1, but Outpace reads versions 2 and 3; convert"),
        (head(version=4), "GGUF version 4, but Outpace reads versions 2 and 3; update Outpace"),
        (head(version=0x03000000), "is a big-endian GGUF"),
        (head(keys=2**63), "damaged: it claims 0 tensors and 9,223,372,036,854,775,808 keys"),
        (head(keys=1) + string("k") + struct.pack("<I", 99), "a value of type 99, which GGUF does not have"),
        (head(keys=1) + struct.pack("<Q", 2**64 - 1), r"runs past the end of the file .in key 1 of 1."),
        (head(keys=1) + string("k") + struct.pack("<IIQ", 9, 8, 2**60), "runs past the end of the file"),
        (head(keys=1) + string("k") + struct.pack("<IIQQ", 9, 8, 1, 2**63), "runs past the end of the file"),
        (head(keys=1) + string("k") + struct.pack("<IIQ", 9, 12, 2**61), "runs past the end of the file"),
        (head(keys=1) + string("k") + struct.pack("<IIQ", 9, 9, 1), "an array of type 9"),
        (head(keys=1) + string("general.alignment") + struct.pack("<II", 4, 24), "not a power of two"),
        (head(keys=1) + string("general.alignment") + struct.pack("<II", 4, 0), "not a power of two"),
        (head(keys=1) + string("general.alignment") + struct.pack("<If", 6, 32.0), "not a power of two"),
        (head(keys=1) + string("general.architecture") + struct.pack("<II", 4, 7), "architecture is 7, not a name"),
        (head(tensors=1) + string("w") + struct.pack("<I", 5), "a tensor with 5 dimensions"),
        (head(tensors=1) + tensor("w", (33,), kind=2), "a row of 33 elements in a format that packs them by 32"),
        (head(tensors=1) + tensor("w", (2**63, 2**63, 2**63), kind=0), "is truncated"),
    ],
)  # fmt: skip
def test_broken_headers_are_named(tmp_path, data, gist):
    with pytest.raises(ModelError, match=gist):
        read_bytes(tmp_path, data)


def test_big_endian_file_is_named(tmp_path):
    path = write_tiny(tmp_path / "big.gguf", endianess=gguf.GGUFEndian.BIG)
    with pytest.raises(ModelError, match="big-endian"):
        read_header(path)


def test_an_unreadable_file_is_named(tmp_path):
    with pytest.raises(ModelError, match=r"cannot read .*gone\.gguf: No such file"):
        read_header(tmp_path / "gone.gguf")


def test_a_header_beyond_the_bound_is_refused_without_walking_it(tmp_path):
    path = tmp_path / "huge.gguf"
    count = 2 * MAX_HEADER_BYTES // 8  # empty strings, all with a valid length
    with path.open("wb") as file:
        file.write(head(keys=1) + string("k") + struct.pack("<IIQ", 9, 8, count))
        file.truncate(3 * MAX_HEADER_BYTES)  # sparse
    started = time.perf_counter()
    with pytest.raises(ModelError, match="its header exceeds 128 MiB"):
        read_header(path)
    assert time.perf_counter() - started < 1


_HOSTILE = [0, 1, 7, 8, 9, 12, 13, 2**31, 2**32 - 1, 2**40, 2**63 - 1, 2**63, 2**64 - 1]


@settings(max_examples=400, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_mutated_headers_give_a_header_or_a_model_error(tmp_path, tiny, data):
    mutated = bytearray(tiny)
    for _ in range(data.draw(st.integers(0, 4), label="edits")):
        at = data.draw(st.integers(4, len(tiny) - 8), label="at")
        if data.draw(st.booleans(), label="byte"):
            mutated[at] = data.draw(st.integers(0, 255), label="value")
        else:
            struct.pack_into("<Q", mutated, at, data.draw(st.sampled_from(_HOSTILE), label="number"))
    cut = data.draw(st.integers(0, len(tiny)), label="length") if data.draw(st.booleans()) else len(tiny)
    try:
        header = read_bytes(tmp_path, bytes(mutated[:cut]))
    except ModelError:
        return
    assert header.expected_size is None or header.expected_size <= cut


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(tail=st.binary(max_size=200), tensors=st.integers(0, 3), keys=st.integers(0, 3))
def test_random_bytes_after_the_magic_give_a_header_or_a_model_error(tmp_path, tail, tensors, keys):
    try:
        read_bytes(tmp_path, head(tensors=tensors, keys=keys) + tail)
    except ModelError:
        return


@pytest.mark.model
def test_the_embedded_model_is_exactly_as_long_as_its_header_says():
    path = resolve_model(None)
    read_header(path)
    started = time.perf_counter()
    header = read_header(path)
    elapsed = time.perf_counter() - started
    assert header.architecture == "llama"
    assert header.metadata["llama.vocab_size"] == 49152
    assert header.num_tensors == 272
    assert header.expected_size == path.stat().st_size == SMOLLM2.size
    assert elapsed < 0.25  # about 0.01 s; the margin is for a busy machine
