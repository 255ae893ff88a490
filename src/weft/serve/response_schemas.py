"""Bodies of requests of `/v1/responses`."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import Discriminator, Field, Tag

from weft.serve.schemas import NO_EFFECT, Function, JsonObjectFormat, NamedSchema, Section, TextFormat


class ResponseTool(Function):
    """A function that the model can call."""

    type: Literal["function"]


class NamedResponseTool(Section):
    """The choice of one tool."""

    type: Literal["function"]
    name: str


class ResponseSchemaFormat(NamedSchema):
    type: Literal["json_schema"]

    @property
    def as_chat(self) -> dict[str, Any]:
        """The format in a request of chat completions."""
        return {"type": "json_schema", "json_schema": {"name": self.name, "schema": self.schema_}}


class ResponseTextFormat(TextFormat):
    @property
    def as_chat(self) -> dict[str, Any]:
        return {"type": "text"}


class ResponseObjectFormat(JsonObjectFormat):
    @property
    def as_chat(self) -> dict[str, Any]:
        return {"type": "json_object"}


class ResponseTextPart(Section):
    """A part of a text."""

    type: Literal["input_text", "output_text", "text"]
    text: str
    annotations: list[Any] | None = Field(None, description=NO_EFFECT)
    logprobs: list[Any] | None = Field(None, description=NO_EFFECT)
    prompt_cache_breakpoint: dict[str, Any] | None = Field(None, description=NO_EFFECT)


ItemText = str | list[ResponseTextPart]


class ResponseItem(Section):
    """An item of the input, such as an item of an earlier response."""

    id: str | None = Field(None, description=NO_EFFECT)
    status: str | None = Field(None, description=NO_EFFECT)


class ResponseMessage(ResponseItem):
    """A message of a conversation."""

    type: Literal["message"] = "message"
    role: Literal["system", "developer", "user", "assistant"]
    content: ItemText
    phase: str | None = Field(None, description=NO_EFFECT)


class ResponseCall(ResponseItem):
    """A call of a function in an earlier response."""

    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: str


class ResponseCallOutput(ResponseItem):
    """The result of a call."""

    type: Literal["function_call_output"]
    call_id: str
    output: ItemText


def _kind(item: Any) -> Any:
    """Returns the type of an item. Messages need no type."""
    return item.get("type", "message") if isinstance(item, dict) else getattr(item, "type", "message")


Item = Annotated[
    Annotated[ResponseMessage, Tag("message")]
    | Annotated[ResponseCall, Tag("function_call")]
    | Annotated[ResponseCallOutput, Tag("function_call_output")],
    Discriminator(_kind),
]


class ResponseText(Section):
    """The form of the answer, which is enforced."""

    format: (
        Annotated[ResponseTextFormat | ResponseObjectFormat | ResponseSchemaFormat, Field(discriminator="type")] | None
    ) = None


class ResponseStreamOptions(Section):
    include_obfuscation: bool | None = Field(None, description=NO_EFFECT)


class ResponseRequest(Section):
    """A request of `/v1/responses`."""

    # Name of a key of chat completions -> name of the key here.
    renamed: ClassVar = {
        "response_format": "text.format",
        "messages": "input",
        "max_completion_tokens": "max_output_tokens",
    }

    model: str | None = Field(None, description="Name of a model or of an adapter; default: the first model.")
    input: str | list[Item] = Field(
        description="A text, or items of the types message, function_call and function_call_output."
    )
    instructions: str | None = Field(None, description="Text of the system message.")
    max_output_tokens: int | None = Field(None, ge=1)
    temperature: float | None = Field(None, ge=0, description="Divisor of the logits; 0: greedy decoding. Default: 1.")
    top_p: float | None = Field(None, ge=0, le=1)
    stream: bool | None = False
    stream_options: ResponseStreamOptions | None = None
    tools: Annotated[list[ResponseTool], Field(max_length=128)] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedResponseTool | None = None
    parallel_tool_calls: bool | None = True
    text: ResponseText | None = None
    include: list[Literal["message.output_text.logprobs"]] | None = Field(
        None, description="Whether to return the log-probabilities of the tokens."
    )
    top_logprobs: int | None = Field(None, ge=0, le=20)
    previous_response_id: str | None = Field(None, description="Not supported: send the earlier items as input.")
    store: bool | None = Field(None, description="Only false is supported, which is the default.")
    truncation: Literal["disabled"] | None = None
    background: Literal[False] | None = None
    metadata: dict[str, Any] | None = Field(None, description="Returned with the response.")
    user: str | None = Field(None, description=NO_EFFECT)
    safety_identifier: str | None = Field(None, description=NO_EFFECT)
    service_tier: str | None = Field(None, description=NO_EFFECT)
    prompt_cache_key: str | None = Field(None, description=NO_EFFECT)
    prompt_cache_retention: str | None = Field(None, description=NO_EFFECT)
