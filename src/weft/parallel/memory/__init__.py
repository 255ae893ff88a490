"""Memory of a step: saved tensors, and offloading."""
