"""How each axis of the mesh shares the work."""
