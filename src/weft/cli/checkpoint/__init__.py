"""`weft checkpoint`: looks at, verifies, converts and deletes checkpoints. Each subcommand is one module."""

HELP = "list, verify, compare, convert and delete the checkpoints of a run"
GROUP = "train"
GROUPS = ("look", "make")  # groups of its subcommands
