"""Defines `Tools`, the Python functions that a model can call in a rollout."""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Sequence
from typing import Any, get_origin, get_type_hints

from weft.errors import UserError, describe_exception
from weft.train.rollouts.user_functions import UserFunction, with_timeout

CALL = re.compile(r"<tool_call>\s*(\{.*?\})\s*</tool_call>", re.DOTALL)
TYPES = {int: "integer", float: "number", bool: "boolean", list: "array", dict: "object"}


class Tools:
    """The functions that a model can call.

    Args:
        references: the functions, as `module:function`. The docstring of a function is its description.
        timeout: maximum number of seconds of a call.

    Attributes:
        schemas: JSON schemas of the functions, for chat templates.
    """

    def __init__(self, references: Sequence[str], timeout: float):
        found = [UserFunction("tools", reference) for reference in references]
        self.functions, self.timeout = {function.name: function for function in found}, timeout
        if len(self.functions) < len(found):
            raise UserError("objective.tools: two functions have the same name; rename one of them")
        self.schemas = [schema(function) for function in found]

    def call(self, name: str, arguments: dict[str, Any]) -> str:
        """Returns the result of a function as text. An exception becomes text, too, from which the model can learn."""
        function = self.functions.get(name)
        if function is None:
            return f"Error: there is no tool {name!r}"
        try:
            result = with_timeout(lambda: function.call(arguments), self.timeout)
            return result if isinstance(result, str) else json.dumps(result, ensure_ascii=False, default=str)
        except TimeoutError:
            return f"Error: {name} took longer than {self.timeout:g} seconds"
        except Exception as error:
            return f"Error: {describe_exception(error)}"


def find_call(text: str) -> tuple[str, dict[str, Any]] | None:
    """Returns the name and the arguments of the function that an answer calls; None if it calls none.

    The call is JSON, such as `{"name": "add", "arguments": {"a": 1}}`: the complete answer, or in `<tool_call>` tags.
    """
    found = CALL.search(text)
    try:
        call = json.loads(found[1] if found is not None else text)
    except (ValueError, RecursionError):  # RecursionError: JSON that is nested too deep
        return None
    if not isinstance(call, dict) or not isinstance(call.get("name"), str):
        return None
    arguments = call.get("arguments", call.get("parameters", {}))
    return (call["name"], arguments) if isinstance(arguments, dict) else None


def schema(function: UserFunction) -> dict[str, Any]:
    """Returns the JSON schema of a function, in the form that chat templates expect.

    Raises:
        UserError: the type hints of the function cannot be read.
    """
    called = function.function
    if not (inspect.isroutine(called) or inspect.isclass(called)):
        called = type(called).__call__
    try:
        hints = get_type_hints(called)
    except Exception as error:  # hints are expressions of the user's module
        what = f"has type hints that cannot be read ({describe_exception(error)})"
        raise function.error(f"{what}; import the types when the module is imported, or remove the hints") from None
    properties = {
        name: {"type": TYPES.get(get_origin(hints.get(name)) or hints.get(name, str), "string")}
        for name in function.parameters
    }
    parameters = {"type": "object", "properties": properties, "required": function.required}
    described = {"name": function.name, "description": inspect.getdoc(function.function) or ""}
    return {"type": "function", "function": {**described, "parameters": parameters}}
