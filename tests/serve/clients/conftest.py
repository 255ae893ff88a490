"""Starts `weft serve` for the clients' libraries, which live in an environment without Weft (`make serve-check`).

The variable WEFT_PYTHON names the interpreter that has Weft; without it, nothing is started.
"""

import os
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

import pytest

HERE = Path(__file__).parent
KEY = "sk-clients"


@dataclass
class Server:
    url: str
    model: str
    key: str
    process: subprocess.Popen


def pytest_configure(config):
    python = os.environ.get("WEFT_PYTHON")
    if python is None:  # `make test`, which collects nothing here
        return
    config.weft_folder = tempfile.TemporaryDirectory()
    folder = Path(config.weft_folder.name)
    subprocess.run([python, HERE / "make_model.py", folder], check=True, timeout=300)
    config.weft_model = str(folder / "tiny")
    words = ["serve", config.weft_model, "--port", "0", "--api-key", KEY, "--max-waiting", "64"]
    with open(folder / "server.log", "w") as log:
        process = subprocess.Popen([python, "-m", "weft", *words], stdout=subprocess.PIPE, stderr=log, text=True)
    line = process.stdout.readline()
    if " at " not in line:
        process.wait(60)
        raise SystemExit(f"the server did not start: {line}{(folder / 'server.log').read_text()}")
    config.weft_server = Server(line.split(" at ")[1].strip(), "tiny", KEY, process)
    os.environ |= {"WEFT_SERVER_URL": config.weft_server.url, "WEFT_SERVER_KEY": KEY}


def pytest_unconfigure(config):
    server = getattr(config, "weft_server", None)
    if server is not None:
        running = server.process.poll() is None
        server.process.terminate()
        code = server.process.wait(60)
        config.weft_folder.cleanup()
        assert running, "the server ended during the tests"
        assert code == 0, f"the server ended with code {code}"


@pytest.fixture(scope="session")
def server(request) -> Server:
    return request.config.weft_server
