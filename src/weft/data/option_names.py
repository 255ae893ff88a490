"""Defines `OptionNames`: how messages name the options with which data is packed."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class OptionNames:
    """Names of the options with which data is packed, as the user sets them.

    Attributes:
        in_run_file: whether the options are keys of `data` in a run file; otherwise, options of `weft data pack`.
    """

    in_run_file: bool = False

    def name(self, option: str) -> str:
        """Returns the name of an option: `--chat-template` or `data.chat_template`, for "chat_template"."""
        if self.in_run_file:
            return "data.sequence_length" if option == "max_tokens" else f"data.{option}"
        return f"--{option.replace('_', '-')}"

    def setting(self, option: str, value: object) -> str:
        """Returns an option with its value: `--overlong truncate` or `data.overlong: truncate`."""
        return f"{self.name(option)}{':' * self.in_run_file} {value}"

    def field(self, name: str) -> str:
        """Returns the setting of one field of the records' layout."""
        return f"data.fields.{name}" if self.in_run_file else f"--fields {name}=..."

    @property
    def fields_example(self) -> str:
        """An example of the setting of all fields."""
        if self.in_run_file:
            return "data.fields: {input: KEY, target: KEY} (or {text: KEY} for texts)"
        return "--fields input=KEY,target=KEY"

    @property
    def skip(self) -> str:
        """The remedy that leaves out documents with errors."""
        command = "skip such documents with `weft data pack --on-error skip`"
        return command if self.in_run_file else "use --on-error skip to skip such documents"


COMMAND, RUN_FILE = OptionNames(), OptionNames(in_run_file=True)
