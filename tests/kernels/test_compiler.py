"""The folder in which compiled code is kept."""

import errno
import os
import shutil
import signal
import subprocess
import time
from pathlib import Path

import pytest
import torch
from forked import Forked

from weft.errors import UserError
from weft.kernels import compiler, torch_private
from weft.kernels.compiler import use_user_cache

pytestmark = pytest.mark.xdist_group("ranks")


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
    own = torch_private.default_folder()
    assert os.environ.get(compiler.FOLDER, own) == own  # importing torch._dynamo sets it


def test_a_folder_of_the_users_choice_that_cannot_be_written_is_refused(monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv(compiler.FOLDER, str(tmp_path / "file" / "cache"))
    with pytest.raises(UserError, match=f"{compiler.FOLDER}: {tmp_path}.*set another folder"):
        use_user_cache()


def test_a_folder_that_pytorch_itself_set_is_none_that_the_user_chose(monkeypatch, tmp_path):
    monkeypatch.delenv(compiler.FOLDER, raising=False)
    monkeypatch.setenv("WEFT_CACHE", str(tmp_path))
    program = f"import torch._dynamo, os; from weft.kernels.compiler import use_user_cache as use; use(); {SHOW}"
    out, errors = Forked(program=program).communicate(timeout=60)
    assert out.startswith(str(tmp_path)), errors


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
import torch._inductor.config
from weft.kernels.compiler import compiled

torch._inductor.config.compile_threads = 2  # as in runs: with one, it compiles in the order of the graphs
x = torch.linspace(-1, 1, 50, requires_grad=True)
(found,) = torch.autograd.grad(compiled(lambda x: (x.sin() + x).exp())(x).sum(), x)
torch.testing.assert_close(found, (x.sin() + x).exp() * (x.cos() + 1))
print(sorted(name for name in torch._dynamo.utils.counters["inductor"] if "cache" in name))
"""


TWO = """
import os
import sys
import torch._inductor.compile_fx

child = os.fork()
"""
BOTH_ENDED = """
sys.stdout.flush()
if child == 0:
    os._exit(0)
assert os.waitpid(child, 0)[1] == 0
"""


def run(program: str, **environment: Path) -> tuple[str, str]:
    """What a program that compiles printed."""
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv(compiler.FOLDER, raising=False)
        process = Forked(program=program, **{name: str(path) for name, path in environment.items()})
        found = process.communicate(timeout=240)
    assert process.returncode == 0, found
    return found


@pytest.fixture(scope="module")
def at_once(tmp_path_factory):
    """A folder in which two processes compiled at once, and what they printed."""
    folder = tmp_path_factory.mktemp("at_once")
    return folder, run(TWO + PROGRAM + BOTH_ENDED, WEFT_CACHE=folder)


def test_of_processes_at_once_one_compiles(at_once):
    _, (out, errors) = at_once
    assert sorted(out.splitlines()) == ["['fxgraph_cache_hit']", "['fxgraph_cache_miss']"]
    assert "empty cache" not in errors


@pytest.mark.parametrize("variable", [pytest.param("WEFT_CACHE", marks=pytest.mark.long), compiler.FOLDER])
def test_damaged_code_is_compiled_again(variable, at_once, tmp_path):
    """Damaged: files that a killed compiler wrote in part. Nothing is deleted in a folder that the user chose."""
    (folder,) = (at_once[0] / "compiled").iterdir()
    shutil.copytree(
        folder, tmp_path / "compiled" / folder.name if variable == "WEFT_CACHE" else tmp_path, dirs_exist_ok=True
    )
    (tmp_path / "own").write_text("")
    # Inductor's own tests of AVX-512's extensions are not damaged: without them it compiles for fewer instructions.
    libraries = [file for file in tmp_path.rglob("*.so") if "_chk_kernel" not in file.with_suffix(".cpp").read_text()]
    assert libraries
    for library in libraries:
        library.write_bytes(library.read_bytes()[:100])
    _, errors = run(PROGRAM, **{variable: tmp_path})
    again = next((tmp_path / "compiled").iterdir()) if variable == "WEFT_CACHE" else tmp_path / "weft" / "again"
    assert f"compiling failed, and starts again with an empty cache in {again}: " in errors
    assert all(library.stat().st_size > 100 for library in again.rglob("*.so"))
    assert (tmp_path / "own").exists()
    if variable == compiler.FOLDER:
        assert all(library.stat().st_size == 100 for library in libraries)


@pytest.fixture
def on_path(tmp_path):
    """Puts a shell script on the PATH that it returns."""

    def write(name, text):
        file = tmp_path / "bin" / name
        file.parent.mkdir()
        file.write_text(f"#!/bin/sh\n{text}\n")
        file.chmod(0o755)
        return f"{file.parent}:{os.environ['PATH']}"

    return write


KILLED = b"g++: fatal error: Killed signal terminated program cc1plus\ncompilation terminated.\n"


@pytest.mark.parametrize(
    ("code", "output", "emptied"),
    [(-signal.SIGINT, b"", False), (-signal.SIGTERM, b"", False), (1, KILLED, False), (1, b"", True)],
)
def test_the_cache_is_not_emptied_if_a_signal_stopped_the_compiler(code, output, emptied, monkeypatch, tmp_path):
    answers = iter([subprocess.CalledProcessError(code, "g++", output), "compiled"])

    def compile_graph(*_, **__):
        if isinstance(answer := next(answers), Exception):
            raise RuntimeError from answer
        return answer

    monkeypatch.setattr(compiler, "compile_graph", compile_graph)
    monkeypatch.setenv("WEFT_CACHE", str(tmp_path))
    monkeypatch.setenv(compiler.FOLDER, compiler.default_folder())
    use_user_cache()
    (own := Path(os.environ[compiler.FOLDER]) / "code").write_text("")
    assert compiler.compile_once(torch.fx.symbolic_trace(torch.nn.ReLU()), [torch.ones(2)]) == "compiled"
    assert own.exists() != emptied


@pytest.mark.long
def test_a_signal_to_the_compiler_damages_no_code(on_path, tmp_path):
    """Ctrl-C in a terminal reaches it, too."""
    stop = f'case "$*" in *main.cpp*-shared*) mkdir {tmp_path}/stopped 2>/dev/null && kill -TERM $$;; esac'
    path = on_path("g++", f'{stop}\nexec {shutil.which("g++")} "$@"')
    _, errors = run(PROGRAM, WEFT_CACHE=tmp_path / "cache", PATH=path)
    assert (tmp_path / "stopped").exists()
    assert "empty cache" not in errors
    assert not list(tmp_path.rglob("failed"))


BROKEN = "echo broken >&2\nexit 1"


def test_an_installed_linker_is_used_that_is_faster(on_path, monkeypatch):
    from torch._inductor.cpp_builder import get_cpp_options

    def chosen(*names):
        torch_private._choose_linker(names)
        return [flag for flag in get_cpp_options("g++", do_link=True)[3] if "fuse-ld" in flag]

    monkeypatch.setenv("PATH", on_path("ld.lld", BROKEN))
    assert chosen("none", "lld", "gold") == chosen("lld") == ["fuse-ld=lld"]
    assert chosen("none") == chosen() == []


@pytest.mark.long
def test_the_compilers_own_linker_is_used_if_another_one_fails(on_path, tmp_path):
    _, errors = run(PROGRAM, WEFT_CACHE=tmp_path / "cache", PATH=on_path("ld.lld", BROKEN))
    assert errors.count("starts again with an empty cache") == 1
