"""The ctypes binding of the native library (csrc/capi.h). No other module depends on its binary interface.

The library is optional: an install that could not compile goes on without it. `load_library` then raises a BackendError
that says why; importing this module never fails.
"""

from __future__ import annotations

import ctypes as c
from functools import cache
from pathlib import Path
from typing import Any

from outpace.backends.native.build import HERE, IS_SUPPORTED, LIBRARY_NAME, BuildError, find_compiler
from outpace.errors import BackendError

ABI_VERSION = 7
LIBRARY_PATH = HERE / LIBRARY_NAME
REBUILD = "python -m outpace.backends.native.build"
BENEFITS = "the library gives faster decoding, cheap verification of drafts, and bit-exact results"

OK, BAD_ARGUMENT, NO_MEMORY, FAULT = range(4)


class Shape(c.Structure):
    _fields_ = (
        ("num_layers", c.c_int32),
        ("width", c.c_int32),
        ("hidden", c.c_int32),
        ("num_heads", c.c_int32),
        ("num_kv_heads", c.c_int32),
        ("head_dim", c.c_int32),
        ("num_rotated", c.c_int32),
        ("vocab_size", c.c_int32),
        ("rope_style", c.c_int32),
        ("epsilon", c.c_float),
        ("rope_scale", c.c_float),
        ("rope_frequencies", c.POINTER(c.c_double)),
        ("num_taps", c.c_int32),
    )


class Case(c.Structure):
    _fields_ = (
        ("seed", c.c_uint64),
        ("position", c.c_int64),
        ("top_p", c.c_double),
        ("min_p", c.c_double),
        ("sharpness", c.c_float),
        ("top_k", c.c_int32),
        ("rule", c.c_int32),
        ("num_drafted", c.c_int32),
    )


_P, _I, _L = c.c_void_p, c.c_int32, c.c_int64
Decide = c.CFUNCTYPE(None, _I, c.POINTER(_I), c.POINTER(c.c_float), c.POINTER(_I))
_SIGNATURES: dict[str, tuple[Any, list[Any]]] = {
    "outpace_page_tokens": (_I, []),
    "outpace_isa": (c.c_char_p, []),
    "outpace_last_error": (c.c_char_p, []),
    "outpace_read_bandwidth": (c.c_double, [_I, _L]),
    "outpace_supports": (_I, [_I, _L, _L]),
    "outpace_packed_bytes": (_L, [_I, _L, _L]),
    "outpace_create": (_I, [c.POINTER(Shape), _I, c.POINTER(_P)]),
    "outpace_destroy": (None, [_P]),
    "outpace_lay_out": (_I, [_P, _I, _I, _I, _L, _L]),
    "outpace_pack": (_I, [_P, _I, _I, _P, _L, _L]),
    "outpace_set_vector": (_I, [_P, _I, _I, _P, _L]),
    "outpace_keep_taps": (_I, [_P, _P, _I]),
    "outpace_follow": (_I, [_P, _P, _P]),
    "outpace_start": (_I, [_P, _L, _L]),
    "outpace_packed_size": (_L, [_P]),
    "outpace_bytes_per_step": (_L, [_P]),
    "outpace_forward": (_I, [_P, _P, _I, _P, _P, _L, _P, _P]),
    "outpace_states": (_P, [_P]),
    "outpace_copy_page": (_I, [_P, _I, _I]),
    "outpace_draft": (_I, [_P, _P, _I, _P, _P, _L, _P, _P, _P, _P, _P, Decide]),
    "outpace_verifier_create": (_I, [_L, _I, c.POINTER(_P)]),
    "outpace_verifier_destroy": (None, [_P]),
    "outpace_verify": (_I, [_P, _P, _I, _P, _P, _P, _P, _P]),
    "outpace_probs": (_I, [_P, _P, _P, _P]),
}


class Library:
    """The native library, loaded and checked. Attributes are its functions, typed."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            dll = c.CDLL(str(path))
            dll.outpace_abi_version.restype = _I
            version = dll.outpace_abi_version()
        except (OSError, AttributeError) as error:
            raise BackendError(
                f"the native library {path} cannot be loaded ({error}); rebuild it: {REBUILD}"
            ) from error
        if version != ABI_VERSION:
            raise BackendError(
                f"the native library {path} has interface version {version} and Outpace needs {ABI_VERSION}; "
                f"rebuild it: {REBUILD}"
            )
        for name, (result, arguments) in _SIGNATURES.items():
            function = getattr(dll, name)
            function.restype, function.argtypes = result, arguments
            setattr(self, name.removeprefix("outpace_"), function)
        self.isa: str = self.__dict__["isa"]().decode()

    def __getattr__(self, name: str) -> Any:  # the functions set above
        raise AttributeError(f"{name} is not among the native library's functions")

    def check(self, status: int) -> None:
        """Raise BackendError with the library's message if `status` is an error code."""
        if status != OK:
            raise BackendError(f"the native backend failed: {self.last_error().decode(errors='replace')}")


@cache
def load_library() -> Library:
    if not LIBRARY_PATH.is_file():
        raise BackendError(f"the native library was not built ({_why_not_built()})")
    return Library(LIBRARY_PATH)


def _why_not_built() -> str:
    try:
        compiler = find_compiler()
    except BuildError as error:
        return f"{error}, then run {REBUILD}" if IS_SUPPORTED else str(error)
    return f"{compiler.name} is installed now; build it: {REBUILD}"
