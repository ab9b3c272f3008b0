"""Builds the native library when the package is built. Without a compiler, the package is built without it.

The build backend is Hatchling because its build succeeds when compilation fails. scikit-build-core and meson-python
need CMake or Meson and a working compiler to produce any wheel. Outpace works without its native library: llama.cpp
runs every model. The library is inside the package in the source tree too, so an editable install finds it in the same
place. OUTPACE_NATIVE=0 skips the library. OUTPACE_NATIVE=1 makes a failed compilation fail the build, for releases.
"""

from __future__ import annotations

import importlib.util
import os
import sysconfig
from pathlib import Path
from types import ModuleType
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

NATIVE = Path("outpace/backends/native")


class NativeBuildHook(BuildHookInterface[Any]):
    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        wanted = os.environ.get("OUTPACE_NATIVE", "")
        if self.target_name != "wheel" or wanted == "0":
            return
        builder = _load_builder(Path(self.root) / NATIVE / "build.py")
        try:
            library: Path = builder.build()
        except builder.BuildError as error:
            if wanted == "1":
                raise
            self.app.display_warning(f"Outpace is installed without its native backend: {error}")
            return
        build_data["artifacts"].append(f"/{NATIVE.as_posix()}/{library.name}")
        # ctypes loads the library, so one wheel works with every Python 3, but on one platform only.
        build_data["pure_python"] = False
        build_data["tag"] = f"py3-none-{_platform_tag()}"


def _load_builder(path: Path) -> ModuleType:
    """Load build.py by path: importing the package needs its dependencies, which an isolated build does not have."""
    spec = importlib.util.spec_from_file_location("outpace_native_build", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _platform_tag() -> str:
    return sysconfig.get_platform().replace("-", "_").replace(".", "_")
