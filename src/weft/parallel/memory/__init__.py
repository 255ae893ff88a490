"""Reduces the memory of a step: activation checkpointing, and offloading to the host."""
