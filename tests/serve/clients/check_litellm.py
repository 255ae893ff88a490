"""`litellm` through its provider for OpenAI-compatible servers."""

import litellm
import pytest


@pytest.fixture
def settings(server):
    return {
        "model": f"openai/{server.model}",
        "api_base": f"{server.url}/v1",
        "api_key": server.key,
        "messages": [{"role": "user", "content": "hello"}],
        "max_tokens": 12,
        "temperature": 0,
        "num_retries": 0,
    }


def test_an_answer_its_stream_and_usage(settings):
    whole = litellm.completion(**settings)
    chunks = list(litellm.completion(**settings, stream=True, stream_options={"include_usage": True}))
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == whole.choices[0].message.content
    used = [chunk.usage for chunk in chunks if getattr(chunk, "usage", None)]
    assert used[-1].completion_tokens == whole.usage.completion_tokens


def test_errors_have_their_classes(settings):
    with pytest.raises(litellm.NotFoundError):
        litellm.completion(**settings | {"model": "openai/none"})
    with pytest.raises(litellm.AuthenticationError):
        litellm.completion(**settings | {"api_key": "wrong"})
    with pytest.raises(litellm.ContextWindowExceededError):
        litellm.completion(**settings | {"messages": [{"role": "user", "content": "hello " * 3000}]})
