"""Bodies of requests, as the OpenAPI document describes them. A body with an unknown key is refused."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from weft.serve.errors import ApiError

NO_EFFECT = "Accepted without effect."
EXTENSION = "Not in OpenAI's API."
MOST_SEED = 2**63 - 1


class Section(BaseModel):
    """A JSON object with known keys. A text is no number, and a number is no text."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False, protected_namespaces=())


Prompts = str | list[str] | list[int] | list[list[int]]


def list_of_prompts(given: Prompts, param: str) -> list[Any]:
    """Returns the texts or lists of ids of a request. Raises ApiError if there are none."""
    single = isinstance(given, str) or (given and isinstance(given[0], int))
    many: Any = [given] if single else given
    if not many:
        raise ApiError(400, "invalid_value", f"{param} is an empty list; give at least one text", param)
    return many


class StreamOptions(Section):
    include_usage: bool | None = Field(False, description="Whether a last event reports the numbers of tokens.")
    include_obfuscation: bool | None = Field(None, description=NO_EFFECT)


class SamplingRequest(Section):
    """The keys that completions and chat completions share."""

    model: str | None = Field(None, description="Name of a model or of an adapter; default: the first model.")
    max_tokens: int | None = Field(None, ge=1, description="Maximum number of new tokens per choice.")
    temperature: float | None = Field(None, ge=0, description="Divisor of the logits; 0: greedy decoding. Default: 1.")
    top_p: float | None = Field(None, ge=0, le=1, description="Draw from the most likely tokens of this probability.")
    n: int | None = Field(None, ge=1, description="Number of choices per prompt.")
    stop: str | Annotated[list[str], Field(max_length=16)] | None = Field(
        None, description="Texts that end a choice and are not part of it."
    )
    seed: int | None = Field(
        None, ge=-MOST_SEED, le=MOST_SEED, description="Seed of the random numbers; default: another for each request."
    )
    presence_penalty: float | None = Field(None, ge=-2, le=2)
    frequency_penalty: float | None = Field(None, ge=-2, le=2)
    logit_bias: (
        dict[Annotated[str, Field(pattern=r"^[0-9]{1,9}$")], Annotated[float, Field(ge=-100, le=100)]] | None
    ) = Field(None, description="Token id -> amount added to the token's logit; -100 forbids the token.")
    stream: bool | None = Field(False, description="Whether to answer with server-sent events.")
    stream_options: StreamOptions | None = None
    top_k: int | None = Field(
        None, ge=-1, description=f"Draw from this number of most likely tokens; 0 or -1: from all. {EXTENSION}"
    )
    min_p: float | None = Field(
        None, ge=0, le=1, description=f"Least probability of a token relative to the most likely token's. {EXTENSION}"
    )
    repetition_penalty: float | None = Field(
        None, gt=0, description=f"Divisor of the positive logits of earlier tokens. {EXTENSION}"
    )
    ignore_eos: bool | None = Field(
        False, description=f"Whether choices go on after a token that ends texts. {EXTENSION}"
    )
    user: str | None = Field(None, description=NO_EFFECT)
    safety_identifier: str | None = Field(None, description=NO_EFFECT)
    metadata: dict[str, Any] | None = Field(None, description=NO_EFFECT)
    service_tier: str | None = Field(None, description=NO_EFFECT)
    store: bool | None = Field(None, description=NO_EFFECT)
    prompt_cache_key: str | None = Field(None, description=NO_EFFECT)
    prompt_cache_retention: str | None = Field(None, description=NO_EFFECT)


class CompletionRequest(SamplingRequest):
    """A request of `/v1/completions`."""

    prompt: Prompts = Field(
        description="A text or the ids of its tokens; or several of them, each of which has `n` choices."
    )
    max_tokens: int | None = Field(
        None, ge=0, description="Maximum number of new tokens per choice; default: 16. 0: only the prompt (`echo`)."
    )
    echo: bool | None = Field(
        False, description="Whether a choice begins with the prompt: its text, and its tokens in `logprobs`."
    )
    logprobs: int | None = Field(
        None, ge=0, le=20, description="Number of most likely tokens whose log-probabilities are returned."
    )
    best_of: int | None = Field(None, ge=1, description="Only the value of `n` is supported.")
    suffix: Literal[""] | None = Field(None, description="Only an empty text is supported.")
    add_special_tokens: bool | None = Field(
        True, description=f"Whether tokens such as `<s>`, which the tokenizer adds to texts, begin prompts. {EXTENSION}"
    )


class Function(Section):
    """A function that a model can call."""

    name: str = Field(pattern=r"^[a-zA-Z0-9_.-]{1,64}$")
    description: str | None = None
    parameters: dict[str, Any] | None = Field(None, description="JSON schema of the arguments, an object.")
    strict: bool | None = Field(
        None, description="Arguments follow the schema exactly where tool_choice requires a call; otherwise no effect."
    )


class Tool(Section):
    type: Literal["function"]
    function: Function


class FunctionName(Section):
    name: str


class NamedTool(Section):
    """The choice of one tool."""

    type: Literal["function"]
    function: FunctionName


class TextFormat(Section):
    type: Literal["text"]

    @property
    def wanted_schema(self) -> Any:
        return None


class JsonObjectFormat(Section):
    type: Literal["json_object"]

    @property
    def wanted_schema(self) -> Any:
        return {"type": "object"}


class NamedSchema(Section):
    """A JSON schema, which is always enforced, also without `strict`."""

    name: str = Field(pattern=r"^[a-zA-Z0-9_-]{1,64}$")
    description: str | None = None
    schema_: dict[str, Any] | bool = Field(True, alias="schema")
    strict: bool | None = None


class JsonSchemaFormat(Section):
    type: Literal["json_schema"]
    json_schema: NamedSchema

    @property
    def wanted_schema(self) -> Any:
        return self.json_schema.schema_


ResponseFormat = Annotated[TextFormat | JsonObjectFormat | JsonSchemaFormat, Field(discriminator="type")]


class CalledFunction(Section):
    name: str
    arguments: str | dict[str, Any] | None = Field(None, description="The arguments, an object or its JSON text.")


class MessageCall(Section):
    """A tool call of an earlier answer."""

    index: int | None = Field(None, description=NO_EFFECT)
    id: str | None = None
    type: Literal["function"] = "function"
    function: CalledFunction


class TextPart(Section):
    """A part of a message's text."""

    type: Literal["text"]
    text: str
    annotations: list[Any] | None = Field(None, description=NO_EFFECT)
    cache_control: dict[str, Any] | None = Field(None, description=NO_EFFECT)
    prompt_cache_breakpoint: dict[str, Any] | None = Field(None, description=NO_EFFECT)


class Message(BaseModel):
    """A message of a conversation. Further keys must be keys that the chat template uses, or null."""

    model_config = ConfigDict(extra="allow", strict=True, allow_inf_nan=False)

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[TextPart] | None = Field(None, description="A text, or parts of a text.")
    tool_calls: list[MessageCall] | None = Field(None, description="Tools that the assistant called in this message.")
    tool_call_id: str | None = Field(None, description="The call that a message of the role tool answers.")


class ChatRequest(SamplingRequest):
    """A request of `/v1/chat/completions`."""

    messages: list[Message] = Field(min_length=1)
    max_completion_tokens: int | None = Field(
        None, ge=1, description="Maximum number of new tokens per choice; replaces `max_tokens`."
    )
    logprobs: bool | None = Field(False, description="Whether to return the log-probabilities of the new tokens.")
    top_logprobs: int | None = Field(
        None, ge=0, le=20, description="Number of most likely tokens whose log-probabilities are returned."
    )
    tools: Annotated[list[Tool], Field(max_length=128)] | None = Field(
        None, description="Functions that the model can call."
    )
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = Field(
        None,
        description="Whether the model must call a tool, and which. With `none`, the model does not see the tools.",
    )
    parallel_tool_calls: bool | None = Field(True, description="Whether a required answer can have several calls.")
    response_format: ResponseFormat | None = Field(None, description="The form of the answer, which is enforced.")
    chat_template_kwargs: dict[str, Any] | None = Field(
        None, description=f"Variables of the chat template. {EXTENSION}"
    )
    modalities: list[Literal["text"]] | None = None


class EmbeddingRequest(Section):
    """A request of `/v1/embeddings`."""

    model: str | None = Field(None, description="Name of a model or of an adapter; default: the first model.")
    input: str | Annotated[list[str], Field(max_length=2048)] | list[int] | list[list[int]] = Field(
        description="A text or the ids of its tokens; or several of them."
    )
    encoding_format: Literal["float", "base64"] | None = Field(
        "float", description="Numbers, or their bytes (little-endian float32) in base64."
    )
    dimensions: int | None = Field(None, ge=1, description="Only the model's hidden size is supported.")
    pooling: Literal["mean", "last"] | None = Field(
        "mean", description=f"The mean of the hidden states of all tokens, or that of the last token. {EXTENSION}"
    )
    user: str | None = Field(None, description=NO_EFFECT)


class TokenizeRequest(Section):
    """A request of `/tokenize`: a text, or messages of a chat."""

    model: str | None = None
    prompt: str | None = None
    add_special_tokens: bool | None = Field(
        True, description="Whether to include tokens such as `<s>`, which the tokenizer adds to texts."
    )
    messages: list[Message] | None = Field(None, min_length=1)
    tools: list[Tool] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = Field(
        True, description="Whether the prompt ends with the beginning of an answer."
    )
    return_token_strs: bool | None = Field(False, description="Whether to return the text of each token.")


class DetokenizeRequest(Section):
    """A request of `/detokenize`."""

    model: str | None = None
    tokens: list[Annotated[int, Field(ge=0)]]


class LoadAdapterRequest(Section):
    """A request of `/v1/load_lora_adapter`."""

    lora_name: str = Field(pattern=r"^[\w./:-]{1,128}$", description="Name of the adapter in requests.")
    lora_path: str = Field(min_length=1, description="Folder of the adapter, in the server's folder of adapters.")
    base_model_name: str | None = Field(None, description="The model to add it to, if several are served.")


class UnloadAdapterRequest(Section):
    """A request of `/v1/unload_lora_adapter`."""

    lora_name: str
    lora_int_id: int | None = Field(None, description=NO_EFFECT)
