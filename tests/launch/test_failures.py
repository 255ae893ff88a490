"""Which of several failed ranks is named, what is said of it, and with which exit code."""

import errno
import json
import os
import signal
import sys
import threading
import time

import pytest
from running import QUIET, train

from weft.errors import is_user_file
from weft.launch.failures import (
    custom_component_error,
    judge_failures,
    out_of_resources,
    report_verdict,
    send_to_launcher,
)
from weft.launch.local import launch_local


def report_failed_ranks(failures, run):
    """Prints which rank failed first, and returns the launcher's exit code."""
    return report_verdict(judge_failures(failures), run)


@pytest.fixture
def failure(tmp_path, monkeypatch):
    """A rank's failure as PyTorch's elastic agent hands it on."""
    from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

    monkeypatch.setenv("RANK", "0")

    def make(exitcode, kind=None, text=""):
        path = tmp_path / f"error-{len(list(tmp_path.iterdir()))}.json"
        monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(path))
        if kind is not None:
            assert send_to_launcher(text, kind)
        return ProcessFailure(local_rank=0, pid=4242, exitcode=exitcode, error_file=str(path))

    return make


def test_a_killed_rank_is_named_with_where_to_go_on(failure, tmp_path, capsys):
    lost = failure(1, "internal", "Traceback: connection closed by peer")
    run = tmp_path / "run"
    assert report_failed_ranks({0: lost, 1: failure(-signal.SIGKILL)}, run) == 3
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("rank 1 (process 4242) was killed by SIGKILL")
    assert "no checkpoint yet, so the same command starts over" in line
    assert str(run / "logs") in line


def test_a_run_that_has_only_local_checkpoints_resumes_from_them(failure, tmp_path, capsys):
    run, folder = tmp_path / "run", tmp_path / "disk" / "weft-0" / "demo"
    (folder / "checkpoints" / "step-00000007").mkdir(parents=True)
    run.mkdir()
    (run / "local-checkpoints.json").write_text(json.dumps({"folder": str(folder)}))
    assert report_failed_ranks({1: failure(-signal.SIGKILL)}, run) == 3
    assert "resumes from the last checkpoint, of step 7" in capsys.readouterr().err


RANK_1_STAYS = """
import os, signal, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
ready = sys.argv[1]
if os.environ["RANK"] == "1":
    open(ready, "w").close()
    time.sleep(60)
while not os.path.exists(ready):
    time.sleep(0.01)
sys.exit(7)
"""


def test_a_signal_while_the_other_ranks_are_ended_does_not_hide_the_failure(tmp_path):
    ready = tmp_path / "ready"

    def interrupt_twice():
        while not ready.exists():
            time.sleep(0.01)
        for _ in range(2):
            time.sleep(1)
            os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=interrupt_twice)
    thread.start()
    try:
        assert launch_local([sys.executable, "-S", "-c", RANK_1_STAYS, str(ready)], 2, None) == 7
    finally:
        thread.join()


def test_what_the_agent_ends_itself_is_not_blamed(failure, tmp_path, capsys):
    assert report_failed_ranks({1: failure(-signal.SIGTERM), 0: failure(-signal.SIGSEGV)}, tmp_path) == 3
    assert capsys.readouterr().err.startswith("rank 0 (process 4242) was killed by SIGSEGV; ")


def test_the_users_own_exception_is_shown_once_and_before_what_it_caused(failure, tmp_path, capsys):
    first = failure(1, "internal", "Traceback: connection closed")
    own = failure(2, "custom", "my.py:3: ValueError: boom\nTraceback: my.py")
    assert report_failed_ranks({0: first, 1: own, 2: failure(-signal.SIGABRT)}, tmp_path) == 2
    assert capsys.readouterr().err == "my.py:3: ValueError: boom\nTraceback: my.py\n"


def test_a_mistake_was_reported_by_its_rank(failure, tmp_path, capsys):
    assert report_failed_ranks({0: failure(1, "internal", "x"), 1: failure(2, "mistake", "wrong")}, tmp_path) == 2
    assert capsys.readouterr().err == ""


def test_of_faults_of_weft_the_first_is_shown(failure, tmp_path, capsys):
    first = failure(1, "internal", "Traceback: the cause")
    assert report_failed_ranks({0: failure(1, "internal", "Traceback: a consequence"), 1: first}, tmp_path) == 1
    assert "the cause" in capsys.readouterr().err


@pytest.mark.parametrize("code", [130, 143])
def test_ranks_that_stopped_after_a_signal_are_not_reported(failure, tmp_path, capsys, code):
    assert report_failed_ranks({0: failure(-signal.SIGTERM), 1: failure(code)}, tmp_path) == code
    assert report_failed_ranks({0: failure(1), 1: failure(1)}, tmp_path) == 1  # not finite: reported by the first rank
    assert capsys.readouterr().err == ""


def raised(file):
    """An exception raised by code of this file, which this test calls."""
    names = {}
    exec(compile("def act(): raise RuntimeError('closed')", file, "exec"), names)
    try:
        names["act"]()
    except RuntimeError as error:
        return error


def test_what_is_the_users_own():
    beneath = custom_component_error(raised("/lib/python3/site-packages/torch/nn/modules/linear.py"), {})
    line, _, first, *_ = beneath.splitlines()
    assert "test_failures.py:" in line
    assert line.endswith(": RuntimeError: closed")
    assert first.startswith(f'  File "{__file__}"')
    # A rank that died is not the fault of the model that waits for its weights.
    assert (
        custom_component_error(raised("/lib/python3/site-packages/torch/distributed/distributed_c10d.py"), {}) is None
    )
    # What an optimizer asks of a sharded parameter may be nothing that DTensor knows.
    assert custom_component_error(raised("/lib/python3/site-packages/torch/distributed/tensor/_dispatch.py"), {})


def test_a_process_without_launcher_sends_no_message(monkeypatch, tmp_path):
    monkeypatch.delenv("TORCHELASTIC_ERROR_FILE", raising=False)
    monkeypatch.setenv("RANK", "0")
    assert not send_to_launcher("text", "custom")


def test_too_little_memory_is_one_line_and_the_traceback_is_logged(run_yaml, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert train(run_yaml(log=QUIET), "model.hidden_size=4000000") == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(
        "out of memory: this machine's memory has no space for another 64 TB; lower training.micro_ba"
    )
    log = tmp_path / "runs" / "demo" / "logs" / "rank-00000.log"
    assert line.endswith(f"the traceback is in {log}")
    assert "Traceback" in log.read_text()
    torch_says = "CUDA out of memory. Tried to allocate 20.00 GiB. GPU 0 has a total capacity of 79.10 GiB of which 1"
    assert "the GPU's memory has no space for another 20.00 GiB;" in out_of_resources(RuntimeError(torch_says))
    assert out_of_resources(RuntimeError("something else")) is None


def test_a_disk_that_is_too_full_for_compiled_code_is_named(tmp_path, monkeypatch):
    failed = type("CppCompileError", (RuntimeError,), {"__module__": "torch._inductor.exc"})
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    line = out_of_resources(failed("a.h: warning\nld: final link failed: No space left on device\n"))
    assert line.startswith(
        f"{tmp_path}: No space left on device; free space, or set TORCHINDUCTOR_CACHE_DIR to another folder"
    )
    assert out_of_resources(failed("ld: cannot find -lgomp")) is None


def test_a_cache_of_compiled_code_that_cannot_be_used_is_named(tmp_path, monkeypatch):
    def failed(number, path):
        return OSError(number, os.strerror(number), str(path))

    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "c"))
    line = out_of_resources(failed(errno.ENOENT, tmp_path / "c" / "x"))
    assert line.startswith(f"{tmp_path}/c/x: No such file or directory; set TORCHINDUCTOR_CACHE_DIR")
    assert "free space" in out_of_resources(failed(errno.ENOSPC, tmp_path / "c" / "x"))
    assert out_of_resources(failed(errno.ENOENT, tmp_path / "checkpoints")) is None
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "")
    assert out_of_resources(failed(errno.ENOENT, tmp_path / "c")) is None


def test_generated_code_is_not_custom_code(tmp_path, monkeypatch):
    file = tmp_path / "ab" / "cabc.py"
    assert is_user_file(str(file))
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    assert not is_user_file(str(file))
