"""Export targets: one file each, found by name (docs/plugins.md).

A target is a function `export(source, out, console, *, ...)`. `source` is the path of a checkpoint or a Hugging Face
folder, as `weft.checkpoint.load.resolve` returns it. The keyword arguments are the target's options. The return value
is printed.
"""
