"""Transformations of a model for each axis of the mesh."""
