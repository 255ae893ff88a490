"""`weft` itself: help at once, clear words for mistakes, exit codes."""

import errno
import os
import signal
import subprocess
import sys
from types import SimpleNamespace

import pytest

import weft
from weft import cli as package
from weft import plugins
from weft.__main__ import main as command
from weft.cli import main as cli
from weft.errors import ConfigError, Problem, UserError
from weft.processes import signal_handler

RUN = "model: {preset: llama-tiny, vocab_size: 512}\ndata: {train: store}\ntraining: {steps: 10}\n"


def weft_command(*arguments, **settings):
    environment = {**os.environ, **settings.pop("env", {})}
    return subprocess.run(
        [sys.executable, "-m", "weft", *arguments],
        capture_output=True,
        text=True,
        timeout=60,
        env=environment,
        **settings,
    )


@pytest.fixture(autouse=True)
def closes_with_its_terminal():
    """SIGHUP has its usual effect, also if the tests run under `nohup`."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


@pytest.fixture
def verb(monkeypatch):
    """A verb of the test's own: `weft report` runs what is given."""

    def install(run, add_arguments=lambda parser: None):
        from weft.cli import report

        monkeypatch.setattr(report, "run", run)
        monkeypatch.setattr(report, "add_arguments", add_arguments)

    return install


def test_help_names_every_verb():
    done = weft_command("--help")
    for name in ("train", "generate", "data", "config", "report", "quickstart"):
        assert f" {name} " in done.stdout
    assert done.stdout.count("\n  weft ") == 3


@pytest.mark.parametrize("command", [["--help"], ["data", "--help"], ["zzz"]])
def test_help_imports_nothing_heavy(command):
    """The files of all verbs are imported for it: they import what they need when they run."""
    program = (
        f"import sys; from weft.cli.main import main; main({command}); "
        "heavy = {'pydantic', 'torch', 'ruamel', 'numpy', 'rich'}; "
        "print(sorted(m for m in sys.modules if m.split('.')[0] in heavy or m.split('.')[:2] == ['weft', 'config']))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"


def test_a_verb_imports_no_other_verb():
    program = "import sys; from weft.cli.main import main; main(['report', '--help']); print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    verbs = {name for name in done.stdout.split() if name.startswith("weft.cli.")}
    assert verbs == {"weft.cli.main", "weft.cli.stopping", "weft.cli.report"}


def test_version(capsys):
    assert cli.main(["--version"]) == 0
    assert capsys.readouterr().out == f"weft {weft.__version__}\n"


@pytest.mark.parametrize(
    ("number", "code", "said"),
    [
        (signal.SIGTERM, 143, "terminated\n"),
        (signal.SIGHUP, 129, "terminated\n"),
        (signal.SIGINT, 130, "interrupted\n"),
    ],
)
def test_a_signal_before_the_training_is_reported(monkeypatch, capsys, number, code, said):
    monkeypatch.setattr("weft.config.run.RunConfig.load", lambda *_, **__: os.kill(os.getpid(), number))
    with signal_handler(lambda *_: None, signal.SIGTERM, signal.SIGHUP):  # not the end of this process, at least
        assert cli.main(["train", "run.yaml", "--nproc", "2"]) == code
    assert capsys.readouterr().err == said


def test_a_closed_terminal_ends_the_command_with_its_code(verb, monkeypatch):
    verb(lambda args: os.kill(os.getpid(), signal.SIGHUP))

    def write(text):
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(sys, "stderr", SimpleNamespace(write=write))
    with signal_handler(lambda *_: None, signal.SIGHUP):
        assert cli.main(["report"]) == 129


def test_ctrl_c_during_the_first_imports_is_one_line(monkeypatch, capsys):
    def find_spec(name, *_):
        if name == "weft.cli.main":
            os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.delitem(sys.modules, "weft.cli.main")
    monkeypatch.setattr(sys, "meta_path", [SimpleNamespace(find_spec=find_spec), *sys.meta_path])
    before = signal.getsignal(signal.SIGINT)
    try:
        assert command() == 130
    finally:
        signal.signal(signal.SIGINT, before)
    assert capsys.readouterr().err == "interrupted\n"
    program = "import sys; before = set(sys.modules); import weft.__main__; print(*sorted({*sys.modules} - before))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "weft weft.__main__\n"  # before it handles Ctrl-C


def test_ctrl_c_within_code_in_a_string_ends_the_command_with_its_code(tmp_path):
    """As in namedtuple(). `python -m` then ends by the signal."""
    (tmp_path / "difflib.py").write_text("exec('raise KeyboardInterrupt')\n")
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    done = weft_command("--version", env={"PYTHONPATH": path})
    assert (done.returncode, done.stderr) == (130, "interrupted\n")


def test_ctrl_c_again_while_the_command_ends_prints_nothing(tmp_path):
    again = "import atexit, os, signal\natexit.register(os.kill, os.getpid(), signal.SIGINT)\nraise KeyboardInterrupt\n"
    (tmp_path / "difflib.py").write_text(again)
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    done = weft_command("--version", env={"PYTHONPATH": path})
    assert (done.returncode, done.stderr) == (130, "interrupted\n")


def test_no_verb_or_a_wrong_one_is_a_mistake(capsys):
    assert cli.main([]) == 2
    assert "usage: weft" in capsys.readouterr().err
    assert cli.main(["trian", "run.yaml"]) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert all(word in said for word in ("'trian'", "did you mean 'train'?", "weft --help"))
    assert cli.main(["zzz"]) == 2
    assert "use one of quickstart, data," in capsys.readouterr().err


@pytest.mark.parametrize("verb_name", sorted(plugins.built_ins(package, "HELP")))
def test_every_verb_has_help_that_needs_no_torch(verb_name):
    program = (
        f"import sys; from weft.cli.main import main; code = main([{verb_name!r}, '--help']); "
        "sys.exit(code or 'torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(f"usage: weft {verb_name}")


def test_sub_verbs_have_a_table_and_help_of_their_own(capsys):
    from weft.cli import data

    assert cli.main(["data", "--help"]) == 0
    listed = capsys.readouterr().out
    names = plugins.built_ins(data, "HELP")
    assert names.keys() >= {"pack", "train-tokenizer", "inspect", "merge"}
    for name in names:
        assert f" {name} " in listed
        assert cli.main(["data", name, "--help"]) == 0
        assert capsys.readouterr().out.startswith(f"usage: weft data {name}")
    assert cli.main(["data"]) == 2
    assert capsys.readouterr().err == listed
    assert cli.main(["data", "pak"]) == 2
    said = capsys.readouterr().err
    assert all(word in said for word in ("subcommand 'pak'", "did you mean 'pack'?", "weft data --help"))


def test_help_before_a_verb(capsys):
    assert cli.main(["help", "config"]) == 0
    assert capsys.readouterr().out.startswith("usage: weft config")


def test_a_users_mistake_is_one_line_and_2(verb, capsys):
    def run(args):
        raise UserError("this is wrong; do that", "run.yaml", 3)

    verb(run)
    assert cli.main(["report"]) == 2
    assert capsys.readouterr().err == "run.yaml:3: this is wrong; do that\n"


def test_a_mistake_that_another_rank_tells_is_quiet(verb, capsys, monkeypatch):
    error = UserError("told elsewhere")
    error.quiet = True

    def run(args):
        raise error

    verb(run)
    assert cli.main(["report"]) == 2
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(("local", "lines"), [("0", 1), ("1", 0), (None, 1)])
def test_of_ranks_that_read_one_file_the_first_speaks(verb, capsys, monkeypatch, local, lines):
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    if local is not None:
        monkeypatch.setenv("LOCAL_RANK", local)

    def run(args):
        raise ConfigError([Problem("a.b", "wrong", "run.yaml", 1)])

    verb(run)
    assert cli.main(["report"]) == 2
    assert len(capsys.readouterr().err.splitlines()) == lines


@pytest.mark.parametrize(("raised", "code"), [(KeyboardInterrupt, 130), (None, 0), (7, 7)])
def test_exit_codes(verb, raised, code):
    def run(args):
        if isinstance(raised, type):
            raise raised
        return raised

    verb(run)
    assert cli.main(["report"]) == code


def test_a_mistake_in_the_code_keeps_its_traceback(verb):
    def run(args):
        raise ZeroDivisionError

    verb(run)
    with pytest.raises(ZeroDivisionError):
        cli.main(["report"])


def test_arguments_in_any_order(verb):
    seen = []

    def arguments(parser):
        parser.add_argument("file")
        parser.add_argument("overrides", nargs="*")
        parser.add_argument("--nproc", type=int)

    verb(lambda args: seen.append((args.file, args.overrides, args.nproc)), arguments)
    for line in (
        "run.yaml --nproc 4 a=1 b=2",
        "--nproc 4 run.yaml a=1 b=2",
        "run.yaml a=1 b=2 --nproc 4",
        "run.yaml a=1 --nproc 4 b=2",
    ):
        assert cli.main(["report", *line.split()]) == 0
    assert seen == [("run.yaml", ["a=1", "b=2"], 4)] * 4
    assert cli.main(["report"]) == 2
    assert cli.main(["report", "a", "--npoc", "3"]) == 2


@pytest.mark.parametrize(
    ("line", "command", "words"),
    [
        ("train run.yaml --nprc 2", "weft train", ["--nprc", "did you mean '--nproc'?"]),
        ("train --nprc=2", "weft train", ["--nprc", "did you mean '--nproc'?"]),
        ("train run.yaml -x", "weft train", ["unknown option -x"]),
        ("train run.yaml --nproc two", "weft train", ["--nproc", "'two'"]),
        ("train", "weft train", ["required: FILE"]),
        ("train run.yaml --optimizer.lr=3", "weft train", ["--optimizer.lr", "without dashes: optimizer.lr=..."]),
        ("data pack --tokeniser x", "weft data pack", ["--tokeniser", "did you mean '--tokenizer'?"]),
        ("report a b c", "weft report", ["unexpected arguments: b c"]),
        ("--versoin", "weft", ["'--versoin'", "did you mean '--version'?"]),
        ("data --hepl", "weft data", ["'--hepl'", "did you mean '--help'?"]),
    ],
)
def test_a_mistake_in_the_command_line_is_one_line(line, command, words, capsys):
    assert cli.main(line.split()) == 2
    out, said = capsys.readouterr()
    assert out == ""
    assert said.startswith(f"{command}: ")
    assert said.count("\n") == 1
    assert all(word in said for word in [*words, f"{command} --help"])


def test_a_near_choice_of_an_option_is_suggested(verb, capsys):
    verb(lambda args: 0, lambda parser: parser.add_argument("--form", choices=["plain", "json"]))
    assert cli.main(["report", "--form", "jsn"]) == 2
    (told,) = capsys.readouterr().err.splitlines()
    assert told.startswith("weft report: argument --form: invalid choice: 'jsn'; did you mean 'json'? (choose from ")


def test_the_reader_may_leave(tmp_path):
    (tmp_path / "run.yaml").write_text(RUN)
    command = f"{sys.executable} -m weft config schema | head -c 10"
    done = subprocess.run(["bash", "-o", "pipefail", "-c", command], capture_output=True, text=True, cwd=tmp_path)
    assert done.stderr == ""
    assert done.returncode == 0


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no device that is always full")
@pytest.mark.parametrize("unbuffered", ["", "1"])
@pytest.mark.parametrize("arguments", ["--help", "config schema"])
def test_a_full_disk_behind_standard_output(arguments, unbuffered):
    command, environment = [sys.executable, "-m", "weft", *arguments.split()], {"PYTHONUNBUFFERED": unbuffered}
    with open("/dev/full", "w") as full:
        done = subprocess.run(command, env=os.environ | environment, stdout=full, stderr=subprocess.PIPE)
    assert done.returncode == 2
    assert done.stderr.startswith(b"weft: ")
    assert b"standard output: No space left on device" in done.stderr
    assert done.stderr.count(b"\n") == 1


def test_only_what_must_be_given_is_asked_for(capsys):
    assert cli.main(["train"]) == 2
    said = capsys.readouterr().err
    assert "required: FILE" in said
    assert "key=value" not in said.splitlines()[-1]


def test_a_terminal_without_unicode(tmp_path):
    (tmp_path / "run.yaml").write_text(
        RUN + 'samples: {prompts: ["caf\u00e9 \u2192"]}\ntokenizer: tok\n', encoding="utf-8"
    )
    ascii_only = {"PYTHONIOENCODING": "ascii", "PYTHONUTF8": "0", "LC_ALL": "C"}
    done = weft_command("config", "show", "run.yaml", "--no-data", cwd=tmp_path, env=ascii_only)
    assert done.returncode == 0, done.stderr
    assert "caf\\xe9 \\u2192" in done.stdout


def test_it_is_a_command_and_a_module():
    done = weft_command("--version")
    assert done.stdout == f"weft {weft.__version__}\n"
