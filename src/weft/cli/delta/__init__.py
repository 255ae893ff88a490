"""`weft delta`: a model as its differences from another model. One file per sub-verb."""

HELP = "write a model as its differences from another one, and restore it"
GROUP = "use"
GROUPS = ("work",)  # of its sub-verbs
