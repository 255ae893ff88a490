"""Converts the keys of a request to `weft.Sampling`."""

from __future__ import annotations

import math
import secrets
from typing import Any

from weft.errors import UserError
from weft.generation.settings import Sampling
from weft.serve.errors import as_api_error
from weft.serve.schemas import SamplingRequest

FORBIDDEN_BIAS = -100.0  # OpenAI's API: this amount forbids a token
SMALLEST_TOP_P = 1e-9  # 0 in a request: only the most likely token


def make_sampling(body: SamplingRequest, max_new_tokens: int, **settings: Any) -> Sampling:
    """Returns the settings of a request.

    Args:
        body: the request.
        max_new_tokens: maximum number of new tokens.
        settings: other attributes of `Sampling`.

    Raises:
        ApiError: a value is not supported.
    """
    temperature = 1.0 if body.temperature is None else float(body.temperature)
    stop = () if body.stop is None else (body.stop,) if isinstance(body.stop, str) else tuple(body.stop)
    if temperature > 0:  # greedy decoding has no use for them, but clients send them
        top_p = None if body.top_p is None else max(body.top_p, SMALLEST_TOP_P)
        settings |= {"top_p": top_p, "top_k": body.top_k if body.top_k and body.top_k > 0 else None}
        settings["min_p"] = body.min_p
    try:
        return Sampling(
            max_new_tokens,
            temperature,
            seed=secrets.randbits(63) if body.seed is None else body.seed,
            n=body.n or 1,
            stop=stop,
            presence_penalty=body.presence_penalty or 0.0,
            frequency_penalty=body.frequency_penalty or 0.0,
            repetition_penalty=1.0 if body.repetition_penalty is None else body.repetition_penalty,
            logit_bias={
                int(token): -math.inf if bias == FORBIDDEN_BIAS else bias
                for token, bias in (body.logit_bias or {}).items()
            },
            **settings,
        )
    except UserError as error:
        raise as_api_error(error, body) from None
