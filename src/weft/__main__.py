"""The `weft` command, also as `python -m weft`. It imports almost nothing before it handles Ctrl-C."""

import sys


def main() -> int:
    """Runs the subcommand that the command line names, and returns the exit code; 130 for Ctrl-C."""
    try:
        from weft.cli.main import main as run  # takes a part of a second

        code = run()
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        code = 130
    if code == 130:
        import signal

        signal.signal(signal.SIGINT, signal.SIG_IGN)  # another Ctrl-C would print a traceback while Python exits
    return code


if __name__ == "__main__":
    code = main()
    if code == 130:
        import atexit
        import signal

        # After Ctrl-C within exec() of a string, as in namedtuple(), `python -m` ends by the signal, not with a code.
        atexit.register(signal.pthread_sigmask, signal.SIG_BLOCK, [signal.SIGINT])
    raise SystemExit(code)
