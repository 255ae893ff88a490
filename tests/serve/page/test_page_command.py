"""The page of a real `weft serve`, as docs/chat-page.md describes: the command, the key, the model's own text."""

import os
import re
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from chat_model import SYSTEM, TURNS

PAGE = Path(__file__).parents[3] / "docs" / "chat-page.md"


@pytest.fixture
def served(chat_model):
    """The process of the documented command, and its address."""
    program, verb, *arguments = shlex.split(re.search(r"^\$ (weft serve .*)$", PAGE.read_text("utf-8"), re.M)[1])
    assert (program, verb, arguments) == ("weft", "serve", ["runs/run"])
    command = [sys.executable, "-m", program, verb, str(chat_model), "--port", "0"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=os.environ | {"WEFT_API_KEY": "secret"})
    line = process.stdout.readline()
    yield process, re.fullmatch(r"serving model at (http://127\.0\.0\.1:\d+)\n", line)[1] + "/"
    process.kill()
    process.wait(10)


@pytest.mark.browser
def test_the_command_serves_the_page(open_page, ask, served):
    process, url = served
    page = open_page(url)
    page.get_by_label("Key", exact=True).fill("secret")
    page.keyboard.press("Enter")
    page.locator("#model:enabled").wait_for()
    page.get_by_role("button", name="Settings").click()
    page.get_by_label("System prompt").fill(SYSTEM)
    page.get_by_label("Temperature").fill("0")
    page.get_by_role("button", name="Done").click()
    for question, answer in TURNS:
        assert ask(page, question).locator(".prose").last.inner_text().split() == answer.split()
    page.get_by_role("button", name="Settings").click()
    page.get_by_label("Maximum tokens").fill("3")
    page.get_by_role("button", name="Done").click()
    summary = ask(page, "Pra el?").locator(".summary").inner_text()
    assert re.fullmatch(r"model · 3 tokens · .* tokens/s · .* · cut at the limit of tokens", summary)
    page.get_by_role("button", name="Settings").click()
    page.get_by_label("Maximum tokens").fill("100000000")
    page.get_by_label("System prompt").fill(SYSTEM * 400)
    page.get_by_role("button", name="Done").click()
    problem = ask(page, "Too long?").locator(".problem p").inner_text()
    assert re.search(r"[\d,]+ tokens.*; shorten the prompt\.", problem), problem
    process.send_signal(signal.SIGINT)
    assert process.wait(20) == 0


def test_the_manual_lists_the_shortcuts_of_the_page():
    source = (PAGE.parents[1] / "src" / "weft" / "serve" / "page" / "dialogs.js").read_text("utf-8")
    keys = re.findall(r'^    \["([^"]+)", "[^"]+"\],$', source, re.M)
    assert keys == re.findall(r"^\| ([^|]+) \| [^|]+ \|$", PAGE.read_text("utf-8"), re.M)[2:]
