"""What is kept for backward, and where."""
