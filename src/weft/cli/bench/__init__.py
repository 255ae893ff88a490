"""`weft bench`: measures servers, devices and links. Each subcommand is one module."""

HELP = "measure the speed of a running server, of this machine's devices, or of the links between ranks"
GROUP = "use"
GROUPS = ("work",)  # groups of its subcommands
