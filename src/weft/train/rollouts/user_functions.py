"""Calls the user's functions, such as rewards and tools, with a time-out, and describes their errors."""

from __future__ import annotations

import asyncio
import inspect
import threading
from collections.abc import Callable
from typing import Any

from weft.errors import UserError, describe_exception, describe_user_exception, user_frames
from weft.plugins import load_reference


class UserFunction:
    """A function that the user named as `module:function`.

    Args:
        kind: what the function is, for messages, such as "reward".
        reference: `module:function`.

    Attributes:
        name: the name of the function.
        parameters: the names of its parameters.
        accepts_any: whether it has `**kwargs`.
        required: the names of the parameters without a default.

    Raises:
        UserError: the function does not exist, its module cannot be imported, or it is not a function.
    """

    def __init__(self, kind: str, reference: str):
        self.label, self.name = f"{kind} {reference}", reference.rpartition(":")[2]
        module, colon, _ = reference.partition(":")
        if not (module and colon and self.name):
            raise UserError(f"objective.{kind}: {reference!r} is not a function; write it as module:function")
        try:
            self.function: Callable[..., Any] = load_reference(reference)
        except UserError as error:
            raise UserError(f"objective.{kind}: {error}") from None
        except Exception as error:
            why = describe_user_exception(error) or describe_exception(error)
            raise UserError(f"objective.{kind}: {reference!r} cannot be imported: {why}; fix the module") from error
        if not callable(self.function):
            what = f"{reference!r} is a {type(self.function).__name__}, not a function"
            raise UserError(f"objective.{kind}: {what}; name a function")
        try:
            found = inspect.signature(self.function).parameters
        except (TypeError, ValueError):
            what = f"Python does not know the arguments of {reference!r}"
            raise UserError(f"objective.{kind}: {what}; name a Python function that calls it") from None
        plain = [one for one in found.values() if one.kind not in (one.VAR_KEYWORD, one.VAR_POSITIONAL)]
        self.parameters = [one.name for one in plain]
        self.required = [one.name for one in plain if one.default is one.empty]
        self.accepts_any = any(one.kind == one.VAR_KEYWORD for one in found.values())

    @property
    def place(self) -> tuple[str | None, int | None]:
        """The file and the line of the function, for messages."""
        code = getattr(inspect.unwrap(self.function), "__code__", None)
        return (None, None) if code is None else (code.co_filename, code.co_firstlineno)

    def error(self, what: str) -> UserError:
        """Returns the error of what the function returned, with its file and line."""
        return UserError(f"{self.label} {what}", *self.place)

    def raised(self, error: BaseException, where: str) -> UserError:
        """Returns the error of an exception that the function raised, with the line that raised it."""
        frames = user_frames(error)
        place = (frames[-1].tb_frame.f_code.co_filename, frames[-1].tb_lineno) if frames else self.place
        return UserError(f"{self.label} raised {describe_exception(error)}, {where}; fix the function", *place)

    def call(self, arguments: dict[str, Any]) -> Any:
        """Calls the function, and waits for its result if it is an async function."""
        result = self.function(**arguments)
        return asyncio.run(wait_for(result)) if inspect.isawaitable(result) else result


async def wait_for(result: Any) -> Any:
    """Waits for the result of an async function. Exceptions that would end the process become RuntimeError."""
    try:
        return await result
    except (SystemExit, KeyboardInterrupt) as error:
        raise _ordinary(error) from error


def with_timeout(action: Callable[[], Any], seconds: float) -> Any:
    """Runs `action` in a thread and returns its result. The thread of an action that takes too long is abandoned.

    Raises:
        TimeoutError: the action took more than `seconds`.
        RuntimeError: the action raised an exception that would end the process, such as SystemExit.
    """
    found: list[Any] = []
    failure: list[BaseException] = []

    def run() -> None:
        try:
            found.append(action())
        except BaseException as error:
            failure.append(error)

    thread = threading.Thread(target=run, daemon=True, name="user-function")
    thread.start()
    thread.join(seconds)
    if failure:
        raise failure[0] if isinstance(failure[0], Exception) else _ordinary(failure[0])
    if not found:
        raise TimeoutError
    return found[0]


def _ordinary(error: BaseException) -> RuntimeError:
    """Returns an exception with the description and the traceback of one that would end the process."""
    return RuntimeError(describe_exception(error)).with_traceback(error.__traceback__)
