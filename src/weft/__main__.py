"""The `weft` command, also as `python -m weft`. It imports almost nothing before it handles Ctrl-C."""

import sys


def main() -> int:
    """Runs the subcommand that the command line names, and returns the exit code; 130 for Ctrl-C."""
    try:
        from weft.cli.main import main as run  # takes a part of a second

        return run()
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130


if __name__ == "__main__":
    raise SystemExit(main())
