"""Rollouts: completions that the model generates during training, and their rewards."""
