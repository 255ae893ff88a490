"""Rewards for runs on several ranks."""


def letters(completions):
    return [text.count("a") / 8 for text in completions]


def short(completion, number):
    return -len(completion) / 100 + number % 3


def fails(completion, number):
    raise ValueError(f"no {number}")
