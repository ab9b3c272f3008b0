"""Writes GGUF files that hold a vocabulary and no weights, with special tokens of every kind."""

from __future__ import annotations

from pathlib import Path

from tests.tiny_gguf import byte_tokens

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, BYTE = 1, 2, 3, 4, 6  # GGUF's token types
# Tokens that overlap, that begin with each other, and runs of one character, as Gemma has them.
SPECIALS = [("<s>", CONTROL), ("</s>", CONTROL), ("<|end|>", CONTROL), ("<mask>", CONTROL),
            ("<|endoftext|>", CONTROL), ("<unk>", UNKNOWN),
            ("<think>", USER_DEFINED), ("think>now", USER_DEFINED), ("<|end|>!", USER_DEFINED),
            ("\n\n", USER_DEFINED), ("\n\n\n", USER_DEFINED), ("\n\n\n\n\n", USER_DEFINED), ("中文", USER_DEFINED),
            ("wow", USER_DEFINED)]  # fmt: skip


# Tokens of equal length that overlap: which of them comes first is llama.cpp's secret.
OVERLAPPING = [(text, USER_DEFINED) for text in ("<x>", "x><", "><x", ">tt", "tt<", "t<x")]


def write_bpe(path: Path, *, name: str = "tiny", splitter: str = "gpt-2", overlapping: bool = False) -> Path:
    """Bytes with a few merges, as GPT-2 has them."""
    tokens, merges = byte_tokens()[:256], ["t h", "th e", "Ġ the", "a a", "aa aa", "l l", "o w", "Ġ a"]
    tokens += [merge.replace(" ", "") for merge in merges]
    plain = [(token, NORMAL, 0.0) for token in tokens]
    plain += [(text, kind, 0.0) for text, kind in OVERLAPPING if overlapping]
    return _write(path, "gpt2", plain, merges, name, splitter)


def write_spm(path: Path) -> Path:
    """Scored pieces with byte tokens, as Llama 2 has them: text after a special token begins with a space."""
    words = ["▁", "▁the", "▁a", "the", "th", "ll", "ow", *"abcdefghijklmnopqrstuvwxyz"]
    tokens = [(f"<0x{byte:02X}>", BYTE, 0.0) for byte in range(256)]
    return _write(path, "llama", tokens + [(word, NORMAL, float(-i)) for i, word in enumerate(words)], [], "tiny", "")


def _write(
    path: Path, kind: str, plain: list[tuple[str, int, float]], merges: list[str], name: str, splitter: str
) -> Path:
    import gguf

    entries = [*((text, token_type, 0.0) for text, token_type in SPECIALS), *plain]
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_name(name)
    writer.add_tokenizer_model(kind)
    writer.add_token_list([text for text, _, _ in entries])
    writer.add_token_types([token_type for _, token_type, _ in entries])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(1)
    writer.add_unk_token_id(5)
    writer.add_add_bos_token(True)
    if merges:
        writer.add_tokenizer_pre(splitter)
        writer.add_token_merges(merges)
    else:
        writer.add_token_scores([score for _, _, score in entries])
        writer.add_add_space_prefix(True)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
