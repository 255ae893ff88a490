"""The chat page in Chromium against the real server, and against canned answers: ask, stop, answer again, edit."""

import itertools
import re

import pytest
from canned_server import error_response, running
from chat_model import SYSTEM, TURNS

import weft
from weft.data.conversations.template import ChatTemplate, find_template
from weft.generation.chat_format import ChatFormat
from weft.generation.text import stop_ids_of, tokenizer_of
from weft.serve.app import create_app
from weft.serve.served_model import ServedModel


@pytest.fixture
def expect(browser):
    from playwright.sync_api import expect

    return expect


def roles(body):
    return [message["role"] for message in body["messages"]]


def test_a_trained_model_answers_in_the_page(open_page, ask, expect, chat_model):
    """The answers are those that the model learned by heart, with the system prompt of the settings."""
    tokenizer = tokenizer_of(chat_model)
    chat = ChatFormat(ChatTemplate.for_tokenizer(find_template(chat_model), chat_model), tokenizer, "change them")
    engine = weft.Engine(weft.load_model(chat_model), tokenizer, stop_ids=stop_ids_of(chat_model))
    with running(create_app([ServedModel("tiny", engine, chat)])) as url:
        page = open_page(url)
        page.get_by_role("button", name="Settings").click()
        page.get_by_label("System prompt").fill(SYSTEM)
        page.get_by_label("Temperature").fill("0")
        page.keyboard.press("Enter")
        for question, answer in TURNS:
            shown = ask(page, question)
            assert shown.locator(".prose").last.inner_text().split() == answer.split()
            expect(shown.locator(".summary")).to_have_text(
                re.compile(r"^tiny · \d+ tokens · [\d.,]+ tokens/s · first after [\d.]+ s · complete$")
            )
        page.reload()
        expect(page.locator(".message.user .bubble")).to_have_text([question for question, _ in TURNS])
        expect(page.locator(".message.assistant .summary")).to_have_count(2)


@pytest.mark.browser
def test_an_answer_is_shown_while_it_arrives_and_can_be_stopped(open_page, ask, expect, canned):
    canned.answer, canned.pause = lambda body: itertools.repeat("word "), 0.01
    page = open_page(canned.url)
    message = ask(page, "Go on.", wait=False)
    expect(message.locator(".prose").last).to_contain_text("word word")
    expect(page.get_by_role("button", name="Send", exact=True)).to_be_hidden()
    page.keyboard.press("Escape")
    expect(message.locator(".summary")).to_have_text(re.compile("stopped by you$"))
    expect(page.get_by_role("button", name="Send", exact=True)).to_be_visible()
    kept = message.locator(".prose").last.inner_text()
    canned.answer = lambda body: ["Fine."]
    ask(page, "Why?")
    assert canned.left == 1
    assert roles(canned.bodies[-1]) == ["user", "assistant", "user"]
    assert canned.bodies[-1]["messages"][1]["content"].split() == kept.split()
    assert canned.bodies[-1]["stream_options"] == {"include_usage": True}


@pytest.mark.browser
def test_answers_again_keep_the_earlier_answer(open_page, ask, expect, canned):
    numbers = itertools.count(1)
    canned.answer = lambda body: [f"Answer {next(numbers)}"]
    page = open_page(canned.url)
    ask(page, "Which?")
    page.get_by_role("button", name="Answer again").click()
    message = page.locator(".message.assistant")
    expect(message).to_contain_text("Answer 2")
    expect(message.locator(".switcher")).to_contain_text("2/2")
    page.get_by_role("button", name="Previous answer").click()
    expect(message).to_contain_text("Answer 1")
    ask(page, "And?")
    assert [each["content"] for each in canned.bodies[-1]["messages"]] == ["Which?", "Answer 1", "And?"]
    page.reload()
    expect(page.locator(".message.assistant").first).to_contain_text("Answer 1")
    page.get_by_role("button", name="Next answer").click()
    expect(page.locator(".message")).to_have_count(2)
    expect(message).to_contain_text("Answer 2")


@pytest.mark.browser
def test_an_edited_message_is_a_new_branch(open_page, ask, expect, canned):
    canned.answer = lambda body: ["To: " + body["messages"][-1]["content"]]
    page = open_page(canned.url)
    ask(page, "one")
    ask(page, "two")
    page.get_by_role("button", name="Edit and send again").first.click()
    field = page.get_by_label("Edit the message")
    expect(field).to_have_value("one")
    field.fill("three")
    field.press("Enter")
    expect(page.locator(".message.assistant .prose").last).to_have_text("To: three")
    expect(page.locator(".message")).to_have_count(2)
    assert canned.bodies[-1]["messages"] == [{"role": "user", "content": "three"}]
    page.get_by_role("button", name="Previous message").click()
    expect(page.locator(".message.user .bubble")).to_have_text(["one", "two"])
    page.get_by_role("button", name="Edit and send again").last.click()
    page.keyboard.press("Escape")
    expect(page.locator(".message.user .bubble")).to_have_text(["one", "two"])
    assert len(canned.bodies) == 3


@pytest.mark.browser
def test_settings_and_model_are_those_of_the_request(open_page, ask, expect, canned):
    page = open_page(canned.url)
    ask(page, "First.")
    assert set(canned.bodies[-1]) == {"model", "messages", "stream", "stream_options"}
    assert canned.bodies[-1]["model"] == "base"
    page.get_by_label("Model").select_option(label="base + poet")
    page.get_by_role("button", name="Settings").click()
    page.get_by_label("Top p").fill("7")
    expect(page.locator("#top_p-problem")).to_have_text("Give a number from 0 to 1")
    for name, value in (("Top p", "0.9"), ("Temperature", "0.5"), ("Maximum tokens", "12"), ("Seed", "3")):
        page.get_by_label(name, exact=True).fill(value)
    page.get_by_label("System prompt").fill("Be brief.")
    page.get_by_role("button", name="Done").click()
    ask(page, "Second.")
    wanted = {"model": "poet", "top_p": 0.9, "temperature": 0.5, "max_tokens": 12, "seed": 3}
    assert canned.bodies[-1].items() >= wanted.items()
    assert roles(canned.bodies[-1]) == ["system", "user", "assistant", "user"]
    assert canned.bodies[-1]["messages"][0]["content"] == "Be brief."
    page.reload()
    expect(page.get_by_label("Model")).to_have_value("poet")
    canned.models = canned.models[:1]
    page.reload()
    expect(page.get_by_role("alert")).to_contain_text("poet is not served any more. base will answer.")


@pytest.mark.browser
def test_a_key_is_asked_for_and_kept_for_the_tab(open_page, ask, expect, canned):
    canned.key = "secret"
    page = open_page(canned.url)
    for given in ("wrong", "secret"):
        expect(page.locator("#key")).to_be_visible()
        expect(page.locator("#key-reason")).to_have_text("This server needs an API key.")
        page.get_by_label("Key", exact=True).fill(given)
        page.keyboard.press("Enter")
    ask(page, "Hello")
    assert canned.headers[-1]["authorization"] == "Bearer secret"
    page.reload()
    expect(page.get_by_label("Model")).to_be_enabled()
    assert "secret" not in page.evaluate("JSON.stringify(localStorage)")
    canned.key = "another"
    answer = ask(page, "Hello again", wait=False)
    page.get_by_label("Key", exact=True).fill("another")
    page.get_by_role("button", name="Use this key").click()
    expect(answer.locator(".prose").last).to_have_text("Sure: hello.")
    expect(page.locator(".switcher")).to_have_count(0)


@pytest.mark.browser
def test_errors_are_shown_in_words_and_can_be_tried_again(open_page, ask, expect, canned):
    refused = error_response(429, "256 texts wait already; try again later", "queue_full", **{"Retry-After": "2"})
    broken = {"error": {"message": "the engine failed", "type": "server_error", "code": "engine_failed", "param": None}}
    outcomes = iter([refused, ["Half an ", broken], ["Whole."]])
    canned.answer = lambda body: next(outcomes)
    page = open_page(canned.url)
    message = ask(page, "Hello")
    expect(message.locator(".problem")).to_contain_text("256 texts wait already; try again later. Wait 2 seconds.")
    page.get_by_role("button", name="Try again").click()
    expect(page.locator(".message.assistant .problem")).to_contain_text("The engine failed.")
    expect(page.locator(".message.assistant .prose").last).to_have_text("Half an")
    page.reload()
    expect(page.locator(".message.assistant .problem")).to_contain_text("The engine failed.")
    page.get_by_role("button", name="Try again").click()
    expect(page.locator(".message.assistant .prose").last).to_have_text("Whole.")
    expect(page.locator(".switcher")).to_contain_text("2/2")
    assert [roles(body) for body in canned.bodies] == [["user"]] * 3


@pytest.mark.browser
def test_a_server_that_is_gone_is_reported(open_page, ask, expect, canned):
    page = open_page(canned.url)
    page.route("**/v1/**", lambda route: route.abort())
    message = ask(page, "Hello")
    expect(message.locator(".problem")).to_contain_text("The server does not answer.")
    page.unroute("**/v1/**")
    page.route("**/v1/chat/*", lambda route: route.fulfill(content_type="text/event-stream", body="data: {}\n\n"))
    page.get_by_role("button", name="Try again").click()
    expect(page.locator(".problem").last).to_contain_text("The connection ended before the answer was complete.")
    page.route("**/v1/chat/*", lambda route: route.fulfill(status=502, body="<h1>Bad gateway</h1>"))
    page.get_by_role("button", name="Try again").click()
    expect(page.locator(".problem").last).to_contain_text("The server answered with status 502")
    page.unroute("**/v1/chat/*")
    page.get_by_role("button", name="Try again").click()
    expect(page.locator(".message.assistant .prose").last).to_have_text("Sure: hello.")
