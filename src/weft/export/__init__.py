"""Export targets. Each module of this package defines the target of the same name (docs/plugins.md).

A target is a function `export(source, out, console, *, ...)`. `source` is the path of a checkpoint or of a Hugging Face
folder, as `weft.checkpoint.load.resolve` returns it. The keyword arguments are the target's options. `weft export`
prints the return value. The constant FAMILIES says in a sentence which models the target can hold, and `weft export
--help` prints it, with the first line of the module's docstring.
"""
