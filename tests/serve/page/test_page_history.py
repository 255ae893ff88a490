"""Chats in the browser's storage, and the page with the keyboard alone, with a screen reader and on a phone."""

import itertools
import json
import re

import pytest

pytestmark = pytest.mark.browser


@pytest.fixture
def expect(browser):
    from playwright.sync_api import expect

    return expect


def titles(page):
    return page.locator("#chats .chat")


def test_chats_are_kept_renamed_searched_and_deleted(open_page, ask, expect, canned):
    page = open_page(canned.url)
    for text in ("apples", "pears and plums"):
        page.get_by_role("button", name="New chat").click()
        ask(page, text)
    expect(titles(page)).to_have_text(["pears and plums", "apples"])
    page.reload()
    expect(page.locator(".bubble")).to_have_text("pears and plums")
    titles(page).nth(1).click()
    expect(page.locator(".bubble")).to_have_text("apples")
    page.get_by_role("button", name="Rename apples").click()
    page.get_by_label("Title of the chat").fill("Fruit")
    page.keyboard.press("Enter")
    expect(page).to_have_title("Fruit · Weft")
    page.get_by_label("Search chats").fill("PLUMS")
    expect(titles(page)).to_have_text(["pears and plums"])
    page.get_by_label("Search chats").fill("")
    titles(page).first.hover()
    page.get_by_role("button", name="Delete pears and plums").click()
    page.get_by_role("button", name="Cancel").click()
    expect(titles(page)).to_have_count(2)
    page.get_by_role("button", name="Delete pears and plums").click()
    page.get_by_role("button", name="Delete", exact=True).click()
    expect(titles(page)).to_have_text(["Fruit"])
    page.reload()
    expect(titles(page)).to_have_text(["Fruit"])
    ask(page, "more")
    assert [message["content"] for message in canned.bodies[-1]["messages"]] == ["apples", "Sure: *hello*.", "more"]
    page.get_by_role("button", name="Settings").click()
    page.get_by_role("button", name="Delete all chats").click()
    page.get_by_role("button", name="Delete all", exact=True).click()
    expect(titles(page)).to_have_count(0)
    assert "weft.chat." not in page.evaluate("Object.keys(localStorage).join()")


def test_an_answer_goes_on_while_another_chat_is_open_and_is_kept_when_the_page_closes(open_page, ask, expect, canned):
    canned.answer, canned.pause = lambda body: (f"w{number} " for number in itertools.count()), 0.01
    page = open_page(canned.url)
    ask(page, "long", wait=False)
    page.get_by_role("button", name="New chat").click()
    expect(page.locator("#chats li.answering")).to_have_count(1)
    expect(page.locator(".message")).to_have_count(0)
    titles(page).first.click()
    expect(page.locator(".message.assistant.running")).to_contain_text("w60")
    page.reload()
    expect(page.locator(".summary")).to_have_text(re.compile("interrupted: the page was closed or reloaded$"))
    expect(page.locator(".message.assistant")).to_contain_text("w0 w1 w2")
    expect(page.get_by_role("button", name="Answer again")).to_be_enabled()


def test_two_tabs_see_each_others_chats(open_page, ask, expect, canned):
    first = open_page(canned.url)
    second = open_page(canned.url, context=first.context)
    ask(first, "from the first")
    expect(titles(second)).to_have_text("from the first")
    titles(second).click()
    ask(second, "from the second")
    expect(first.locator(".bubble")).to_have_text(["from the first", "from the second"])


def test_damaged_and_full_storage_is_reported(open_page, ask, expect, canned):
    page = open_page(canned.url)
    ask(page, "kept")
    loop = [
        {"id": "a", "parent": "b", "role": "user", "content": ""},
        {"id": "b", "parent": "a", "role": "user", "content": ""},
    ]
    damaged = ["{", "null", json.dumps({"id": "x", "settings": {}, "messages": loop, "leaf": "a"})]
    for number, text in enumerate(damaged):
        page.evaluate("([name, text]) => localStorage.setItem(name, text)", [f"weft.chat.bad{number}", text])
    page.reload()
    expect(page.get_by_role("alert")).to_contain_text("3 chat(s) in the browser's storage cannot be read.")
    expect(titles(page)).to_have_text(["kept"])
    page.evaluate("""() => {
      let size = 2 ** 22;
      while (size > 8) {
        try { localStorage.setItem(`filler${size}`, 'x'.repeat(size)); } catch { /* too much */ }
        size = Math.floor(size / 2);
      }
    }""")
    answer = ask(page, "too much " * 50)
    expect(answer.locator(".prose").last).to_have_text("Sure: hello.")
    expect(page.get_by_role("alert")).to_contain_text(
        "the browser's storage is full; delete chats that you do not need."
    )


def test_the_keyboard_alone_is_enough(open_page, expect, canned):
    canned.pause = 0.02
    canned.answer = lambda body: (
        ["a "] * 500 if len(canned.bodies) == 1 else ["Done: ", body["messages"][-1]["content"]]
    )
    page = open_page(canned.url)
    press, type_text = page.keyboard.press, page.keyboard.type

    def focused():
        return page.evaluate("document.activeElement.getAttribute('aria-label') ?? document.activeElement.id")

    assert focused() == "Message"
    type_text("one")
    press("Shift+Enter")
    type_text("two")
    press("Enter")
    expect(page.locator(".message.running .prose").last).to_contain_text("a a")
    press("Escape")
    expect(page.locator(".summary")).to_contain_text("stopped by you")
    assert canned.bodies[-1]["messages"][-1]["content"] == "one\ntwo"
    press("ArrowUp")
    assert focused() == "Edit the message"
    type_text(" three")
    press("Enter")
    expect(page.locator(".message.assistant .prose").last).to_have_text("Done: one\ntwo three", use_inner_text=True)
    press("Control+/")
    expect(page.get_by_role("dialog", name="Keyboard shortcuts")).to_be_visible()
    press("Escape")
    press("Control+Shift+L")
    expect(page.locator(".message.assistant .switcher")).to_contain_text("2/2")
    press("Control+Shift+O")
    expect(page.locator(".message")).to_have_count(0)
    assert focused() == "Message"
    seen = []
    for _ in range(20):
        press("Tab")
        seen.append(focused())
    wanted = ["new-chat", "Dark colors", "Chats", "model", "Settings", "Message"]
    assert [name for name in dict.fromkeys(seen) if name in wanted] == wanted


def test_a_screen_reader_hears_of_answers_and_finds_names(open_page, ask, expect, canned):
    page = open_page(canned.url)
    ask(page, "Hello")
    status = page.get_by_role("status")
    expect(status).to_have_text("Answer: Sure: *hello*.")
    assert status.get_attribute("aria-live") == "polite"
    expect(page.get_by_role("heading", name="Answer of base")).to_have_count(1)
    unnamed = """() => [...document.querySelectorAll('button, input, select, textarea, a')].filter((one) =>
      !(one.getAttribute('aria-label') || one.textContent.trim() || one.labels?.length)).map((one) => one.outerHTML)"""
    assert page.evaluate(unnamed) == []
    ids = "() => [...document.querySelectorAll('[id]')].map((one) => one.id)"
    found = page.evaluate(ids)
    assert len(found) == len(set(found))


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_colors_follow_the_system_and_can_be_changed(open_page, expect, canned, scheme):
    page = open_page(canned.url, color_scheme=scheme)
    color = "getComputedStyle(document.body).backgroundColor"
    brightness = f"() => {color}.match(/\\d+/g).reduce((sum, one) => sum + Number(one), 0)"
    assert (page.evaluate(brightness) > 600) == (scheme == "light")
    page.locator("#theme").click()
    assert (page.evaluate(brightness) > 600) == (scheme == "dark")
    page.reload()
    assert (page.evaluate(brightness) > 600) == (scheme == "dark")


def test_the_page_fits_a_phone(open_page, ask, expect, canned):
    text = (
        "# Long\n\n"
        + "a" * 200
        + "\n\n```python\n"
        + "x = 1; " * 40
        + "\n```\n\n|a|b|\n|-|-|\n|"
        + "wide " * 20
        + f"|{'b' * 90}|"
    )
    canned.answer = lambda body: [text]
    page = open_page(canned.url, viewport={"width": 360, "height": 640}, has_touch=True, is_mobile=True)
    expect(page.locator("#sidebar")).to_be_hidden()
    page.get_by_label("Message", exact=True).fill("b" * 300)
    page.get_by_label("Message", exact=True).press("Enter")  # a new line on a phone
    page.get_by_role("button", name="Send", exact=True).tap()
    expect(page.locator(".summary")).to_be_visible()
    assert canned.bodies[-1]["messages"][0]["content"] == "b" * 300 + "\n"
    assert page.evaluate("document.documentElement.scrollWidth") == 360
    assert page.locator("#log").evaluate("log => log.scrollWidth - log.clientWidth") <= 0
    page.get_by_role("button", name="Chats", exact=True).tap()
    expect(titles(page)).to_be_visible()
    assert page.locator("main").evaluate("main => main.inert")
    page.keyboard.press("Escape")
    expect(page.locator("#sidebar")).to_be_hidden()
    page.get_by_role("button", name="Settings").tap()
    box = page.get_by_role("dialog", name="Settings").bounding_box()
    assert box["x"] >= 0
    assert box["x"] + box["width"] <= 360
    for target in page.locator("header button, .tools button, #composer button:visible").all():
        size = target.bounding_box()
        assert min(size["width"], size["height"]) >= 24  # WCAG 2.2, target size
