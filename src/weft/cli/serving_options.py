"""Options of `weft serve`: of the engine, of safety, and limits."""

from __future__ import annotations

import argparse


def add_serving_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options that do not choose models and addresses."""
    _add_engine_options(parser)
    _add_safety_options(parser)
    _add_limits(parser)


def _add_engine_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("engine")
    group.add_argument(
        "--max-batch", type=int, default=64, metavar="N", help="texts generated at once (default: %(default)s)"
    )
    group.add_argument(
        "--max-step-tokens",
        type=int,
        metavar="N",
        help="tokens computed per step; fewer interrupt other texts less when a long prompt arrives (default: 512 on a "
        "CPU, 2048 on a GPU)",
    )
    group.add_argument(
        "--tp",
        type=int,
        default=1,
        metavar="N",
        help="shard the model over N processes on this machine, one per GPU (tensor parallelism; default: 1)",
    )
    group.add_argument(
        "--max-cache-tokens",
        type=int,
        metavar="N",
        help="tokens in the key-value cache (default: what fits in half of the free memory)",
    )
    group.add_argument(
        "--draft", metavar="RUN", help="propose tokens by a smaller model with the same tokenizer (one model only)"
    )
    group.add_argument(
        "--draft-tokens", type=int, metavar="N", help="tokens that the draft model proposes (default: 4)"
    )
    group.add_argument(
        "--lookup", type=int, default=0, metavar="N", help="propose up to N tokens that occurred earlier in the text"
    )
    group.add_argument(
        "--batch-invariant",
        action="store_true",
        help="compute each text alone, so that no bit of a text depends on other requests (slower)",
    )


def _add_safety_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("safety")
    group.add_argument(
        "--api-key",
        action="append",
        default=[],
        metavar="KEY",
        help="key that requests must have; can be given several times. Other users of this machine can see it: prefer "
        "the environment variable WEFT_API_KEY",
    )
    group.add_argument(
        "--admin-key",
        action="append",
        default=[],
        metavar="KEY",
        help="key of requests that add and remove adapters (default: WEFT_ADMIN_KEY; without it, nobody can)",
    )
    group.add_argument(
        "--adapter-folder",
        metavar="DIR",
        help="folder whose adapters can be added while the server runs, with the admin key (default: none)",
    )
    group.add_argument(
        "--allow-host",
        action="append",
        default=[],
        metavar="NAME",
        help="also accept requests whose header Host has this name (a server on a loopback address without a key only "
        "accepts the names of this machine)",
    )
    group.add_argument(
        "--cors-origin",
        action="append",
        default=[],
        metavar="URL",
        help="allow web pages of this origin to use the server (default: none)",
    )
    group.add_argument("--no-access-log", action="store_true", help="do not log each request to standard error")
    group.add_argument(
        "--log-prompts", action="store_true", help="log prompts and answers, which the log does not contain otherwise"
    )


def _add_limits(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("limits")
    for option, default, what in (
        ("--max-body", 10 * 2**20, "bytes of a request"),
        ("--max-waiting", 256, "texts that wait for others; further requests get the status 429"),
        ("--max-choices", 128, "texts of one request"),
        ("--max-prompt-tokens", None, "tokens of a prompt (default: the model's window)"),
        ("--max-new-tokens", None, "new tokens of a text (default: the model's window)"),
    ):
        shown = "" if default is None else " (default: %(default)s)"
        group.add_argument(option, type=int, default=default, metavar="N", help=f"maximum number of {what}{shown}")
    group.add_argument(
        "--request-timeout",
        type=float,
        default=600.0,
        metavar="S",
        help="seconds after which a request ends with an error (default: %(default)g)",
    )
    group.add_argument(
        "--drain-timeout",
        type=float,
        default=30.0,
        metavar="S",
        help="seconds that requests have to end after SIGTERM or Ctrl-C (default: %(default)g)",
    )
