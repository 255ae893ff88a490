"""Instruction data: records of many layouts to messages, to text by a chat template, to tokens with a loss mask."""
