"""`outpace doctor` on a tiny model: what it finds, and what it reports as missing."""

from __future__ import annotations

import json
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest

from outpace.backends.native import library
from outpace.cli import main
from outpace.commands import doctor_torch
from outpace.errors import BackendError
from tests.tiny_gguf import write_model


@pytest.fixture
def path(tmp_path) -> str:
    return str(write_model(tmp_path / "tiny.gguf"))


def test_it_measures_every_backend_that_can_run_the_model(path, capsys):
    assert main(["doctor", "--model", path, "--rounds", "1", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert list(report["curves"]["llamacpp"]) == ["1", "2", "3", "4", "6", "8", "12", "16"]
    if report["machine"]["native_library"]:
        assert all(milliseconds > 0 for milliseconds in report["curves"]["native"].values())
        assert report["floor_ms"] > 0 and report["machine"]["instruction_set"]


def test_it_says_what_is_missing_and_what_that_would_bring(path, capsys, monkeypatch):
    def absent() -> None:
        raise BackendError("the native library was not built (no C++ compiler was found)")

    monkeypatch.setattr(library, "load_library", absent)
    monkeypatch.setattr("outpace.backends.native.runner.load_library", absent)
    assert main(["doctor", "--model", path, "--rounds", "1"]) == 0
    text = capsys.readouterr().out
    assert "native library   missing: the native library was not built" in text
    assert text.count("the native library was not built") == text.count("the library gives faster decoding") == 1
    assert "llamacpp, ms" in text and "native, ms" not in text


def test_it_says_why_a_model_does_not_run_natively(tmp_path, capsys):
    path = write_model(tmp_path / "tiny.gguf", metadata={"attention.sliding_window": 64})
    assert main(["doctor", "--model", str(path), "--rounds", "1"]) == 0
    assert "cannot run it:" in capsys.readouterr().out


# ---- torch and GPUs


def fake_torch(*gpus: Any, cuda: str | None = "12.8") -> Any:
    """As much of torch as the report reads; each GPU is its name, bytes of memory and capability."""
    properties = [
        SimpleNamespace(name=name, total_memory=memory, major=capability[0], minor=capability[1])
        for name, memory, capability in gpus
    ]
    return SimpleNamespace(
        __version__="2.10.0",
        version=SimpleNamespace(cuda=cuda, hip=None),
        cuda=SimpleNamespace(
            is_available=lambda: bool(gpus),
            device_count=lambda: len(gpus),
            get_device_properties=lambda index: properties[index],
        ),
    )


def torch_lines(monkeypatch: pytest.MonkeyPatch, torch: Any, smi: str = "") -> list[str]:
    """What the doctor says with this torch, and a driver whose tool prints `smi`."""
    monkeypatch.setitem(sys.modules, "torch", torch)
    monkeypatch.setattr(doctor_torch, "_is_installed", lambda package: True)
    monkeypatch.setattr("shutil.which", lambda name: f"/usr/bin/{name}" if smi else None)
    monkeypatch.setattr("subprocess.run", lambda *_, **__: SimpleNamespace(stdout=smi))
    return doctor_torch.as_lines(doctor_torch.torch_report())


def test_torch_and_each_gpu_are_named(monkeypatch):
    torch = fake_torch(("NVIDIA H200", 140 << 30, (9, 0)), ("NVIDIA L4", 22 << 30, (8, 9)))
    assert torch_lines(monkeypatch, torch, "570.86, NVIDIA H200\n570.86, NVIDIA L4\n") == [
        "torch            2.10.0, built for CUDA 12.8, driver 570.86",
        "GPU 0            NVIDIA H200, 140.0 GiB, compute capability 9.0",
        "GPU 1            NVIDIA L4, 22.0 GiB, compute capability 8.9",
    ]


@pytest.mark.parametrize(
    ("cuda", "smi", "says"),
    [
        ("12.8", "", "none: no NVIDIA driver answers"),
        (None, "", "none: no NVIDIA driver answers"),
        (
            None,
            "570.86, NVIDIA L4\n",
            "none: the driver has NVIDIA L4, and this torch is built for CPUs; install a CUDA",
        ),
        (
            "12.8",
            "470.1, NVIDIA L4\n",
            "none: the driver has NVIDIA L4, and torch cannot use it; check CUDA_VISIBLE_DEV",
        ),
    ],
)
def test_without_a_gpu_it_says_why(monkeypatch, cuda, smi, says):
    first, second = torch_lines(monkeypatch, fake_torch(cuda=cuda), smi)
    assert first.startswith(f"torch            2.10.0, built for {'CUDA 12.8' if cuda else 'CPUs'}")
    assert second.startswith(f"GPU              {says}")


def test_a_driver_that_does_not_answer_does_not_stop_the_report(monkeypatch):
    def hang(*_: Any, timeout: float, **__: Any) -> Any:
        raise subprocess.TimeoutExpired("nvidia-smi", timeout)

    monkeypatch.setattr("shutil.which", lambda name: name)
    monkeypatch.setattr("subprocess.run", hang)
    assert doctor_torch._nvidia_gpus() == ([], None)


def test_torch_that_is_not_installed_is_one_line_with_the_remedy_and_is_not_loaded(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", None)  # an import would raise an error
    monkeypatch.setattr(doctor_torch, "_is_installed", lambda package: package == "tokenizers")
    assert doctor_torch.as_lines(doctor_torch.torch_report()) == [
        "torch            unavailable: torch, safetensors are not installed; "
        "pip install 'outpace[torch]' installs what runs models on a GPU"
    ]


def test_torch_that_does_not_load_is_one_line(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", None)
    monkeypatch.setattr(doctor_torch, "_is_installed", lambda package: True)
    [line] = doctor_torch.as_lines(doctor_torch.torch_report())
    assert line.startswith("torch            unavailable: torch is installed and does not load (import of torch halted")


def test_the_report_has_torch(path, capsys, monkeypatch):
    monkeypatch.setattr(doctor_torch, "_is_installed", lambda package: False)
    assert main(["doctor", "--model", path, "--rounds", "1"]) == 0
    assert "\ntorch            unavailable: torch, safetensors, tokenizers are not installed" in capsys.readouterr().out
