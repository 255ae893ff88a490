"""`weft serve`: an OpenAI-compatible server of trained models."""

from __future__ import annotations

import argparse
import gc
import ipaddress
import logging
import os
import re
import signal
import socket
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from weft.cli.generation_options import add_model_options
from weft.cli.serving_options import add_serving_options

if TYPE_CHECKING:
    from weft.parallel.world import World
    from weft.serve.load import Loader
    from weft.serve.services import Settings

HELP = "serve trained models, with the API of OpenAI"
GROUP = "use"

LOOPBACK = ("localhost", "127.0.0.1", "::1")
EPILOG = """\
The keys can also be set in the environment: WEFT_API_KEY and WEFT_ADMIN_KEY.

examples:
  weft serve runs/run
  weft serve models/base --adapter legal=runs/lora --quantize int8 --port 9000
  weft serve small=runs/small large=runs/large
  curl http://127.0.0.1:8000/v1/chat/completions -H "Content-Type: application/json" \\
    -d '{"messages": [{"role": "user", "content": "Hello"}]}'
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Answers HTTP requests in the form of OpenAI's API with one or more models: a run's newest checkpoint, a\n"
        "checkpoint or a Hugging Face folder. Prints one line when the server is ready. SIGINT, SIGTERM and SIGHUP\n"
        "end the server after the requests that it has begun."
    )
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = EPILOG
    parser.add_argument(
        "sources",
        metavar="[NAME=]RUN_OR_HF_DIR",
        nargs="+",
        help="a run directory, a checkpoint, or a Hugging Face folder; NAME is its name in requests (default: the name "
        "of the folder)",
    )
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (default: %(default)s, this machine)")
    parser.add_argument(
        "--port", type=int, default=8000, metavar="N", help="port; 0: any free port (default: %(default)s)"
    )
    add_model_options(parser, adapter=False)
    parser.add_argument(
        "--adapter",
        action="append",
        default=[],
        metavar="NAME=DIR",
        help="add a LoRA adapter, which requests use as the model NAME; can be given several times",
    )
    parser.add_argument(
        "--chat-template",
        metavar="NAME|FILE",
        help="a built-in chat template or a template file (default: the model's chat template)",
    )
    add_serving_options(parser)


def run(args: argparse.Namespace) -> int:
    from weft.launch.threads import wait_briefly

    wait_briefly()
    settings = _settings(args)
    try:
        from weft.serve.server import open_socket
    except ImportError as error:
        from weft.errors import UserError

        raise UserError(
            f"weft serve needs {error.name}, which is not installed; install it: pip install 'weft-train[serve]'"
        ) from None
    from weft.serve.load import Loader

    load = _loader(args, Loader)
    if args.tp == 1:
        return _serve(args, settings, load)
    from weft.cli.on_ranks import run_generation_on_ranks

    if "RANK" not in os.environ:  # mistakes are reported before processes are started
        _check_sharded(args, settings)
        open_socket(args.host, args.port).close()
    return run_generation_on_ranks(args, "serve", args.tp, lambda world: _serve(args, settings, load, world))


def _check_sharded(args: argparse.Namespace, settings: Settings) -> None:
    """Raises UserError if the models or an option do not allow tensor parallelism."""
    from weft.checkpoint.load import resolve
    from weft.checkpoint.load_model import check_shardable
    from weft.errors import UserError
    from weft.serve.load import named_path

    if args.tp < 1:
        raise UserError(f"--tp {args.tp}: use at least 1 process")
    if len(args.sources) > 1:
        raise UserError("--tp: several models cannot be sharded; serve one model")
    for option, given, remedy in (
        ("quantized weights", args.quantize, "omit --quantize or --tp"),
        ("adapters", args.adapter, "omit --tp, or merge the adapter (weft merge)"),
        ("adapters that come and go", settings.admin_keys, "omit --admin-key and WEFT_ADMIN_KEY, or --tp"),
    ):
        if given:
            raise UserError(f"--tp: {option} need a model on a single process; {remedy}")
    for path in filter(None, (args.sources[0], args.draft)):
        check_shardable(resolve(named_path(path)[1]), args.tp)


def _serve(args: argparse.Namespace, settings: Settings, load: Loader, world: World | None = None) -> int:
    """Serves until a signal, and returns the exit code. With `world`, all ranks call this; the first rank answers."""
    from weft.serve.app import create_app
    from weft.serve.load import model_name
    from weft.serve.served_model import check_names
    from weft.serve.server import Server, open_socket

    check_names([model_name(source) for source in args.sources])  # loading can take minutes
    logging.basicConfig(level=logging.WARNING, format="%(message)s", stream=sys.stderr)
    logs = not args.no_access_log
    logging.getLogger("uvicorn.access").setLevel(logging.INFO if logs else logging.WARNING)
    logging.getLogger("weft.serve").setLevel(logging.INFO if logs or settings.log_prompts else logging.WARNING)
    follower = world is not None and world.rank > 0

    def listen() -> socket.socket | None:  # an address in use is reported before models are loaded
        return None if follower else open_socket(args.host, args.port)

    listener = listen() if world is None else world.agree(listen)
    load = replace(load, world=world)
    if listener is None:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)  # the first rank ends this rank after the last request
        model = load(args.sources[0])
        gc.freeze()
        model.worker.follow()
        return 0
    try:
        models = [load(source) for source in args.sources]
        app = create_app(models, settings)
        host, port = listener.getsockname()[:2]
        url = f"http://{f'[{host}]' if ':' in host else host}:{port}"
        names = ", ".join(app.state.services.models.names)

        def ready() -> None:
            if not settings.api_keys and not _is_loopback(args.host):
                print(
                    "warning: everybody who reaches this address can use the server; set WEFT_API_KEY",
                    file=sys.stderr,
                    flush=True,
                )
            gc.freeze()  # a collection of what was loaded before would hold up requests for 0.2 s
            print(f"serving {names} at {url}", flush=True)

        return Server(app, args.drain_timeout, ready, not args.no_access_log).serve_until_signal(listener)
    finally:
        listener.close()


def _settings(args: argparse.Namespace) -> Settings:
    """Checks the options and returns the limits of the server."""
    from weft.errors import UserError
    from weft.serve.services import Settings

    limits = ("batch", "body", "choices", "step_tokens", "prompt_tokens", "new_tokens", "cache_tokens")
    for name in (f"max_{limit}" for limit in limits):
        value = getattr(args, name)
        if value is not None and value < 1:
            raise UserError(f"--{name.replace('_', '-')} {value}: set it to at least 1")
    for name, least in (("max_waiting", 0), ("drain_timeout", 0), ("lookup", 0)):
        if not getattr(args, name) >= least:  # also refuses NaN
            raise UserError(f"--{name.replace('_', '-')} {getattr(args, name)}: set it to at least {least}")
    if not 0 <= args.port < 2**16:
        raise UserError(f"--port {args.port}: set it to at most 65535, or to 0 for any free port")
    if not args.request_timeout > 0:
        raise UserError(f"--request-timeout {args.request_timeout}: set it to more than 0")
    for url in args.cors_origin:
        if not re.fullmatch(r"https?://[^/\s]+", url):
            raise UserError(f"--cors-origin {url}: write scheme, host and port only, such as https://chat.example.com")
    for name in args.allow_host:
        if not re.fullmatch(r"[^:/\s]+|[0-9a-fA-F:]+", name):
            raise UserError(f"--allow-host {name}: write a name without scheme and port, such as chat.example.com")
    if not all((*args.api_key, *args.admin_key)):
        raise UserError("a key is empty; give a key, or omit the option")
    api_keys, admin_keys = (
        (*given, *filter(None, [os.environ.get(name, "").strip()]))
        for name, given in (("WEFT_API_KEY", args.api_key), ("WEFT_ADMIN_KEY", args.admin_key))
    )
    if args.adapter_folder is not None and not Path(args.adapter_folder).is_dir():
        raise UserError("--adapter-folder: there is no such folder; create it, or choose another", args.adapter_folder)
    open_here = _is_loopback(args.host) and not api_keys
    return Settings(
        api_keys,
        admin_keys,
        adapter_folder=args.adapter_folder,
        hosts=(*LOOPBACK, args.host.lower(), *map(str.lower, args.allow_host)) if open_here else None,
        cors_origins=tuple(args.cors_origin),
        max_body=args.max_body,
        max_prompt_tokens=args.max_prompt_tokens,
        max_new_tokens=args.max_new_tokens,
        max_choices=args.max_choices,
        request_timeout=args.request_timeout,
        log_prompts=args.log_prompts,
    )


def _loader(args: argparse.Namespace, kind: type[Loader]) -> Loader:
    """Checks the options of models, and returns what loads them."""
    from weft.errors import UserError

    for option, given in (("--adapter", args.adapter), ("--draft", args.draft)):
        if given and len(args.sources) > 1:
            remedy = ", or load the adapter by a request (--adapter-folder)" if option == "--adapter" else ""
            raise UserError(f"{option}: several models are served, and it can belong to only one; serve one{remedy}")
    adapters = {}
    for text in args.adapter:
        name, equals, folder = text.partition("=")
        if not (name and equals and folder):
            raise UserError(f"--adapter {text}: write NAME=DIR, such as legal=runs/lora")
        if name in adapters:
            raise UserError(f"--adapter {text}: another adapter has this name; choose another name")
        adapters[name] = folder
    names = ("max_batch", "max_step_tokens", "max_cache_tokens", "batch_invariant", "draft_tokens", "lookup")
    return kind(
        dtype=args.dtype,
        quantize=args.quantize,
        chat_template=args.chat_template,
        adapters=adapters,
        draft=args.draft,
        max_waiting=args.max_waiting,
        engine={name: getattr(args, name) for name in names},
    )


def _is_loopback(host: str) -> bool:
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
