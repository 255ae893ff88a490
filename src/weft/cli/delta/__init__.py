"""`weft delta`: a model as its differences from another one. One file a sub-verb."""

HELP = "a model as its differences from another one, and back"
GROUP = "use"
GROUPS = ("work",)  # of its sub-verbs
