"""Sparse attention: which keys a query looks at, among those that it may.

A pattern is called with the places of queries and keys in their document, int64 tensors counted from 0 that broadcast
against each other, and returns a bool tensor, true where the query looks at the key. Causality, documents and padding
are not its business: `kernels/masks.py` lets no query see a later key, or another document's, and every query sees
itself. It must be made of tensor operations alone: flex attention compiles it into its kernel.
"""
