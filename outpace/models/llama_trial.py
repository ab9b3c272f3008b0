"""Opens a GGUF file with llama.cpp and uses it once. `checked_file.py` runs this module in a process of its own.

llama.cpp ends its process on many damaged files: by a failed assertion, an exception that no C caller can catch, or an
invalid access. Everything that Outpace asks of llama.cpp for a file is done here once, in the same way.
"""

from __future__ import annotations

import ctypes as c
import os
import sys
from contextlib import suppress
from pathlib import Path

from outpace.errors import OutpaceError
from outpace.models.checked_file import REFUSED, trust
from outpace.models.gguf_tokenizer import LlamaTokenizer
from outpace.models.llama_file import LlamaFile
from outpace.models.llama_library import FLASH_ATTENTION_ON, Batch, Library, load_library

_CONTEXT_TOKENS = 256
_STEP_TOKENS = 8

# Letters, digits, spaces and characters beyond 16 bits: a text is split by such classes before it becomes tokens.
_SAMPLE = "Hello world 1234567890 don't\t\n  \u00c0\u03a9\u0416\u05d0\u4f60 \U0001f600\ufffd\u2028 <|end|></s> __--..!!"


def try_vocabulary(path: Path, library: Library) -> int:
    """Do everything that a tokenizer does, and return the number of tokens."""
    tokenizer = LlamaTokenizer(path, library)
    tokenizer.end_ids  # noqa: B018
    for token, _ in enumerate(tokenizer.vocabulary()):
        tokenizer.token_bytes(token)
    for text in (_SAMPLE, ""):
        tokenizer.encode(text)
        tokenizer.encode(text, add_special=False, parse_special=False)
    _try_single_bytes(path, library)
    return tokenizer.vocab_size


def _try_single_bytes(path: Path, library: Library) -> None:
    """llama.cpp needs a token for each byte of a character that the vocabulary lacks, and may end without it."""
    file = LlamaFile(path, library, vocab_only=True)
    vocab, tokens = library.llama_model_get_vocab(file.handle), (c.c_int32 * 16)()
    for byte in range(256):
        library.llama_tokenize(vocab, bytes([byte]), 1, tokens, len(tokens), False, False)


def try_weights(path: Path, library: Library, vocab_size: int) -> None:
    """Make a small context and run two steps: llama.cpp checks much of a file only when it builds its graph."""
    file = LlamaFile(path, library)
    params = library.llama_context_default_params()
    params.n_ctx, params.n_batch, params.n_ubatch, params.n_seq_max = _CONTEXT_TOKENS, _STEP_TOKENS, _STEP_TOKENS, 2
    params.flash_attn_type = FLASH_ATTENTION_ON
    params.kv_unified = True
    context = library.llama_init_from_model(file.handle, params)
    if not context:
        return  # the caller meets the same refusal, with the context that it wants
    for start, count in ((0, _STEP_TOKENS), (_STEP_TOKENS, 1)):
        library.llama_decode(context, _batch(start, count, vocab_size))
        library.llama_get_logits(context)


def _batch(start: int, count: int, vocab_size: int) -> Batch:
    positions = range(start, start + count)
    sequence = (c.c_int32 * 1)(0)
    arrays = (
        (c.c_int32 * count)(*(position % vocab_size for position in positions)),
        (c.c_int32 * count)(*positions),
        (c.c_int32 * count)(*([1] * count)),
        (c.c_void_p * count)(*([c.addressof(sequence)] * count)),
        (c.c_int8 * count)(*([1] * count)),
    )
    token, position, num_seqs, seqs, logits = (c.addressof(array) for array in arrays)
    batch = Batch(count, token, None, position, num_seqs, seqs, logits)
    batch.kept = (arrays, sequence)  # alive as long as the structure that points to them
    return batch


def _limit_harm() -> None:
    """No core dump, and the first to go if memory runs out."""
    with suppress(ImportError, OSError, ValueError):
        import resource

        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000")


def main(arguments: list[str]) -> int:
    path, library_path, part = Path(arguments[0]), arguments[1], arguments[2]
    _limit_harm()
    trust(path)  # nobody checks the checker
    try:
        library = load_library(library_path)
        vocab_size = try_vocabulary(path, library)
        if part == "weights":
            try_weights(path, library, vocab_size)
    except OutpaceError as error:
        print(error)
        return REFUSED
    return 0


if __name__ == "__main__":
    status = main(sys.argv[1:])
    sys.stdout.flush()
    os._exit(status)  # what was opened need not be freed
