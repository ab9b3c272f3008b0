"""Maps a GGUF file, checks that the native backend can run it, and packs its weights into the library's memory.

The file is read in slabs, and each slab is released before the next one. Loading needs little more memory than the
packed weights.
"""

from __future__ import annotations

import ctypes as c
import mmap
import sys
from pathlib import Path

import numpy as np

from outpace.backends.native.library import Library, Shape
from outpace.models.gguf_header import read_header
from outpace.models.gguf_model import Tensor, describe, read_vector

_SLAB_BYTES = 8 << 20
_LARGE_BYTES = 1 << 30  # larger files show a progress bar
_TILE_ROWS = 16


class ModelFile:
    def __init__(self, path: Path, library: Library) -> None:
        """Raises ModelError for a broken file and Unsupported for one that another backend may run."""
        self.path = path
        self._lib = library
        header = read_header(path)
        with path.open("rb") as file:
            self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        self._data_offset = header.data_offset
        self._data = np.frombuffer(self._map, np.uint8)[header.data_offset :]
        self.description = describe(header, self._data, library.supports)
        self.name = str(header.metadata.get("general.name") or path.stem)

    @property
    def packed_bytes(self) -> int:
        """Memory that the packed matrices will need."""
        packed = self._lib.packed_bytes
        return sum(packed(t.info.type, t.rows, t.cols) for t in self.description.tensors if t.is_matrix)

    def load(self, threads: int) -> c.c_void_p:
        """Create the model in the library with all its weights. The caller must destroy it."""
        from tqdm import tqdm

        handle = self._create(threads)
        total = sum(tensor.info.num_bytes or 0 for tensor in self.description.tensors)
        show = total >= _LARGE_BYTES and sys.stderr.isatty()
        try:
            with tqdm(
                desc=f"Loading {self.path.name}", total=total, unit="B", unit_scale=True, leave=False, disable=not show
            ) as bar:
                for tensor in self.description.tensors:
                    self._load_tensor(handle, tensor)
                    bar.update(tensor.info.num_bytes or 0)
        except BaseException:
            self._lib.destroy(handle)
            raise
        return handle

    def _create(self, threads: int) -> c.c_void_p:
        a = self.description.architecture
        frequencies = np.ascontiguousarray(a.rope.frequencies, np.float64)
        shape = Shape(
            a.num_layers, a.width, a.hidden, a.num_heads, a.num_kv_heads, a.head_dim, a.num_rotated, a.vocab_size,
            int(a.halves_rotated), a.epsilon, a.rope.scale, frequencies.ctypes.data_as(c.POINTER(c.c_double)),
        )  # fmt: skip
        handle = c.c_void_p()
        self._lib.check(self._lib.create(c.byref(shape), threads, c.byref(handle)))
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
            first = (self._data_offset + begin) // mmap.PAGESIZE * mmap.PAGESIZE
            self._map.madvise(mmap.MADV_DONTNEED, first, self._data_offset + end - first)
