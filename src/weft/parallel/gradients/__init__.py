"""What is done with gradients between backward and the update."""
