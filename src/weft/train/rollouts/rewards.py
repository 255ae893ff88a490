"""Defines `Rewards`, which computes the rewards of completions with the user's functions and with reward models."""

from __future__ import annotations

import asyncio
import inspect
import math
import reprlib
from collections.abc import Mapping, Sequence
from numbers import Real
from typing import Any

import torch

from weft.config.rollout_rules import FUNCTION
from weft.errors import UserError
from weft.train.rollouts.reward_model import RewardModel
from weft.train.rollouts.user_functions import UserFunction, wait_for, with_timeout

GIVEN = ("prompts", "completions", "conversations")  # arguments beside the columns of the records
EACH = {"prompt": "prompts", "completion": "completions", "conversation": "conversations"}


class Rewards:
    """The reward functions and reward models of a run.

    A function has the arguments `prompts`, `completions` and any columns of the records by name, each a list with one
    entry per completion, and returns a list of numbers. A function with the arguments `prompt` and `completion` is
    called for each completion, with one value of each column. Both kinds can be async. `conversations` (or
    `conversation`) are the messages with the completion.

    Args:
        weights: weight of each function by `module:function`, or of each reward model by path.
        timeout: maximum number of seconds of each function for the completions of a rollout.
        columns: the columns of the records.
        missing: for each column that some records lack, file and line of the first of these records.

    Raises:
        UserError: a function does not exist, requires an argument that is not a column of all records, or has an
            argument whose name is also a column.
    """

    def __init__(
        self,
        weights: Mapping[str, float],
        timeout: float,
        columns: Sequence[str],
        missing: Mapping[str, str] | None = None,
    ):
        if not weights:
            raise UserError("objective.reward: no function; name one as module:function")
        self.functions = [
            UserFunction("reward", one) if FUNCTION.fullmatch(one) else RewardModel(one) for one in weights
        ]
        self.weights, self.timeout = list(weights.values()), timeout
        for reference, weight in weights.items():
            if not math.isfinite(weight):
                raise UserError(f"objective.reward.{reference}: the weight {weight} is not finite; set a finite number")
        names = [function.name for function in self.functions]
        self.names = [
            f"{name}-{names[:n].count(name) + 1}" if name in names[:n] else name for n, name in enumerate(names)
        ]
        self.check_columns(columns, missing or {})

    def check_columns(self, columns: Sequence[str], missing: Mapping[str, str]) -> None:
        """Raises UserError if columns cannot give the functions their arguments (see `Rewards`)."""
        for function in self.functions:
            if isinstance(function, UserFunction):
                _check_arguments(function, columns, missing)

    @property
    def models(self) -> list[RewardModel]:
        """The reward models."""
        return [one for one in self.functions if isinstance(one, RewardModel)]

    def __call__(
        self, arguments: Mapping[str, Sequence[Any]], places: Sequence[str], scores: Sequence[Sequence[float]] = ()
    ) -> torch.Tensor:
        """Returns the rewards of each function and reward model, float64 `[functions, completions]`.

        Args:
            arguments: argument of the functions, as in `GIVEN`, or name of a column -> its value for each completion.
            places: description of each completion, for messages.
            scores: the scores of each completion by the reward models.

        Raises:
            UserError: a function raises an exception, takes too long, or returns a wrong number of values or a value
                that is not a finite number. The message names the function and the completion.
        """
        scored = iter(zip(*scores, strict=True))  # for each reward model, the scores of all completions
        found = [
            self._compute(function, arguments, places) if isinstance(function, UserFunction) else next(scored)
            for function in self.functions
        ]
        return torch.tensor(found, dtype=torch.float64).view(len(found), len(places))

    def _compute(
        self, function: UserFunction, arguments: Mapping[str, Sequence[Any]], places: Sequence[str]
    ) -> list[float]:
        count, each = len(places), calls_each(function)
        singular = {many: one for one, many in EACH.items()} if each else {}
        given = {
            name: list(values)
            for many, values in arguments.items()
            if (name := singular.get(many, many)) in function.parameters or function.accepts_any
        }
        at = [0]  # index of the completion of the present call

        def one_by_one() -> list[Any]:
            found: list[Any] = []
            for index in range(count):
                at[0] = index
                found.append(function.call({name: values[index] for name, values in given.items()}))
            return found

        async def together() -> list[Any]:
            calls = [wait_for(function.function(**{name: v[i] for name, v in given.items()})) for i in range(count)]
            found = await asyncio.gather(*calls, return_exceptions=True)
            for index, value in enumerate(found):
                if isinstance(value, BaseException):
                    at[0] = index
                    raise value
            return found

        is_async = inspect.iscoroutinefunction(function.function)
        act = (lambda: asyncio.run(together())) if is_async else one_by_one
        started = each and not is_async
        try:
            values = with_timeout(act if each else lambda: function.call(given), self.timeout)
        except TimeoutError:
            where = f"at {places[at[0]]}" if started else f"for {count} completions"
            what = f"took longer than objective.reward_timeout ({self.timeout:g} seconds) {where}"
            raise function.error(f"{what}; make it faster, or raise the limit") from None
        except Exception as error:
            where = f"for {places[at[0]]}" if each else f"called with {count} completions, the first is {places[0]}"
            raise function.raised(error, where) from error
        return check_values(function, values, places)


def _check_arguments(function: UserFunction, columns: Sequence[str], missing: Mapping[str, str]) -> None:
    """Raises UserError if the columns cannot give a function its arguments (`columns`, `missing`: see `Rewards`)."""
    given = EACH if calls_each(function) else GIVEN
    taken = (*given, *GIVEN)
    for name in (*function.parameters, *(taken if function.accepts_any else ())):
        if name in columns and name in taken:
            raise function.error(f"has the argument {name!r}, which is also a column of the records; rename the column")
    for name in function.required:
        if name in given:
            continue
        if name not in columns:
            what = f"has the argument {name!r}, but the records have only the columns {', '.join(columns)}"
            raise function.error(f"{what}; rename the argument, or give it a default")
        if name in missing:
            what = f"the record has no {name!r}, an argument of the {function.label} without a default"
            raise UserError(f"{what}; add it to the record", missing[name])


def calls_each(function: UserFunction) -> bool:
    """Whether a reward function is called for each completion, and not with lists."""
    return "completion" in function.parameters


def is_float(value: Real) -> bool:
    """Whether a number is finite as a float, which very large integers are not."""
    try:
        return math.isfinite(value)
    except OverflowError:
        return False


def check_values(function: UserFunction, values: Any, places: Sequence[str]) -> list[float]:
    """Returns what a reward function returned as a list of floats. Raises UserError if it is not valid."""
    values = values.tolist() if hasattr(values, "tolist") else values
    if isinstance(values, str) or not isinstance(values, Sequence):
        raise function.error(f"returned a {type(values).__name__}; return a list with a number for each completion")
    if len(values) != len(places):
        what = f"returned {len(values)} values for {len(places)} completions"
        raise function.error(f"{what}; return one number for each completion")
    for value, place in zip(values, places, strict=True):
        value = value.item() if hasattr(value, "item") else value
        if not isinstance(value, Real) or not is_float(value):
            raise function.error(f"returned {reprlib.repr(value)} for {place}; return a finite number")
    return [float(value) for value in values]
