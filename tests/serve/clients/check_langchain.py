"""`langchain-openai`: invoke, stream, batch, tools and structured output."""

import pytest
from langchain_core.messages import HumanMessage, SystemMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI, OpenAIEmbeddings
from pydantic import BaseModel, Field


@tool
def add(a: int, b: int) -> int:
    """Adds two numbers."""
    return a + b


class Person(BaseModel):
    """A person."""

    name: str = Field(max_length=8)
    age: int = Field(ge=0, le=99)


@pytest.fixture(scope="session")
def chat(server):
    address = {"base_url": f"{server.url}/v1", "api_key": server.key}
    return ChatOpenAI(model=server.model, max_tokens=120, temperature=0, max_retries=0, timeout=60, **address)


def test_invoke_stream_and_batch_agree(chat):
    messages = [SystemMessage("Be short."), HumanMessage("hello")]
    answer = chat.bind(max_tokens=12).invoke(messages)
    assert answer.usage_metadata["output_tokens"] >= 1
    pieces = list(chat.bind(max_tokens=12).stream(messages))
    assert "".join(piece.content for piece in pieces) == answer.content
    others = chat.bind(max_tokens=12).batch([messages, [HumanMessage("hello")], messages])
    assert others[0].content == others[2].content == answer.content


def test_tools(chat):
    bound = chat.bind_tools([add], tool_choice="any")
    question = HumanMessage("What is 2 + 3?")
    call = bound.invoke([question])
    assert call.tool_calls[0]["name"] == "add"
    assert set(call.tool_calls[0]["args"]) == {"a", "b"}
    merged = None
    for piece in bound.stream([question]):
        merged = piece if merged is None else merged + piece
    assert merged.tool_calls[0]["args"] == call.tool_calls[0]["args"]
    result = ToolMessage("5", tool_call_id=call.tool_calls[0]["id"])
    chat.bind(max_tokens=8).invoke([question, call, result])


@pytest.mark.parametrize("method", ["json_schema", "function_calling"])
def test_structured_output(chat, method):
    person = chat.with_structured_output(Person, method=method).invoke("Name a person.")
    assert isinstance(person, Person)
    assert 0 <= person.age <= 99


def test_embeddings(server):
    made = OpenAIEmbeddings(
        model=server.model, base_url=f"{server.url}/v1", api_key=server.key, check_embedding_ctx_length=False
    )
    assert len(made.embed_documents(["hello", "good morning"])) == 2
