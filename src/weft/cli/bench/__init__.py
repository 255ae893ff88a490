"""`weft bench`: measures servers. Each subcommand is one module."""

HELP = "measure the speed of a running server"
GROUP = "use"
GROUPS = ("work",)  # groups of its subcommands
