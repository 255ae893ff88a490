"""The layers of the built-in decoder."""
