"""The built-in source formats, one file each: a class `Format` (see weft.data.sources.source_format)."""
