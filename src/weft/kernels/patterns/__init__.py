"""Sparse attention patterns: which of the visible keys a query attends to.

A pattern is called with positions of queries and keys in their document, int64 tensors counted from 0 that broadcast
against each other. It returns a bool tensor, true where the query attends to the key. `kernels/masks.py` adds
causality, document boundaries and padding, and lets every query see itself. A pattern must consist of tensor
operations only: flex attention compiles it into its kernel.
"""
