"""The exchangeable parts of a decoder."""
