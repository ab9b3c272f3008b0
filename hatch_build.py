"""Builds the native library when the package is built. If that is not possible, the package is built without it.

Where no C++ compiler works, the build asks pip for one, the package ziglang. It is needed for the build only, and no
other build downloads it.

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


# With one of these set, pip and uv install only what lies in given folders. A package missing there would end the
# installation, so the compiler is then asked for only if the library is required.
OFFLINE_SETTINGS = ("PIP_NO_INDEX", "UV_NO_INDEX", "UV_OFFLINE")


class NativeBuildHook(BuildHookInterface[Any]):
    @property
    def _is_required(self) -> bool:
        return os.environ.get("OUTPACE_NATIVE", "") == "1"

    @property
    def _is_wanted(self) -> bool:
        return self.target_name == "wheel" and os.environ.get("OUTPACE_NATIVE", "") != "0"

    def _builder(self) -> ModuleType:
        return _load_builder(Path(self.root) / NATIVE / "build.py")

    def dependencies(self) -> list[str]:
        """The packages that pip installs for this build, besides those of pyproject.toml."""
        is_offline = any(os.environ.get(name, "0") not in ("", "0", "false") for name in OFFLINE_SETTINGS)
        if not self._is_wanted or (is_offline and not self._is_required):
            return []
        found: list[str] = self._builder().build_requirements()
        return found

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        if not self._is_wanted:
            return
        builder = self._builder()
        try:
            library: Path = builder.build()
        except builder.BuildError as error:
            if self._is_required:
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
