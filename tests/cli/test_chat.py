"""`weft chat`: a model that was trained on two conversations answers as with Transformers, in a pipe and a terminal."""

import io
import json
import os
import pty
import re
import select
import shlex
import shutil
import subprocess
import sys
import termios
import time
from pathlib import Path

import peft
import pytest
import torch
from chat_model import MARKS, SYSTEM, TEMPLATE, TURNS
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

import weft
from weft.cli.main import main
from weft.data.conversations.template import ChatTemplate, find_template
from weft.data.stores.store import TokenStore
from weft.generation.chat import Chat

QUESTIONS = "".join(f"{question}\n" for question, _ in TURNS)
GREEDY = ("--temperature", "0", "--max-new-tokens", "150")


@pytest.fixture(scope="module")
def folder(chat_model):
    return chat_model


def transformers_answers(folder, questions, system=None):
    """The answers of Transformers, with greedy decoding."""
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder)
    messages = [{"role": "system", "content": system}] if system else []
    for question in questions:
        messages.append({"role": "user", "content": question})
        ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=True)
        end = tokenizer.convert_tokens_to_ids("<|im_end|>")
        new = model.generate(**ids, max_new_tokens=150, do_sample=False, eos_token_id=end, pad_token_id=end)
        new = new[0, ids["input_ids"].shape[1] :]
        messages.append({"role": "assistant", "content": tokenizer.decode(new, skip_special_tokens=True)})
    return [message["content"] for message in messages if message["role"] == "assistant"]


@pytest.fixture
def chat(folder, monkeypatch, capsys):
    """Runs `weft chat` on a pipe: `chat(lines, *options) -> (exit code, standard output, lines of standard error)`."""

    def run(lines, *options, model=folder):
        data = lines if isinstance(lines, bytes) else lines.encode()
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data), encoding="utf-8"))
        capsys.readouterr()
        code = main(["chat", str(model), *map(str, options)])
        shown = capsys.readouterr()
        return code, shown.out, shown.err.splitlines()

    return run


def test_answers_are_those_of_transformers(chat, folder):
    questions = [question for question, _ in TURNS]
    code, out, notes = chat(QUESTIONS, "--system", SYSTEM, *GREEDY)
    assert code == 0
    assert out == "".join(f"{answer}\n" for answer in transformers_answers(folder, questions, SYSTEM))
    assert out == "".join(f"{answer}\n" for _, answer in TURNS)  # learned by heart, and the model stops
    assert len(notes) == 2
    for line in notes:
        assert re.fullmatch(r"[\d,]+ tokens, .*(tokens/s|s/token), the first after .*s", line)
    _, out, _ = chat(QUESTIONS, *GREEDY)
    assert out == "".join(f"{answer}\n" for answer in transformers_answers(folder, questions))


def test_input_of_several_lines_and_commands(chat, tmp_path):
    saved = tmp_path / "talk.jsonl"
    lines = [
        "", "   ", "\\", "",
        f"/system {SYSTEM}", TURNS[0][0], "/params temperature=1.5 max_new_tokens=9", "/regenerate",
        "/regenerate",        f"/save {saved}", "one \\", "two\\", "three", f"/save {saved}",
        '"""/four', '"five" ', '"""', '"""six"""',
        f"/save {tmp_path / 'more.jsonl'}", "/clear", "seven", f"/save {tmp_path / 'last.jsonl'}", "/help",
        "/quit", "eight",
    ]  # fmt: skip
    code, out, notes = chat("\r\n".join(lines), *GREEDY)
    assert code == 0
    first, *rest = messages = json.loads((tmp_path / "more.jsonl").read_text())["messages"]
    assert first == {"role": "system", "content": SYSTEM}
    assert [m["content"] for m in rest[::2]] == [TURNS[0][0], "one \ntwo\nthree", '/four\n"five"', "six"]
    assert {m["role"] for m in rest[::2]} == {"user"}
    assert {m["role"] for m in rest[1::2]} == {"assistant"}
    assert json.loads(saved.read_text())["messages"] == messages[:5]  # saved again, without the later messages
    # The answer was replaced twice, each time by another one, and the last one stayed.
    learned, once, *_ = out.split("\n", 1)
    assert learned == TURNS[0][1]
    assert rest[1]["content"] in once
    assert rest[1]["content"] != TURNS[0][1]
    assert json.loads((tmp_path / "last.jsonl").read_text())["messages"][:2] == [
        first,
        {"role": "user", "content": "seven"},
    ]
    assert f"system message: {SYSTEM}" in notes
    assert any(line.startswith("max_new_tokens=9 temperature=1.5 top_k=none ") for line in notes)
    assert any("cut off: /params max_new_tokens=N allows more" in line for line in notes)
    assert any(line.startswith("  /regenerate ") for line in notes)
    assert f"{saved}: 3 messages saved" in notes


def test_a_saved_conversation_is_data(chat, folder, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    chat(QUESTIONS + "/save talk.jsonl\n", "--system", SYSTEM, *GREEDY)
    assert main(["data", "pack", "talk.jsonl", "--tokenizer", str(folder), "--out", "store", "--conversations"]) == 0
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
    messages = json.loads((tmp_path / "talk.jsonl").read_text())["messages"]
    ids = tokenizer.apply_chat_template(messages, return_dict=True)["input_ids"]
    assert TokenStore("store").document(0).tolist()[: len(ids)] == ids
    # Loaded, the conversation goes on; the loaded file can be written again, other files cannot.
    (tmp_path / "begun.json").write_text(json.dumps(
        {"conversations": [{"from": "system", "value": SYSTEM}, {"from": "human", "value": TURNS[0][0]},
                           {"from": "gpt", "value": [{"type": "text", "text": TURNS[0][1]}]}]}
    ))  # fmt: skip
    more = f"/load begun.json\n{TURNS[1][0]}\n/save begun.json\n/save talk.jsonl\n"
    code, out, notes = chat(more, *GREEDY)
    assert out == TURNS[1][1] + "\n"
    assert json.loads((tmp_path / "begun.json").read_text())["messages"] == messages
    assert notes[0] == "begun.json: 3 messages loaded"
    assert notes[-1] == "talk.jsonl: this file exists already; choose another name"
    assert code == 2


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("/regenrate", "unknown command /regenrate; did you mean /regenerate?"),
        ("/usr/bin", "unknown command /usr/bin; use one of /regenerate, /system, /params, /save, /load, /clear, /help"),
        ("/regenerate", "there is no message to answer again; write one first"),
        ("/params temprature=1", "unknown setting temprature; did you mean temperature?"),
        ("/params seed=x", "seed=x: this is not NAME=NUMBER"),
        ("/params top_p=2", "top_p is 2; set it to a number above 0, at most 1"),
        ("/params temperature=none", "temperature is None; set it to a number"),
        ("/save", "the name of a file is missing; write for example /save talk.jsonl"),
        ("/save talk.jsonl", "the conversation has no messages to save; write one first"),
        ("/load none.jsonl", "none.jsonl: there is no such file"),
        ("/load two.jsonl", "two.jsonl: the file has several records; give a file with one conversation"),
        ("/load empty.jsonl", "empty.jsonl: the file has no records"),
        ("/load broken.jsonl", "broken.jsonl: "),
        ("/load other.jsonl", "other.jsonl: not a conversation"),
        ("/load half.jsonl", "half.jsonl: not a conversation (no assistant message)"),
        ("\\xff", "standard input:1: this line is not UTF-8 text"),
        ("ka " * 600, "tokens, but the model's window has 512; /clear begins a new conversation"),
    ],
)  # fmt: skip
def test_mistakes_are_one_line_and_the_chat_goes_on(chat, tmp_path, monkeypatch, line, said):
    monkeypatch.chdir(tmp_path)
    record = json.dumps({"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]})
    for name, text in (
        ("two", f"{record}\n{record}\n"), ("empty", ""), ("broken", '{"messages": [\n'), ("other", '{"text": "a"}\n'),
        ("half", '{"messages": [{"role": "user", "content": "a"}]}\n'),
    ):  # fmt: skip
        (tmp_path / f"{name}.jsonl").write_text(text)
    given = b"\xff" if line == "\\xff" else line.encode()
    code, out, notes = chat(given + b"\n/system\n", "--temperature", "0.5")
    assert code == 2
    assert out == ""
    mistake, after = notes
    assert said in mistake
    assert after == "no system message"


@pytest.mark.parametrize(
    ("template", "options", "said"),
    [
        (None, (), "no chat template in this folder; set --chat-template to a file or a built-in template (chatml, "),
        ("{{ messages[0]['content'] }}", (), "this chat template writes no assistant messages; choose another with "),
        ("{{ raise_exception('no!') }}", (), "the chat template cannot render the messages: no!; change the messages"),
        ("{% for", (), "not a valid chat template"),
        (None, ("--chat-template", "chatlm"), "--chat-template chatlm: not found; use a file, or one of chatml, "),
        (None, ("--chat-template", "chatml", "--temperature", "-1"), "temperature is -1.0; set it to 0 "),
    ],
)
def test_mistakes_at_the_beginning(chat, folder, tmp_path, template, options, said):
    shutil.copytree(folder, tmp_path / "other")
    (tmp_path / "other" / "chat_template.jinja").unlink()
    if template is not None:
        (tmp_path / "other" / "chat_template.jinja").write_text(template)
    code, out, notes = chat("a\n", *options, model=tmp_path / "other")
    assert (code, out) == (2, "")
    assert said in notes[-1]


def open_chat(folder, template=None, **options):
    """A chat in this process, and the prompts that its engine gets."""
    engine = weft.Engine(weft.load_model(folder), weft.Tokenizer.load(folder))
    source = find_template(folder, template)
    chat, prompts = Chat(engine, ChatTemplate.for_tokenizer(source, folder), **options), []
    submit = engine.submit
    engine.submit = lambda prompt, *args, **kwargs: (prompts.append(prompt.ids), submit(prompt, *args, **kwargs))[1]
    return chat, prompts


@pytest.mark.parametrize("name", [None, "chatml", "llama2", "llama3", "gemma", "mistral", "zephyr", "vicuna"])
def test_prompts_are_those_of_transformers(folder, name):
    chat, prompts = open_chat(folder, name, system="Be.")
    texts = ["".join(chat.send(question, weft.Sampling(6, seed=3))) for question in ("Kalo?", "Mi?")]
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
    for number, ids in enumerate(prompts):
        messages, template = chat.conversation[: 2 + 2 * number], chat.template.source.source
        told = tokenizer.apply_chat_template(
            messages, chat_template=template, add_generation_prompt=True, return_dict=True
        )
        assert ids == told["input_ids"]
        if name in (None, "llama3"):
            assert ids.count(tokenizer.bos_token_id) == 1  # the template's
    assert [message["content"] for message in chat.messages[1::2]] == texts
    assert not any(mark in text for text in texts for mark in MARKS)


def test_a_template_without_the_beginning_of_an_answer(folder):
    """Templates that ignore add_generation_prompt write this beginning only with the answer."""
    source = find_template(folder)
    ignoring = ChatTemplate(
        type(source)("theirs", source.source.partition("{%- if add_generation_prompt")[0]), {"bos_token": MARKS[0]}
    )
    chat, prompts = open_chat(folder, system=SYSTEM)
    other = Chat(chat.engine, ignoring, system=SYSTEM)
    stop = weft.Sampling(150, temperature=0)
    answers = ["".join(one.send(TURNS[0][0], stop)) for one in (chat, other)]
    assert prompts[0] == prompts[1]
    assert answers == [TURNS[0][1]] * 2


def test_the_history_is_not_computed_again(folder):
    chat, prompts = open_chat(folder, system=SYSTEM)
    engine, sampling = chat.engine, weft.Sampling(150, temperature=0)
    for question, answer in TURNS:
        before = (engine.shared_tokens, engine.computed_tokens)
        written = chat.send(question, sampling)
        assert "".join(written) == answer == written.text
        assert written.finish == "stop"
    history = [*prompts[0], *chat.tokenizer.encode(TURNS[0][1])]
    assert prompts[1][: len(history)] == history
    assert engine.shared_tokens - before[0] == len(history) // 16 * 16
    fresh = len(prompts[1]) - len(history) // 16 * 16
    assert engine.computed_tokens - before[1] == fresh + written.tokens - 1
    assert len(history) > 2 * fresh


def test_the_end_of_a_turn_that_is_no_token(chat, folder, tmp_path, tiny_tokenizer):
    """Without special tokens of its own, a template ends answers by text."""
    shutil.copytree(folder, tmp_path / "plain")
    (tmp_path / "plain" / "chat_template.jinja").write_text(TEMPLATE.replace("'<|im_end|>'", "' pra el'"))
    code, out, _ = chat(TURNS[0][0] + "\n", "--system", SYSTEM, *GREEDY, model=tmp_path / "plain")
    before, end, _ = transformers_text(folder, tmp_path / "plain").partition(" pra el")
    assert end
    assert out == before + "\n"
    assert code == 0


def transformers_text(folder, other):
    """What Transformers writes with the template of another folder, without an end."""
    tokenizer, model = PreTrainedTokenizerFast.from_pretrained(other), AutoModelForCausalLM.from_pretrained(folder)
    messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": TURNS[0][0]}]
    ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    new = model.generate(**ids, max_new_tokens=100, do_sample=False, pad_token_id=0)[0, ids["input_ids"].shape[1] :]
    return tokenizer.decode(new, skip_special_tokens=True)


def test_an_answer_that_fills_the_window_or_is_stopped(folder):
    chat, prompts = open_chat(folder)
    chat.engine.stop_ids = frozenset()
    chat._end = ""  # nothing ends an answer
    sampling, long = weft.Sampling(5000, temperature=0), " ka" * 470
    answer = chat.send(long, sampling)
    text = "".join(answer)
    assert (answer.finish, answer.full) == ("length", True)
    assert 400 < len(prompts[0]) == 512 - answer.tokens
    with pytest.raises(weft.UserError, match=r"^the conversation has [\d,]+ tokens, .* window has 512; /clear begins"):
        chat.send(long, sampling)
    assert [message["content"] for message in chat.messages] == [long, text]  # nothing is dropped
    chat.clear()
    stopped, written = chat.send(TURNS[0][0], sampling), ""
    for new in stopped:
        written += new
        if stopped.tokens == 7:
            stopped.stop()
    assert (stopped.finish, stopped.tokens) == ("cancelled", 7)  # within the character é
    assert written == "Sta tu vo, n"
    assert chat.messages == [{"role": "user", "content": TURNS[0][0]}, {"role": "assistant", "content": written}]
    unheard = chat.send("b", sampling)
    unheard.stop()
    assert "".join(unheard) == ""
    assert len(chat.messages) == 2  # neither the question nor an empty answer


@pytest.mark.parametrize("templates", ["model", "adapter"])
def test_an_adapter_of_peft(chat, folder, tmp_path, templates):
    """The adapter's folder can have the chat template that it was trained with."""
    base, adapter = tmp_path / "base", tmp_path / "adapter"
    shutil.copytree(folder, base)
    theirs = peft.get_peft_model(
        AutoModelForCausalLM.from_pretrained(folder), peft.LoraConfig(target_modules=["o_proj"])
    )
    for name, parameter in theirs.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.5)
    theirs.save_pretrained(adapter)
    if templates == "adapter":
        shutil.move(base / "chat_template.jinja", adapter)
    ids = PreTrainedTokenizerFast.from_pretrained(folder).apply_chat_template(
        [{"role": "user", "content": "a"}], add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    new = theirs.generate(**ids, max_new_tokens=8, do_sample=False, pad_token_id=0)[0, ids["input_ids"].shape[1] :]
    options = ("--temperature", 0, "--max-new-tokens", 8)
    _, out, _ = chat("a\n", *options, "--adapter", adapter, model=base)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
    assert out == tokenizer.decode(new, skip_special_tokens=True).rstrip("\ufffd") + "\n" != chat("a\n", *options)[1]
    code, _, notes = chat("a\n", "--adapter", tmp_path, model=folder)
    assert code == 2
    assert str(tmp_path) in notes[-1]


def test_a_run_has_the_template_that_it_was_trained_with(chat, folder, run_yaml, tmp_path, monkeypatch):
    monkeypatch.setenv("WEFT_CACHE", str(tmp_path / "cache"))
    shutil.copytree(folder, tmp_path / "base", ignore=shutil.ignore_patterns("*.jinja"))
    (tmp_path / "my.json").write_text(json.dumps([{"instruction": "Kalo?", "output": "Mi vo."}] * 8))
    data = {"train": str(tmp_path / "my.json"), "validation": None, "chat_template": "chatml", "sequence_length": 32}
    path = run_yaml(
        model=None, tokenizer=None, data=data, objective={"type": "sft"}, log={"trackers": []},
        training={"steps": 1, "batch_tokens": 64, "micro_batch_size": 1}, schedule={"warmup_steps": 0},
    )  # fmt: skip
    assert main(["train", str(path), f"model.from={tmp_path / 'base'}"]) == 0
    run = tmp_path / "runs" / "demo"
    assert main(["export", str(run), str(tmp_path / "out")]) == 0
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    text = PreTrainedTokenizerFast.from_pretrained(tmp_path / "out").apply_chat_template(messages, tokenize=False)
    assert text == "<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\nb<|im_end|>\n"
    code, _, notes = chat("a\n", "--max-new-tokens", 2, model=run)
    assert (code, len(notes)) == (0, 1)


def test_the_page_of_the_manual(folder, tmp_path, monkeypatch, capsys):
    page = (Path(__file__).parents[2] / "docs/tuning/chat.md").read_text("utf-8")
    for words in map(shlex.split, re.findall(r"^\$ weft (chat .*?)(?:  +#.*| <.*)?$", page, re.M)):
        assert main(words) == 2  # the options are known, but not the model
        (line,) = capsys.readouterr().err.splitlines()
        assert line.startswith(f"{words[1]}: this path does not exist")
    assert main(["chat", "--help"]) == 0
    commands = set(re.findall(r"^  (/\w+)", capsys.readouterr().out, re.M))
    assert commands == set(re.findall(r"`(/\w+)", page))
    monkeypatch.chdir(tmp_path)
    Path("models").mkdir()
    Path("models/chat").symlink_to(folder)
    exec(re.search(r"```python\n(.*?)```", page, re.S)[1], {})
    assert json.loads(Path("talk.jsonl").read_text())["messages"][-1]["content"] == capsys.readouterr().out


class Terminal:
    """`weft chat` on a pseudo-terminal."""

    def __init__(self, *words, cwd):
        self.main, side = pty.openpty()
        modes = termios.tcgetattr(side)
        modes[3] |= termios.NOFLSH  # otherwise Ctrl-C discards what was written and not yet read
        termios.tcsetattr(side, termios.TCSANOW, modes)
        known = {**os.environ, "TERM": "xterm-256color", "COLUMNS": "500", "PYTHONIOENCODING": "utf-8"}
        command = [sys.executable, "-m", "weft", "chat", *map(str, words)]
        self.process = subprocess.Popen(command, env=known, cwd=cwd, preexec_fn=lambda: os.login_tty(side))
        os.close(side)
        self.shown = ""

    def until(self, text, seconds=60):
        """Reads until `text` is shown, and returns what was shown since the last call."""
        end = time.monotonic() + seconds
        while text not in self.shown:
            ready, _, _ = select.select([self.main], [], [], max(0, end - time.monotonic()))
            assert ready, self.shown
            try:
                self.shown += os.read(self.main, 65536).decode("utf-8", "replace")
            except OSError:  # the process has ended
                assert text in self.shown, self.shown
        before, found, self.shown = self.shown.partition(text)
        return before + found

    def type(self, text):
        os.write(self.main, text.encode())

    def interrupt(self, before=""):
        """Types Ctrl-C at the prompt. Python notices a signal there only while it waits for a key."""
        self.until(">>> ")
        if before:
            self.type(before)
            self.until(before)
        time.sleep(0.3)
        self.type("\x03")


def test_ctrl_c_in_a_terminal(folder, tmp_path):
    """It ends the answer, which is kept; at the prompt, it drops the line, and the second ends the chat."""
    endless = tmp_path / "endless"
    shutil.copytree(folder, endless)
    weights = load_file(endless / "model.safetensors")
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
    for token in ("<|im_end|>", tokenizer.eos_token):
        weights["lm_head.weight"][tokenizer.convert_tokens_to_ids(token)] = 0  # another logit is above 0
    save_file(weights, endless / "model.safetensors", {"format": "pt"})
    config = json.loads((endless / "config.json").read_text()) | {"max_position_embeddings": 100_000}
    (endless / "config.json").write_text(json.dumps(config))
    terminal = Terminal(endless, "--temperature", "0", "--max-new-tokens", "90000", cwd=tmp_path)
    assert "/help lists the commands" in terminal.until(">>> ")
    terminal.type(TURNS[0][0] + "\n")
    terminal.until(TURNS[0][1])
    terminal.type("\x03")
    shown = terminal.until("; stopped")
    assert "\x1b[2m" in shown  # dim
    terminal.until(">>> ")
    terminal.type("/save talk.jsonl\n")
    terminal.until("talk.jsonl: 2 messages saved")
    kept = json.loads((tmp_path / "talk.jsonl").read_text())["messages"][1]["content"]
    assert kept.startswith(TURNS[0][1])
    assert (TURNS[0][1] + shown).replace("\r\n", "\n").replace("^C", "").startswith(kept)
    terminal.interrupt("a line that is dropped")
    terminal.until("Ctrl-C again, or Ctrl-D, ends the chat")
    terminal.until(">>> ")
    terminal.type("/system\n")  # the next Ctrl-C is a first one again
    terminal.until("no system message")
    terminal.interrupt()
    terminal.interrupt()
    assert terminal.process.wait(30) == 130
    os.close(terminal.main)
