"""`weft delta`: stores a model as its differences from a base model. Each subcommand is one module."""

HELP = "store a model as its differences from a base model, and restore the model"
GROUP = "use"
GROUPS = ("work",)  # groups of its subcommands
