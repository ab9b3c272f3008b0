"""Maps a GGUF file, checks that the native backend can run it, and packs its weights into the library's memory.

The file is read in slabs, and each slab is released before the next one. Loading needs little more memory than the
packed weights.
"""

from __future__ import annotations

import ctypes as c
import mmap
import sys
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import numpy as np

from outpace.backends.native.library import Library, Shape
from outpace.models.fingerprint import gguf_fingerprint
from outpace.models.gguf_header import GGUFHeader, read_header
from outpace.models.gguf_model import Tensor, describe, read_vector
from outpace.models.head_gguf import check_fits, describe_head

_SLAB_BYTES = 8 << 20
_LARGE_BYTES = 1 << 30  # larger files show a progress bar
_TILE_ROWS = 16


class _WeightsFile:
    """A mapped file whose tensors can be packed into a model of the library."""

    def __init__(self, path: Path, library: Library) -> None:
        self.path = path
        self._lib = library
        self._header = read_header(path)
        with path.open("rb") as file:
            self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        self._data = np.frombuffer(self._map, np.uint8)[self._header.data_offset :]

    def _packed_bytes(self, tensors: Sequence[Tensor]) -> int:
        packed = self._lib.packed_bytes
        return sum(packed(t.info.type, t.rows, t.cols) for t in tensors if t.is_matrix)

    def _progress(self, total: int) -> AbstractContextManager[Any]:
        """A bar for a large file. A small one is loaded in about the time that importing tqdm would take."""
        if total < _LARGE_BYTES or not sys.stderr.isatty():
            return nullcontext()
        from tqdm import tqdm

        return tqdm(desc=f"Loading {self.path.name}", total=total, unit="B", unit_scale=True, leave=False)

    def _load(self, shape: Shape, threads: int, tensors: Sequence[Tensor]) -> c.c_void_p:
        """Create the model in the library with all its weights. The caller must destroy it."""
        handle = c.c_void_p()
        self._lib.check(self._lib.create(c.byref(shape), threads, c.byref(handle)))
        try:
            with self._progress(sum(tensor.info.num_bytes or 0 for tensor in tensors)) as bar:
                for tensor in tensors:
                    self._load_tensor(handle, tensor)
                    if bar is not None:
                        bar.update(tensor.info.num_bytes or 0)
        except BaseException:
            self._lib.destroy(handle)
            raise
        return handle

    def _load_tensor(self, handle: c.c_void_p, tensor: Tensor) -> None:
        if tensor.is_matrix:
            self._pack(handle, tensor)
            return
        values = read_vector(tensor.info, self._data)
        self._lib.check(self._lib.set_vector(handle, tensor.layer, tensor.number, values.ctypes.data, values.size))

    def _pack(self, handle: c.c_void_p, tensor: Tensor) -> None:
        lib, info = self._lib, tensor.info
        assert info.num_bytes is not None, "a supported type has a size"
        lib.check(lib.lay_out(handle, tensor.layer, tensor.number, info.type, tensor.rows, tensor.cols))
        source = self._data.ctypes.data + info.offset
        row_bytes = info.num_bytes // tensor.rows
        step = max(_SLAB_BYTES // row_bytes // _TILE_ROWS, 1) * _TILE_ROWS
        for begin in range(0, tensor.rows, step):
            end = min(begin + step, tensor.rows)
            lib.check(lib.pack(handle, tensor.layer, tensor.number, source, begin, end))
            self._release(info.offset + begin * row_bytes, info.offset + end * row_bytes)

    def _release(self, begin: int, end: int) -> None:
        """Drop this range of the tensor data from memory. A later access reads it from the file again."""
        if hasattr(mmap, "MADV_DONTNEED"):
            offset = self._header.data_offset
            first = (offset + begin) // mmap.PAGESIZE * mmap.PAGESIZE
            self._map.madvise(mmap.MADV_DONTNEED, first, offset + end - first)


class ModelFile(_WeightsFile):
    def __init__(self, path: Path, library: Library) -> None:
        """Raises ModelError for a broken file and Unsupported for one that another backend may run."""
        super().__init__(path, library)
        self.description = describe(self._header, self._data, library.supports)
        self.name = str(self._header.metadata.get("general.name") or path.stem)

    @property
    def header(self) -> GGUFHeader:
        return self._header

    @property
    def packed_bytes(self) -> int:
        """Memory that the packed matrices will need."""
        return self._packed_bytes(self.description.tensors)

    def load(self, threads: int) -> c.c_void_p:
        a = self.description.architecture
        frequencies = np.ascontiguousarray(a.rope.frequencies, np.float64)
        shape = Shape(
            a.num_layers, a.width, a.hidden, a.num_heads, a.num_kv_heads, a.head_dim, a.num_rotated, a.vocab_size,
            int(a.halves_rotated), a.epsilon, a.rope.scale, frequencies.ctypes.data_as(c.POINTER(c.c_double)), 0,
        )  # fmt: skip
        return self._load(shape, threads, self.description.tensors)


class HeadFile(_WeightsFile):
    """A draft head for a target. It uses the target's RoPE frequencies, on the two halves of a head."""

    def __init__(self, path: Path, library: Library, target: ModelFile) -> None:
        """Raises ModelError for a broken file, and for a head of another model."""
        super().__init__(path, library)
        self.description = describe_head(path, self._header, self._data, library.supports)
        self._target = target.description.architecture
        fingerprint = gguf_fingerprint(target.path, target.header)
        check_fits(path, self.description, self._target, target.name, fingerprint)

    @property
    def packed_bytes(self) -> int:
        return self._packed_bytes(self.description.tensors)

    def load(self, threads: int) -> c.c_void_p:
        d, rope = self.description, self._target.rope
        frequencies = np.ascontiguousarray(rope.frequencies, np.float64)
        shape = Shape(
            1, d.width, d.hidden, d.num_heads, d.num_kv_heads, d.head_dim, self._target.num_rotated, d.vocab_size,
            1, d.epsilon, rope.scale, frequencies.ctypes.data_as(c.POINTER(c.c_double)), len(d.taps),
        )  # fmt: skip
        return self._load(shape, threads, d.tensors)
