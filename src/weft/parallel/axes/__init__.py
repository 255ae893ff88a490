"""The axes of the mesh."""
