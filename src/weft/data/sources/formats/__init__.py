"""The built-in source formats. Each module defines a class `Format` (see weft.data.sources.source_format)."""
