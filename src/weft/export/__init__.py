"""Export: one file a target, found by its name (docs/plugins.md).

A target is a function `export(source, out, console, *, ...)`. `source` is the path of a checkpoint or a Hugging Face
folder, as `weft.checkpoint.load.resolve` gives it. The keyword arguments are the target's options. What it returns is
printed.
"""
