"""`weft serve --tp 2`: two processes answer as one."""

import json
import signal
import threading
import urllib.error
import urllib.request

import pytest
from forked import Forked

import weft
from weft.cli.main import main

PROMPTS = ["Kalo mi", "Ren", "Sta tu vo"]


def ask(url, path, body):
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(url + path, json.dumps(body).encode(), headers)
    return json.load(urllib.request.urlopen(request, timeout=120))


def test_two_processes_serve_the_texts_of_one(chat_model):
    server = Forked("serve", chat_model, "--port", "0", "--tp", "2", ranks=True, OMP_NUM_THREADS="1")
    try:
        line = server.first_line()
        assert line.startswith("serving model at http://127.0.0.1:"), line + server.stderr
        url, found = line.split(" at ")[1].strip(), {}

        def complete(prompt):
            body = {"prompt": prompt, "max_tokens": 12, "temperature": 0}
            found[prompt] = ask(url, "/v1/completions", body)["choices"][0]["text"]

        threads = [threading.Thread(target=complete, args=(prompt,)) for prompt in PROMPTS]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        with pytest.raises(urllib.error.HTTPError) as caught:
            ask(url, "/v1/embeddings", {"input": "Kalo mi"})
        assert "sharded" in json.load(caught.value)["error"]["message"]
        server.send_signal(signal.SIGTERM)
        _, errors = server.communicate(timeout=60)
    finally:
        server.kill()
    assert server.returncode == 0, errors
    texts = weft.generate(chat_model, PROMPTS, max_new_tokens=12)
    assert [found[prompt] for prompt in PROMPTS] == texts


@pytest.mark.parametrize(
    ("words", "parts"),
    [
        (["--tp", "3"], ("3 does not divide", "attention heads")),
        (["--tp", "0"], ("--tp 0", "at least 1")),
        (["--tp", "2", "--quantize", "int8"], ("--tp", "--quantize")),
        (["--tp", "2", "--admin-key", "k"], ("--tp", "--admin-key")),
    ],
)
def test_what_cannot_be_sharded_is_refused_before_processes_start(words, parts, chat_model, capsys):
    assert main(["serve", str(chat_model), "--port", "0", *words]) == 2
    said = capsys.readouterr().err
    assert all(part in said for part in parts)
    assert said.count("\n") == 1
