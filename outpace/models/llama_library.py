"""The ctypes binding of libllama. No other module depends on its binary interface.

llama.cpp's C API changes every week and has no stable ABI, so the wheel `xllamacpp` is pinned: it contains a prebuilt
libllama with the whole API, for every common platform, so no compiler is needed. Two structures are passed by value;
their layouts below are those of that build. When a library is loaded, the values that its `*_default_params` functions
return are compared with a fingerprint. A shifted field gives a wrong value in the fingerprint, and the library is
rejected with an error message instead of crashing later.
"""

from __future__ import annotations

import ctypes as c
import importlib.util
import logging
import os
from functools import cache
from pathlib import Path
from typing import Any

from outpace.errors import BackendError

PINNED = "xllamacpp==2026.10.11549"
LIBRARY_VARIABLE = "OUTPACE_LLAMA_LIBRARY"

log = logging.getLogger("outpace.llamacpp")

LogCallback = c.CFUNCTYPE(None, c.c_int, c.c_char_p, c.c_void_p)
LOG_LEVEL_ERROR = 4
FLASH_ATTENTION_ON = 1
MAX_SEQUENCES = 256  # compiled into libllama


class ModelParams(c.Structure):
    _fields_ = (
        ("devices", c.c_void_p),
        ("tensor_buft_overrides", c.c_void_p),
        ("n_gpu_layers", c.c_int32),
        ("split_mode", c.c_int32),
        ("load_mode", c.c_int32),
        ("lazy_mode", c.c_int32),
        ("main_gpu", c.c_int32),
        ("tensor_split", c.c_void_p),
        ("progress_callback", c.c_void_p),
        ("progress_callback_user_data", c.c_void_p),
        ("kv_overrides", c.c_void_p),
        ("vocab_only", c.c_bool),
        ("check_tensors", c.c_bool),
        ("use_extra_bufts", c.c_bool),
        ("no_host", c.c_bool),
        ("no_alloc", c.c_bool),
        ("load_mtp", c.c_bool),
        # Room for fields that a build may add at the end; copied from the defaults to the call.
        ("tail", c.c_uint8 * 128),
    )


class ContextParams(c.Structure):
    _fields_ = (
        ("n_ctx", c.c_uint32),
        ("n_batch", c.c_uint32),
        ("n_ubatch", c.c_uint32),
        ("n_seq_max", c.c_uint32),
        ("n_rs_seq", c.c_uint32),
        ("n_outputs_max", c.c_uint32),
        ("n_outputs_max_per_seq", c.c_uint32),
        ("n_threads", c.c_int32),
        ("n_threads_batch", c.c_int32),
        ("ctx_type", c.c_int32),
        ("rope_scaling_type", c.c_int32),
        ("pooling_type", c.c_int32),
        ("attention_type", c.c_int32),
        ("flash_attn_type", c.c_int32),
        ("rope_freq_base", c.c_float),
        ("rope_freq_scale", c.c_float),
        ("yarn_ext_factor", c.c_float),
        ("yarn_attn_factor", c.c_float),
        ("yarn_beta_fast", c.c_float),
        ("yarn_beta_slow", c.c_float),
        ("yarn_orig_ctx", c.c_uint32),
        ("defrag_thold", c.c_float),
        ("cb_eval", c.c_void_p),
        ("cb_eval_user_data", c.c_void_p),
        ("type_k", c.c_int32),
        ("type_v", c.c_int32),
        ("abort_callback", c.c_void_p),
        ("abort_callback_data", c.c_void_p),
        ("unnamed_pointer", c.c_void_p),
        ("embeddings", c.c_bool),
        ("offload_kqv", c.c_bool),
        ("no_perf", c.c_bool),
        ("op_offload", c.c_bool),
        ("swa_full", c.c_bool),
        ("kv_unified", c.c_bool),
        ("samplers", c.c_void_p),
        ("n_samplers", c.c_size_t),
        ("ctx_other", c.c_void_p),
        ("tail", c.c_uint8 * 96),
    )


class Batch(c.Structure):
    _fields_ = (
        ("n_tokens", c.c_int32),
        ("token", c.c_void_p),
        ("embd", c.c_void_p),
        ("pos", c.c_void_p),
        ("n_seq_id", c.c_void_p),
        ("seq_id", c.c_void_p),
        ("logits", c.c_void_p),
    )


# The default values, read with the layouts above.
_MODEL_FINGERPRINT = {
    "devices": None, "tensor_buft_overrides": None, "n_gpu_layers": -1, "split_mode": 1, "main_gpu": 0,
    "tensor_split": None, "progress_callback": None, "kv_overrides": None, "vocab_only": False,
    "check_tensors": False, "use_extra_bufts": True, "no_host": False, "no_alloc": False,
}  # fmt: skip
_CONTEXT_FINGERPRINT = {
    "n_ctx": 512, "n_batch": 2048, "n_ubatch": 512, "n_seq_max": 1, "n_rs_seq": 0, "n_outputs_max_per_seq": 1,
    "n_threads": 4, "n_threads_batch": 4, "rope_scaling_type": -1, "pooling_type": -1, "attention_type": -1,
    "flash_attn_type": -1, "rope_freq_base": 0.0, "yarn_ext_factor": -1.0, "yarn_beta_slow": -1.0,
    "defrag_thold": -1.0, "cb_eval": None, "type_k": 1, "type_v": 1, "abort_callback": None,
    "unnamed_pointer": None, "embeddings": False, "offload_kqv": True, "no_perf": True, "op_offload": True,
    "swa_full": True, "kv_unified": False, "samplers": None, "n_samplers": 0, "ctx_other": None,
}  # fmt: skip

_P, _I, _B, _S = c.c_void_p, c.c_int32, c.c_bool, c.c_char_p
_SIGNATURES: dict[str, tuple[Any, list[Any]]] = {
    "llama_backend_init": (None, []),
    "llama_log_set": (None, [LogCallback, _P]),
    "llama_model_default_params": (ModelParams, []),
    "llama_context_default_params": (ContextParams, []),
    "llama_model_load_from_file": (_P, [_S, ModelParams]),
    "llama_model_free": (None, [_P]),
    "llama_init_from_model": (_P, [_P, ContextParams]),
    "llama_free": (None, [_P]),
    "llama_model_get_vocab": (_P, [_P]),
    "llama_model_n_ctx_train": (_I, [_P]),
    "llama_model_n_params": (c.c_uint64, [_P]),
    "llama_model_size": (c.c_uint64, [_P]),
    "llama_model_desc": (_I, [_P, _S, c.c_size_t]),
    "llama_model_chat_template": (_S, [_P, _S]),
    "llama_model_meta_val_str": (_I, [_P, _S, _S, c.c_size_t]),
    "llama_model_has_encoder": (_B, [_P]),
    "llama_model_is_recurrent": (_B, [_P]),
    "llama_model_is_hybrid": (_B, [_P]),
    "llama_n_ctx": (c.c_uint32, [_P]),
    "llama_n_ctx_seq": (c.c_uint32, [_P]),
    "llama_n_batch": (c.c_uint32, [_P]),
    "llama_decode": (_I, [_P, Batch]),
    "llama_get_logits": (_P, [_P]),
    "llama_get_memory": (_P, [_P]),
    "llama_memory_clear": (None, [_P, _B]),
    "llama_memory_seq_rm": (_B, [_P, _I, _I, _I]),
    "llama_memory_seq_cp": (None, [_P, _I, _I, _I, _I]),
    "llama_memory_seq_pos_max": (_I, [_P, _I]),
    "llama_tokenize": (_I, [_P, _S, _I, _P, _I, _B, _B]),
    "llama_token_to_piece": (_I, [_P, _I, _S, _I, _I, _B]),
    "llama_vocab_type": (_I, [_P]),
    "llama_vocab_n_tokens": (_I, [_P]),
    "llama_vocab_get_text": (_S, [_P, _I]),
    "llama_vocab_get_attr": (_I, [_P, _I]),
    "llama_vocab_is_eog": (_B, [_P, _I]),
    "llama_vocab_bos": (_I, [_P]),
    "llama_vocab_eos": (_I, [_P]),
    "llama_print_system_info": (_S, []),
}


class Library:
    """libllama, loaded and checked. Attributes are its functions, typed."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._dll = c.CDLL(str(path))
        except OSError as error:
            raise BackendError(f"the llama.cpp library {path} cannot be loaded ({error}); {_REMEDY}") from error
        for name, (result, arguments) in _SIGNATURES.items():
            function = getattr(self._dll, name, None)
            if function is None:
                raise BackendError(f"the llama.cpp library {path} has no function {name}; {_REMEDY}")
            function.restype, function.argtypes = result, arguments
            setattr(self, name, function)
        check_layout(self, path)
        self._recent_errors: list[str] = []
        self._log_callback = LogCallback(self._on_log)  # keeps the callback alive
        self.llama_log_set(self._log_callback, None)
        self.llama_backend_init()

    def __getattr__(self, name: str) -> Any:  # the functions set above
        raise AttributeError(f"{name} is not among the libllama functions Outpace uses")

    def _on_log(self, level: int, text: bytes | None, _: object) -> None:
        line = (text or b"").decode(errors="replace").rstrip()
        if level == LOG_LEVEL_ERROR and line:
            self._recent_errors.append(line)
            del self._recent_errors[:-20]
        log.debug("%s", line)

    def forget_errors(self) -> None:
        self._recent_errors.clear()

    def first_error(self) -> str:
        """libllama's first error since `forget_errors`; later lines mostly repeat it."""
        return self._recent_errors[0] if self._recent_errors else "no reason given"


_REMEDY = (
    f"use the one in {PINNED} (pip install {PINNED}), or point {LIBRARY_VARIABLE} at a libllama of the same version"
)


def check_layout(library: Any, path: Path) -> None:
    """Reject a library with other structure layouts than this module's."""
    for what, params, fingerprint in (
        ("llama_model_params", library.llama_model_default_params(), _MODEL_FINGERPRINT),
        ("llama_context_params", library.llama_context_default_params(), _CONTEXT_FINGERPRINT),
    ):
        for field, expected in fingerprint.items():
            found = getattr(params, field)
            if found != expected:
                raise BackendError(
                    f"the llama.cpp library {path} has another binary interface than Outpace was written for "
                    f"({what}.{field} reads {found!r} instead of {expected!r}); {_REMEDY}"
                )


def installed_library() -> Path:
    """The shared library inside the installed xllamacpp package, found without importing the package."""
    spec = importlib.util.find_spec("xllamacpp")
    for folder in (spec.submodule_search_locations or []) if spec else []:
        for path in sorted(Path(folder).glob("xllamacpp*")):
            if path.suffix in (".so", ".pyd", ".dylib"):
                return path
    raise BackendError(f"no llama.cpp library is installed; {_REMEDY}")


def load_library(path: str | None = None) -> Library:
    """The library at `path`, or the one the environment names, or the installed one."""
    chosen = path or os.environ.get(LIBRARY_VARIABLE)
    if chosen and not Path(chosen).is_file():
        raise BackendError(f"there is no llama.cpp library at {chosen}; {_REMEDY}")
    return _load(Path(chosen).resolve() if chosen else installed_library())


@cache
def _load(path: Path) -> Library:
    return Library(path)
