"""What tests of the server share: the tiny chat model behind an application, in this process."""

import asyncio
from contextlib import asynccontextmanager
from functools import cache

import httpx
import pytest
import served_tools
from chat_model import make_chat_model

import weft
from weft.data.conversations.template import ChatTemplate, find_template
from weft.generation.chat_format import ChatFormat
from weft.generation.text import stop_ids_of, tokenizer_of
from weft.serve.app import create_app
from weft.serve.served_model import ServedModel
from weft.serve.services import Settings


@cache
def loaded(folder):
    """(module, tokenizer, chat format) of a model."""
    tokenizer, template = tokenizer_of(folder), ChatTemplate.for_tokenizer(find_template(folder), folder)
    return weft.load_model(folder), tokenizer, ChatFormat(template, tokenizer, "change them")


@pytest.fixture(scope="session")
def tools_model(tiny_tokenizer, tmp_path_factory):
    """The folder of a tiny model that learned a conversation with tool calls by heart (`served_tools.py`)."""
    messages = [served_tools.USER, served_tools.CALLING, served_tools.RESULT, served_tools.ANSWER]
    folder = tmp_path_factory.mktemp("tools") / "model"
    return make_chat_model(tiny_tokenizer, folder, served_tools.TEMPLATE, messages, served_tools.TOOLS)


@pytest.fixture
def serve(chat_model):
    """Runs a test against an application: `serve(test, settings={...}, **engine options)`.

    `test(client)` is a coroutine. `client.models` are the served models, of the names in `names`, from `folder`.
    """

    @asynccontextmanager
    async def application(folder, settings, names, max_waiting, options):
        model, tokenizer, chat = loaded(folder)
        made = []
        for name in names:
            engine = weft.Engine(model, tokenizer, stop_ids=stop_ids_of(folder), **options)
            made.append(ServedModel(name, engine, chat, max_waiting=max_waiting))
        app = create_app(made, Settings(**settings))
        async with (
            app.router.lifespan_context(app),
            httpx.AsyncClient(
                transport=httpx.ASGITransport(app, raise_app_exceptions=False), base_url="http://127.0.0.1", timeout=60
            ) as client,
        ):
            client.models = made
            yield client

    def run(test, *, folder=chat_model, settings=None, names=("tiny",), max_waiting=256, **options):
        async def main():
            async with application(folder, settings or {}, names, max_waiting, options) as client:
                return await asyncio.wait_for(test(client), 60)

        return asyncio.run(main())

    return run
