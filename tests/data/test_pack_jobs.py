"""Packing with many workers: the same bytes however it goes, and nothing lost when it is killed."""

import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from pack_encoders import DistrustedEncoder, FailingEncoder

from weft.cli.main import main
from weft.data.packing.pack import pack
from weft.data.stores.store import TokenStore
from weft.errors import UserError
from weft.observe.console import Console

FILES = ("tokens.bin", "tokens.idx", "store.json", "rejects.jsonl")
RANGE = 4096
PROGRAM = """
import sys
from weft.data.packing.pack import pack
pack(sys.argv[3:], sys.argv[2], sys.argv[1], {})
"""


@pytest.fixture(scope="module")
def words():
    chooser = random.Random(5)
    return ["".join(chooser.choices("etaoinshrdlu é\n", k=chooser.randint(1, 9))) for _ in range(300)]


@pytest.fixture(scope="module")
def inputs(tmp_path_factory, words):
    """Two files of JSON lines with rejects and blank lines among them, and a folder of small texts."""
    folder, chooser = tmp_path_factory.mktemp("inputs"), random.Random(6)
    for name, count in (("a", 300), ("b", 120)):
        lines = []
        for number in range(count):
            text = " ".join(chooser.choices(words, k=chooser.randint(0, 200)))
            lines.append(json.dumps({"text": text}) if number % 37 else ["", '{"text": null}', '{"te'][number % 3])
        (folder / f"{name}.jsonl").write_text("\n".join(lines) + "\n")
    (folder / "texts").mkdir()
    for number in range(20):
        (folder / "texts" / f"{number:02}.txt").write_text(" ".join(chooser.choices(words, k=300)))
    return [folder / "a.jsonl", folder / "texts", folder / "b.jsonl"]


@pytest.fixture(scope="module")
def undisturbed(inputs, tiny_tokenizer, tmp_path_factory):
    out = tmp_path_factory.mktemp("undisturbed") / "store"
    pack(inputs, out, tiny_tokenizer, workers=1, on_error="skip", range_bytes=RANGE)
    return out


def content(store):
    return {name: (store / name).read_bytes() for name in FILES if (store / name).exists()}


def partial(out):
    return out.with_name(f".{out.name}.partial")


def test_every_document_is_packed_or_rejected_where_it_is(undisturbed, inputs):
    info = TokenStore(undisturbed).info
    lines = [line for path in (inputs[0], inputs[2]) for line in path.read_text().splitlines()]
    good = sum('"text": "' in line for line in lines)
    blank = sum(not line for line in lines)
    assert info.documents == good + 20
    assert info.blank_lines == blank
    assert sum(info.rejected.values()) == len(lines) - good - blank
    assert info.documents + sum(info.rejected.values()) == sum(s.documents + s.rejected for s in info.sources)
    for reject in map(json.loads, (undisturbed / "rejects.jsonl").read_text().splitlines()):
        line = Path(reject["path"]).read_text().splitlines()[reject["line"] - 1]
        assert reject["reason"] == ("field 'text' is null" if "null" in line else "broken JSON")


@pytest.mark.parametrize("workers", [2, 3])
def test_the_bytes_do_not_depend_on_the_number_of_workers(tmp_path, inputs, undisturbed, tiny_tokenizer, workers):
    packed = pack(inputs, tmp_path / "s", tiny_tokenizer, workers=workers, on_error="skip", range_bytes=RANGE)
    assert content(tmp_path / "s") == content(undisturbed)
    assert packed.bytes == packed.info.bytes
    assert not partial(tmp_path / "s").exists()


def test_the_bytes_do_not_depend_on_how_much_is_done_at_once(tmp_path, inputs, undisturbed, tiny_tokenizer):
    pack(inputs, tmp_path / "s", tiny_tokenizer, workers=1, on_error="skip", range_bytes=777)
    for name in ("tokens.bin", "tokens.idx", "rejects.jsonl"):
        assert (tmp_path / "s" / name).read_bytes() == (undisturbed / name).read_bytes()


def start(*arguments, range_bytes=RANGE):
    program = PROGRAM.format(f"workers=2, on_error='skip', range_bytes={range_bytes}")
    return subprocess.Popen([sys.executable, "-c", program, *map(str, arguments)])


@pytest.mark.parametrize(
    "moment", ["begun", "a part", *(pytest.param(f"{n} appended", marks=pytest.mark.long) for n in ("some", "most"))]
)
def test_a_killed_pack_goes_on_and_gives_the_same_bytes(tmp_path, inputs, undisturbed, tiny_tokenizer, moment):
    out = tmp_path / "s"
    journal, parts = partial(out) / "journal.jsonl", partial(out) / "parts"
    reached = {
        "begun": parts.exists,
        "a part": lambda: any(parts.glob("*.json")) or out.exists(),
        "some appended": lambda: (journal.exists() and journal.read_bytes().count(b"\n") > 5) or out.exists(),
        "most appended": lambda: (journal.exists() and journal.read_bytes().count(b"\n") > 50) or out.exists(),
    }[moment]
    process = start(tiny_tokenizer, out, *inputs)
    until = time.monotonic() + 30
    while not reached() and time.monotonic() < until:
        time.sleep(0.001)
    process.send_signal(signal.SIGKILL)
    process.wait()
    pack(inputs, out, tiny_tokenizer, workers=1, on_error="skip", range_bytes=RANGE)
    assert content(out) == content(undisturbed)
    assert not partial(out).exists()


def test_workers_do_not_outlive_a_killed_parent(tmp_path, inputs, tiny_tokenizer):
    process = start(tiny_tokenizer, tmp_path / "s", *inputs, range_bytes=64)
    children = []
    until = time.monotonic() + 30
    while len(children) < 2 and time.monotonic() < until:
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    time.sleep(0.3)
    process.kill()
    process.wait()
    until = time.monotonic() + 10
    while any(os.path.exists(f"/proc/{child}/fd/0") for child in children) and time.monotonic() < until:
        time.sleep(0.01)
    assert children
    assert not any(os.path.exists(f"/proc/{child}/fd/0") for child in children)


def test_damage_to_what_a_killed_pack_left_is_done_again(tmp_path, inputs, undisturbed, tiny_tokenizer, monkeypatch):
    from weft.data.packing.assemble import Assembly

    out, append = tmp_path / "s", Assembly.append

    def killed(self, part, content):
        if part.index == 40:
            raise KeyboardInterrupt
        append(self, part, content)

    monkeypatch.setattr(Assembly, "append", killed)
    with pytest.raises(KeyboardInterrupt):
        pack(inputs, out, tiny_tokenizer, workers=1, on_error="skip", range_bytes=RANGE)
    monkeypatch.undo()
    tokens = partial(out) / "store" / "tokens.bin"
    data = bytearray(tokens.read_bytes())
    data[len(data) // 2] ^= 1
    tokens.write_bytes(data + b"more")
    with open(partial(out) / "journal.jsonl", "ab") as journal:
        journal.write(b'{"part": {"ke')
    (partial(out) / "parts" / ".40.json.partial").write_bytes(b'{"co')  # a worker died as it wrote
    pack(inputs, out, tiny_tokenizer, workers=1, on_error="skip", range_bytes=RANGE)
    assert content(out) == content(undisturbed)


def test_rejects_of_a_killed_pack_are_errors_for_the_next_that_wants_none(tmp_path, tiny_tokenizer, monkeypatch):
    from weft.data.packing import pack as module

    (tmp_path / "in.jsonl").write_text('{"text": "good"}\n{"text": 7}\n')
    monkeypatch.setattr(module, "publish", lambda *_: exec("raise KeyboardInterrupt"))
    with pytest.raises(KeyboardInterrupt):
        pack(tmp_path / "in.jsonl", tmp_path / "s", tiny_tokenizer, workers=1, on_error="skip")
    monkeypatch.undo()
    with pytest.raises(UserError, match=r"rejected 1 document .*--on-error skip"):
        pack(tmp_path / "in.jsonl", tmp_path / "s", tiny_tokenizer, workers=1)
    assert pack(tmp_path / "in.jsonl", tmp_path / "s", tiny_tokenizer, workers=1, on_error="skip").info.documents == 1


def test_what_a_kill_left_before_the_first_journal_line_is_no_harm(tmp_path, inputs, undisturbed, tiny_tokenizer):
    files, out = [*inputs, tmp_path / "last.txt"], tmp_path / "s"
    files[-1].write_text("no UTF-8 behind this")
    pack(files, out, tiny_tokenizer, workers=1, on_error="skip", range_bytes=RANGE)
    out.rename(partial(out))  # far more than the next pack gives
    (partial(out) / "store").mkdir()
    for name in ("tokens.bin", "rejects.jsonl"):
        (partial(out) / name).rename(partial(out) / "store" / name)
    (partial(out) / "parts").mkdir()
    request = json.loads((partial(out) / "store.json").read_text())["made_from"]
    request.pop("files")
    (partial(out) / "request.json").write_text(json.dumps(request))
    pack(inputs[1:2], out, tiny_tokenizer, workers=1, on_error="skip", range_bytes=RANGE)
    store = TokenStore(out)
    assert store.num_documents == 20
    assert not (out / "rejects.jsonl").exists()
    assert main(["data", "verify", str(out)]) == 0


def test_standard_input_is_packed_and_never_gone_on_with(tmp_path, inputs, tiny_tokenizer):
    out, text = tmp_path / "s", inputs[2].read_text()
    command = [sys.executable, "-m", "weft", "data", "pack", "-", "--format", "jsonl", "--on-error", "skip"]
    command += ["--tokenizer", tiny_tokenizer, "--out", out]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stderr=subprocess.PIPE)
    process.stdin.write(text.encode() * 20)
    process.stdin.flush()
    until = time.monotonic() + 30
    while not any((partial(out) / "parts").glob("*.tokens")) and time.monotonic() < until:
        time.sleep(0.01)
    process.kill()
    process.communicate()
    assert partial(out).exists()
    subprocess.run(command, input=text, text=True, check=True, capture_output=True, timeout=60)
    pack(inputs[2:], tmp_path / "t", tiny_tokenizer, workers=1, on_error="skip")
    for name in ("tokens.bin", "tokens.idx"):
        assert (out / name).read_bytes() == (tmp_path / "t" / name).read_bytes()
    assert not partial(out).exists()


def test_one_big_file_is_encoded_by_threads_to_the_same_bytes(tmp_path, words, tiny_tokenizer):
    import gzip

    chooser = random.Random(10)
    lines = [json.dumps({"text": " ".join(chooser.choices(words, k=3000))}) + "\n" for _ in range(400)]
    (tmp_path / "in.jsonl.gz").write_bytes(gzip.compress("".join(lines).encode(), 1))
    (tmp_path / "in.jsonl").write_text("".join(lines))
    pack([tmp_path / "in.jsonl.gz"], tmp_path / "a", tiny_tokenizer, workers=4)
    pack([tmp_path / "in.jsonl"], tmp_path / "b", tiny_tokenizer, workers=1, range_bytes=1 << 20)
    for name in ("tokens.bin", "tokens.idx"):
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()


def test_another_request_does_not_go_on_with_an_unfinished_pack(tmp_path, inputs, tiny_tokenizer, monkeypatch):
    from weft.data.packing.assemble import Assembly

    def killed(self, part, content):
        raise KeyboardInterrupt

    monkeypatch.setattr(Assembly, "append", killed)
    with pytest.raises(KeyboardInterrupt):
        pack(inputs, tmp_path / "s", tiny_tokenizer, workers=1, on_error="skip", range_bytes=RANGE)
    monkeypatch.undo()
    arguments = ["data", "pack", str(inputs[1]), "--tokenizer", str(tiny_tokenizer), "--out", str(tmp_path / "s")]
    with pytest.raises(UserError, match=r"unfinished.*--exact.*--overwrite to start over"):
        pack(inputs[1:2], tmp_path / "s", FailingEncoder(tiny_tokenizer, exact=True), range_bytes=RANGE)
    assert main([*arguments, "--overwrite"]) == 0
    assert TokenStore(tmp_path / "s").info.documents == 20


def test_a_changed_input_is_packed_anew_and_what_comes_before_it_is_kept(tmp_path, inputs, tiny_tokenizer):
    files = []
    for path in (inputs[0], inputs[2]):
        files.append(tmp_path / path.name)
        files[-1].write_bytes(path.read_bytes())
    with pytest.raises(UserError, match=r"a.jsonl:38: .*null") as told:
        pack(files, tmp_path / "s", tiny_tokenizer, workers=1, range_bytes=RANGE)
    assert told.value.line == 38
    lines = [line for line in files[0].read_text().splitlines() if '"text": "' in line]
    files[0].write_text("\n".join(lines) + "\n")
    with pytest.raises(UserError, match=r"b.jsonl:38: "):
        pack(files, tmp_path / "s", tiny_tokenizer, workers=1, range_bytes=RANGE)
    kept = (partial(tmp_path / "s") / "journal.jsonl").read_bytes().count(b"\n")
    assert kept > 10
    lines = [line for line in files[1].read_text().splitlines() if '"text": "' in line]
    files[1].write_text("\n".join(lines) + "\n")
    packed = pack(files, tmp_path / "s", tiny_tokenizer, workers=1, range_bytes=RANGE)
    assert packed.bytes < packed.info.bytes
    pack(files, tmp_path / "t", tiny_tokenizer, workers=1, range_bytes=RANGE)
    for name in ("tokens.bin", "tokens.idx"):
        assert (tmp_path / "s" / name).read_bytes() == (tmp_path / "t" / name).read_bytes()


@pytest.mark.parametrize("workers", [1, 3])
def test_of_several_rejects_the_first_in_the_input_is_reported(tmp_path, words, tiny_tokenizer, workers):
    chooser, path = random.Random(7), tmp_path / "in.jsonl"
    lines = [json.dumps({"text": " ".join(chooser.choices(words, k=100))}) for _ in range(200)]
    lines[30] = json.dumps({"text": "slow " * 200_000})  # its part is the last to be done
    lines[31] = '{"text": 31}'
    for number in range(60, 200, 3):
        lines[number] = '{"te'
    path.write_text("\n".join(lines))
    with pytest.raises(UserError, match=r"in.jsonl:32: .*not text.*--on-error skip"):
        pack([path], tmp_path / "s", tiny_tokenizer, workers=workers, range_bytes=RANGE)


@pytest.mark.parametrize("workers", [1, 2])
def test_a_document_that_the_tokenizer_fails_on_is_named_or_left_out(tmp_path, tiny_tokenizer, workers):
    path = tmp_path / "in.jsonl"
    texts = [f"document {number} " * 20 for number in range(60)]
    texts[47] = "RAISE"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    encoder = FailingEncoder(tiny_tokenizer)
    with pytest.raises(UserError, match=r"in.jsonl:48: the tokenizer fails on the text \(unexpected state\)"):
        pack([path], tmp_path / "s", encoder, workers=workers, range_bytes=RANGE)
    info = pack([path], tmp_path / "s", encoder, workers=workers, range_bytes=RANGE, on_error="skip").info
    assert (info.documents, info.rejected) == (59, {"the tokenizer fails on the text": 1})
    assert info.bytes == sum(map(len, texts)) - len("RAISE")


def test_a_document_at_which_workers_die_is_named(tmp_path, tiny_tokenizer):
    path = tmp_path / "in.jsonl"
    texts = [f"document {number} " * 20 for number in range(60)]
    texts[47] = f"KILL {tmp_path}/mark"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    with pytest.raises(
        UserError, match=r"in.jsonl:48: a worker was killed by signal 9.*this document; this happened twice"
    ):
        pack([path], tmp_path / "s", FailingEncoder(tiny_tokenizer), workers=2, range_bytes=RANGE)
    texts[47] += " KILL"
    path.write_text("".join(json.dumps({"text": text.replace("KILL", "kill")}) + "\n" for text in texts))
    assert (
        pack([path], tmp_path / "s", FailingEncoder(tiny_tokenizer), workers=2, range_bytes=RANGE).info.documents == 60
    )


def test_a_part_is_done_again_if_a_worker_dies_once(tmp_path, tiny_tokenizer, capsys):
    path = tmp_path / "in.jsonl"
    texts = [f"document {number} " * 20 for number in range(60)]
    texts[47] = f"KILL ONCE {tmp_path}/mark"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    encoder = FailingEncoder(tiny_tokenizer)
    packed = pack([path], tmp_path / "s", encoder, workers=2, range_bytes=RANGE, console=Console())
    assert packed.info.documents == 60
    assert "killed by signal 9 (SIGKILL), perhaps out of memory" in capsys.readouterr().err
    pack([path], tmp_path / "t", encoder, workers=1, range_bytes=RANGE)
    assert content(tmp_path / "s") == content(tmp_path / "t")


@pytest.mark.parametrize("workers", [1, 3])
def test_if_the_fast_library_is_not_trusted_all_is_done_exactly(tmp_path, inputs, workers):
    packed = pack(inputs, tmp_path / "s", DistrustedEncoder(), workers=workers, on_error="skip", range_bytes=RANGE)
    assert packed.reason == "it was wrong"
    assert np.unique(TokenStore(tmp_path / "s").tokens).tolist() == [2]


@pytest.mark.parametrize(
    ("number", "code", "line"),
    [
        (signal.SIGINT, 130, "interrupted"),
        pytest.param(signal.SIGTERM, 143, "terminated", marks=pytest.mark.long),
    ],
)
def test_ctrl_c_is_one_line_and_the_same_command_goes_on(tmp_path, words, tiny_tokenizer, number, code, line):
    path, chooser = tmp_path / "in.jsonl", random.Random(8)
    with open(path, "w") as file:
        for _ in range(4_500):
            file.write(json.dumps({"text": " ".join(chooser.choices(words, k=400))}) + "\n")
    command = [sys.executable, "-m", "weft", "data", "pack", path, "--tokenizer", tiny_tokenizer, "--out"]
    process = subprocess.Popen(
        [*command, tmp_path / "s", "--workers", "2"], stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    parts = partial(tmp_path / "s") / "parts"
    until = time.monotonic() + 30
    while not any(parts.glob("*.json")) and process.poll() is None and time.monotonic() < until:
        time.sleep(0.002)
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    os.killpg(process.pid, number)
    told = process.communicate(timeout=30)[1].splitlines()
    assert process.returncode == code
    assert told[-1] == f"{line}; repeat the command to resume"
    assert not any("Traceback" in line for line in told)
    assert len(children) == 2
    assert not any(os.path.exists(f"/proc/{child}/fd/0") for child in children)
    assert (partial(tmp_path / "s") / "journal.jsonl").exists()
    for out in ("s", "t"):
        subprocess.run([*command, tmp_path / out], check=True, capture_output=True, timeout=60)
    assert content(tmp_path / "s") == content(tmp_path / "t")


def test_a_full_disk_is_one_line_and_what_is_done_is_kept(tmp_path, inputs, undisturbed, tiny_tokenizer):
    size = (undisturbed / "tokens.bin").stat().st_size // 2
    out = tmp_path / "s"
    for workers in ("1", "2"):
        done = subprocess.run(
            [sys.executable, "-c", LIMITED, str(size), str(tiny_tokenizer), str(out), workers, *map(str, inputs)],
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert done.returncode == 0, done.stderr
        assert "cannot be written: File too large; fix this" in done.stdout
    assert not out.exists()
    packed = pack(inputs, out, tiny_tokenizer, on_error="skip", workers=1, range_bytes=RANGE)
    assert packed.bytes < packed.info.bytes
    assert content(out) == content(undisturbed)


LIMITED = f"""
import resource, sys
from weft.errors import UserError
from weft.data.packing.pack import pack
size, tokenizer, out, workers, *inputs = sys.argv[1:]
resource.setrlimit(resource.RLIMIT_FSIZE, (int(size), int(size)))
try:
    pack(inputs, out, tokenizer, workers=int(workers), on_error="skip", range_bytes={RANGE})
except UserError as error:
    print(error)
"""


def test_two_packs_of_one_store_do_not_mix(tmp_path, inputs, tiny_tokenizer):
    import fcntl

    folder = partial(tmp_path / "s")
    folder.mkdir()
    with open(folder / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(UserError, match="another process is packing this store"):
            pack(inputs, tmp_path / "s", tiny_tokenizer, workers=1, on_error="skip")
    assert folder.exists()


def test_memory_does_not_grow_with_the_input(tmp_path, words, tiny_tokenizer):
    path, chooser = tmp_path / "in.jsonl", random.Random(9)
    line = json.dumps({"text": " ".join(chooser.choices(words, k=2000))}) + "\n"
    with open(path, "w") as file:
        while file.tell() < 32 << 20:
            file.write(line * 100)
    options = "workers=1, range_bytes=1 << 30"
    program = PROGRAM.format(options) + "print(open('/proc/self/status').read())"
    done = subprocess.run(
        [sys.executable, "-c", program, tiny_tokenizer, tmp_path / "s", path],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    assert int(re.search(r"VmHWM:\s+(\d+) kB", done.stdout)[1]) / 1024 < 250


def test_packing_imports_neither_torch_nor_pydantic(tmp_path, inputs, tiny_tokenizer):
    program = (
        PROGRAM.format("workers=1, on_error='skip'") + "print({'torch', 'pydantic', 'awkward'} & set(sys.modules))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, tiny_tokenizer, tmp_path / "s", *inputs],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.stdout.strip() == "set()", done.stderr
