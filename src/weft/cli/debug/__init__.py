"""`weft debug`: looks for the cause of what went wrong in a run. Each subcommand is one module."""

HELP = "find the module in which a value that is not finite arises"
GROUP = "train"
GROUPS = ("find",)  # groups of its subcommands
