"""Defines the settings of generation."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from numbers import Integral, Real
from typing import Any

from weft.errors import UserError
from weft.generation.constraints import compile_constraint


@dataclass(frozen=True)
class Sampling:
    """Settings of generation: the number of new tokens, how they are chosen, and where the text ends.

    >>> weft.generate("runs/run", "Kalo mi", max_new_tokens=4, temperature=0.8, top_p=0.9) == "".join(
    ...     piece.text
    ...     for piece in weft.Engine(weft.load_model("runs/run"), weft.Tokenizer.load("tok")).submit(
    ...         "Kalo mi", weft.Sampling(max_new_tokens=4, temperature=0.8, top_p=0.9)
    ...     )
    ... )
    True

    The logits are changed in this order: `logit_bias`, penalties, temperature, `top_k`, `top_p`, `min_p`.

    Attributes:
        max_new_tokens: maximum number of new tokens per prompt, at least 1.
        temperature: divisor of the logits; 0: greedy decoding.
        top_k: number of most likely tokens from which a token is drawn; None: all.
        top_p: draw from the smallest set of most likely tokens whose total probability is at least this value
            (Holtzman et al., 2020); None: all tokens.
        min_p: draw from the tokens whose probability is at least this fraction of the highest probability (Nguyen et
            al., 2024); None: all tokens.
        repetition_penalty: divides positive logits, and multiplies negative logits, of tokens in the prompt or the
            continuation (Keskar et al., 2019); 1: no penalty.
        presence_penalty: amount subtracted from the logits of tokens in the continuation.
        frequency_penalty: amount subtracted from a token's logit for each occurrence in the continuation.
        logit_bias: amounts added to the logits of tokens, by token id.
        stop: strings that end the continuation and are not part of it. They require a tokenizer.
        n: number of continuations per prompt.
        logprobs: number of most likely tokens whose log-probabilities are returned, besides the log-probability of
            each new token; None: no log-probabilities. They are computed from the model's own logits, before
            `logit_bias`, penalties and all other settings change the logits.
        prompt_logprobs: whether log-probabilities of the prompt's tokens are returned, too, with the first new token
            (`Piece.prompt`); needs `logprobs`. The prompt's cached keys and values are then computed again.
        tempered_logprobs: whether these log-probabilities are those of the logits divided by `temperature`, over all
            tokens: also of those that `top_k`, `top_p` and `min_p` leave out.
        json_schema: a JSON schema (draft 2020-12) that the continuation must follow: a mapping, a bool (True: any
            JSON) or JSON text; None: no schema. Keys are written in the order of `properties`. Needs llguidance and a
            tokenizer, like `regex` and `grammar`; only one of the three can be set.
        regex: a regular expression, in the syntax of Rust's regex crate, that the complete continuation must match.
        grammar: a context-free grammar in llguidance's variant of Lark, whose rule `start` describes the continuation.
        seed: seed of the random numbers. The same seed and prompt give the same tokens.
        skip_special_tokens: whether the text omits special tokens within the continuation.
        max_length: maximum number of tokens of a prompt with its continuation. A longer prompt is refused, and a
            continuation ends at this length. None: the length for which the model is made (max_position_embeddings),
            which only models without learned positions can exceed.

    Raises:
        UserError: a value is out of range, or a schema, regex or grammar is invalid or cannot be enforced.
    """

    max_new_tokens: int
    temperature: float = 1.0
    top_k: int | None = None
    top_p: float | None = None
    seed: int = 0
    min_p: float | None = None
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    stop: tuple[str, ...] = ()
    n: int = 1
    logprobs: int | None = None
    tempered_logprobs: bool = False
    json_schema: Mapping[str, Any] | bool | str | None = None
    regex: str | None = None
    grammar: str | None = None
    skip_special_tokens: bool = False
    max_length: int | None = None
    prompt_logprobs: bool = False

    def __post_init__(self):
        if isinstance(self.stop, str):
            object.__setattr__(self, "stop", (self.stop,))  # not one stop string per character
        self._check_types()
        for ok, name, remedy in (
            (self.max_new_tokens >= 1, "max_new_tokens", "set it to at least 1"),
            (
                0 <= self.temperature < math.inf,
                "temperature",
                "set it to 0 (greedy decoding) or a finite number above 0",
            ),
            (self.top_k is None or self.top_k >= 1, "top_k", "set it to at least 1"),
            (self.top_p is None or 0 < self.top_p <= 1, "top_p", "set it to a number above 0, at most 1"),
            (self.min_p is None or 0 <= self.min_p <= 1, "min_p", "set it to a number from 0 to 1"),
            (0 < self.repetition_penalty < math.inf, "repetition_penalty", "set it to a finite number above 0"),
            (math.isfinite(self.presence_penalty), "presence_penalty", "set it to a finite number"),
            (math.isfinite(self.frequency_penalty), "frequency_penalty", "set it to a finite number"),
            (self.n >= 1, "n", "set it to at least 1"),
            (self.max_length is None or self.max_length >= 2, "max_length", "set it to at least 2"),
            (self.logprobs is None or self.logprobs >= 0, "logprobs", "set it to 0 or more"),
            (not self.prompt_logprobs or self.logprobs is not None, "logprobs", "prompt_logprobs needs a number"),
            (
                not (self.tempered_logprobs and self.temperature == 0),
                "temperature",
                "tempered_logprobs needs a temperature above 0",
            ),
        ):
            if not ok:
                raise UserError(f"{name} is {getattr(self, name)}; {remedy}")
        if not all(self.stop):
            raise UserError("stop has an empty string; remove it")
        if self.temperature == 0 and (self.top_k, self.top_p, self.min_p) != (None, None, None):
            name = next(name for name in ("top_k", "top_p", "min_p") if getattr(self, name) is not None)
            raise UserError(f"{name} has no effect with temperature 0 (greedy decoding); remove it, or set temperature")
        for token, bias in self.logit_bias.items():
            if token < 0 or math.isnan(bias) or bias == math.inf:
                what = "map token ids of at least 0 to finite numbers or -inf"
                raise UserError(f"logit_bias is {{{token}: {bias}}}; {what}")
        _ = self.constraint  # invalid constraints are refused here

    def _check_types(self) -> None:
        """Raises UserError if a value has a wrong type. Without this check, a later step of an engine would fail."""
        kinds = {"an integer": Integral, "a number": Real}
        whole, optional = ("max_new_tokens", "n", "seed"), ("top_k", "logprobs", "max_length", "top_p", "min_p")
        numbers = ("temperature", "repetition_penalty", "presence_penalty", "frequency_penalty")
        for name in (*whole, *optional, *numbers):
            value, kind = getattr(self, name), "an integer" if name in (*whole, *optional[:3]) else "a number"
            if not isinstance(value, kinds[kind]) and not (name in optional and value is None):
                raise UserError(f"{name} is {value!r}; set it to {kind}")
        if not isinstance(self.stop, Collection) or not all(isinstance(text, str) for text in self.stop):
            raise UserError(f"stop is {self.stop!r}; set it to a tuple of strings")
        for token, bias in self.logit_bias.items():
            if not isinstance(token, Integral) or not isinstance(bias, Real):
                raise UserError(f"logit_bias is {{{token!r}: {bias!r}}}; map token ids to numbers")

    @cached_property
    def constraint(self) -> str | None:
        """The compiled schema, regex or grammar (see `weft.generation.constraints.Constraint`), or None."""
        return compile_constraint(self.json_schema, self.regex, self.grammar)

    @property
    def penalizes(self) -> bool:
        """Whether a penalty applies, so that the logits depend on earlier tokens."""
        return (self.repetition_penalty, self.presence_penalty, self.frequency_penalty) != (1.0, 0.0, 0.0)
