"""Instruction data: converts records to messages, messages to text with a chat template, and text to masked tokens."""
