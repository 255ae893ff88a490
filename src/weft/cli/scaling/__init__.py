"""`weft scaling`: scaling laws. Each subcommand is one module."""

HELP = "fit scaling laws to finished runs, for the best size and length of a larger run"
GROUP = "train"
GROUPS = ("work",)  # groups of its subcommands
