"""Sparse attention patterns: a pattern selects the keys that a query attends to.

A pattern is called with the positions of queries and keys in their document: two int64 tensors, counted from 0, that
broadcast against each other. The pattern returns a bool tensor that is true where the query attends to the key.
`kernels/masks.py` adds causality, document boundaries and padding, and lets every query see its own key. A pattern must
consist of tensor operations only, because flex attention compiles it into its kernel.
"""
