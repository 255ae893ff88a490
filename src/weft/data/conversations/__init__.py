"""Instruction data: converts records to messages, to text by a chat template, and to tokens with a loss mask."""
