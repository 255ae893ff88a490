"""The folder in which compiled code is kept."""

import errno
import os
import subprocess
import sys
import time

import pytest
import torch

from weft.kernels import compiler
from weft.kernels.compiler import use_user_cache


def test_the_folder_is_the_users(monkeypatch, tmp_path):
    monkeypatch.setenv("WEFT_CACHE", str(tmp_path))
    monkeypatch.setenv(compiler.FOLDER, str(tmp_path / "given"))
    use_user_cache()
    assert os.environ[compiler.FOLDER] == str(tmp_path / "given")
    monkeypatch.delenv(compiler.FOLDER)
    use_user_cache()
    (folder,) = (tmp_path / "compiled").iterdir()
    assert os.environ[compiler.FOLDER] == str(folder)
    assert folder.name.startswith(f"torch-{torch.__version__}-")
    assert folder.stat().st_mode & 0o77 == 0  # others cannot put code there


def test_the_least_recently_used_files_are_deleted_above_the_limit(tmp_path):
    now, ages = time.time(), {"new": 0, "read": 7300, "old": 9000, "older": 9500, "oldest": 9900, "some.lock": 99999}
    for name, age in ages.items():
        file = tmp_path / "torch-1" / name
        file.parent.mkdir(exist_ok=True)
        file.write_bytes(bytes(100))
        read = now - age
        os.utime(file, (read, read - 5000 if name == "read" else read))  # written before all others, but read later
    compiler.limit_size(tmp_path, limit=500)
    assert len(list(tmp_path.rglob("*"))) == 1 + len(ages)  # 500 bytes of code: nothing to do
    compiler.limit_size(tmp_path, limit=400)
    assert {file.name for file in (tmp_path / "torch-1").iterdir()} == {"new", "read", "old", "some.lock"}
    compiler.limit_size(tmp_path, limit=0)
    assert {file.name for file in (tmp_path / "torch-1").iterdir()} == {"new", "some.lock"}  # in use


def test_without_a_folder_that_can_be_written_pytorchs_own_stays(monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("WEFT_CACHE", str(tmp_path / "file"))
    monkeypatch.delenv(compiler.FOLDER, raising=False)
    use_user_cache()
    assert compiler.FOLDER not in os.environ


def test_a_folder_that_pytorch_itself_set_is_none_that_the_user_chose(monkeypatch, tmp_path):
    monkeypatch.delenv(compiler.FOLDER, raising=False)
    monkeypatch.setenv("WEFT_CACHE", str(tmp_path))
    program = f"import torch._dynamo, os; from weft.kernels.compiler import use_user_cache as use; use(); {SHOW}"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stdout.startswith(str(tmp_path)), done.stderr


def test_a_cache_is_emptied_on_a_full_disk(monkeypatch, tmp_path):
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache" / "large").write_bytes(bytes(100))

    def full(*_, **__):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(compiler.Path, "mkdir", full)
    assert compiler._empty(tmp_path / "cache") is None
    assert not list(tmp_path.iterdir())


SHOW = f"print(os.environ[{compiler.FOLDER!r}])"
PROGRAM = """
import torch
from weft.kernels.compiler import compiled

x = torch.linspace(-1, 1, 50, requires_grad=True)
(found,) = torch.autograd.grad(compiled(lambda x: (x.sin() + x).exp())(x).sum(), x)
torch.testing.assert_close(found, (x.sin() + x).exp() * (x.cos() + 1))
print(sorted(name for name in torch._dynamo.utils.counters["inductor"] if "cache" in name))
"""


@pytest.mark.parametrize("variable", ["WEFT_CACHE", compiler.FOLDER])
def test_one_process_compiles_and_damaged_code_is_compiled_again(variable, tmp_path):
    """Damaged: files that a killed compiler wrote in part. Nothing is deleted in a folder that the user chose."""
    (tmp_path / "own").write_text("")

    def run(processes: int) -> list[tuple[str, str]]:
        environment = {name: value for name, value in os.environ.items() if name != compiler.FOLDER}
        environment[variable] = str(tmp_path)
        options = {"env": environment, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        started = [subprocess.Popen([sys.executable, "-c", PROGRAM], **options) for _ in range(processes)]
        found = [process.communicate() for process in started]
        assert [process.returncode for process in started] == [0] * processes, found
        return found

    at_once = run(2)
    assert sorted(out.strip() for out, _ in at_once) == ["['fxgraph_cache_hit']", "['fxgraph_cache_miss']"]
    assert not any("empty cache" in errors for _, errors in at_once)
    # Inductor's own tests of AVX-512's extensions are not damaged: without them it compiles for fewer instructions.
    libraries = [file for file in tmp_path.rglob("*.so") if "_chk_kernel" not in file.with_suffix(".cpp").read_text()]
    assert libraries
    for library in libraries:
        library.write_bytes(library.read_bytes()[:100])
    ((_, errors),) = run(1)
    again = next((tmp_path / "compiled").iterdir()) if variable == "WEFT_CACHE" else tmp_path / "weft" / "again"
    assert f"compiling failed, and starts again with an empty cache in {again}: " in errors
    assert all(library.stat().st_size > 100 for library in again.rglob("*.so"))
    assert (tmp_path / "own").exists()
    if variable == compiler.FOLDER:
        assert all(library.stat().st_size == 100 for library in libraries)
