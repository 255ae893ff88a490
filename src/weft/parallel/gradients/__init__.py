"""Processes gradients between backward and the optimizer step: clipping, scaling, compression, frozen rows."""
