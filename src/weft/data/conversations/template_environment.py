"""Defines the jinja2 environment of chat templates, which is a sandbox with the functions of Transformers."""

from __future__ import annotations

import json
from datetime import datetime
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension
from jinja2.sandbox import ImmutableSandboxedEnvironment


class _Marks(Extension):
    """The jinja2 extension for `{% generation %}`: the block writes its content, and records the content's span."""

    tags = {"generation"}  # noqa: RUF012 (jinja2 requires it)

    def __init__(self, environment: jinja2.Environment):
        super().__init__(environment)
        environment.extend(marks=self)
        self.begin()

    def begin(self) -> None:
        """Resets the spans for a new text."""
        self.written, self.spans = 0, []

    def parse(self, parser: Any) -> nodes.Node:
        """Compiles a `{% generation %}` block to a call of the method `_mark` with the block's content."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_mark"), [], [], body).set_lineno(line)

    def _mark(self, caller: Any) -> str:
        content = caller()
        self.spans.append((self.written, self.written + len(content)))
        return content


class _Namespace(jinja2.utils.Namespace):
    """The `namespace()` of templates. It refuses names with a leading underscore, which could escape the sandbox."""

    def __init__(*args: Any, **kwargs: Any):  # `self` can be one of the keywords
        values = dict(*args[1:], **kwargs)
        for name in values:
            _require_public(name)
        jinja2.utils.Namespace.__init__(args[0], values)

    def __setitem__(self, name: str, value: Any) -> None:
        _require_public(name)
        super().__setitem__(name, value)


def _require_public(name: Any) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise SecurityError(f"the name of a namespace's attribute must not begin with an underscore: {name}")


def make_environment(now: datetime | None) -> ImmutableSandboxedEnvironment:
    """Returns a jinja2 environment with the functions of Transformers. `now`: time of `strftime_now`; None: now."""

    def refuse(message: str) -> None:
        raise jinja2.TemplateError(message)

    def tojson(value, ensure_ascii=False, indent=None, separators=None, sort_keys=False) -> str:
        # jinja2's filter escapes HTML.
        return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Marks, "jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = tojson
    environment.globals["raise_exception"] = refuse
    environment.globals["strftime_now"] = lambda form: (now or datetime.now()).strftime(form)
    environment.globals["namespace"] = _Namespace
    return environment
