"""`weft delta`: a model as its differences from another one. One file a sub-verb."""

HELP = "a model as its differences from another one, and back"

VERBS = {
    "work": {
        "make": ("weft.cli.delta.make", "write how a model differs from the one that it was made from"),
        "apply": ("weft.cli.delta.apply", "make the model again from that and the other one, bit for bit"),
    },
}
