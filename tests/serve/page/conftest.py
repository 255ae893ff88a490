"""Chromium, and pages that fail a test where a script, the content security policy or another host is involved."""

import shutil

import pytest
from canned_server import CannedServer, running

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


# Not of the session: while Playwright runs, other modules' tests on the same worker cannot use `asyncio.run`.
@pytest.fixture(scope="module")
def browser():
    """Headless Chromium."""
    if CHROMIUM is None:
        pytest.skip("no Chromium is installed (apt-get install chromium)")
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        started = playwright.chromium.launch(executable_path=CHROMIUM)
        yield started
        started.close()


@pytest.fixture
def canned():
    """A `CannedServer` that runs."""
    server = CannedServer()
    with running(server.application()) as url:
        server.url = url
        yield server


@pytest.fixture
def open_page(browser):
    """Opens the page: `open_page(url, **options of a browser context)`.

    After the test, no page may have run a foreign script, opened a dialog, broken its policy or asked another host.
    """
    contexts, problems = [], []

    def watch(page, url):
        page.on("pageerror", lambda error: problems.append(f"error: {error}"))
        page.on("dialog", lambda dialog: (problems.append(f"dialog: {dialog.message}"), dialog.dismiss()))
        page.on("popup", lambda popup: problems.append(f"popup: {popup.url}"))
        page.on("request", lambda made: made.url.startswith((url, "data:")) or problems.append(f"asked {made.url}"))
        page.on("console", lambda line: "Content Security Policy" in line.text and problems.append(line.text))
        page.on("console", lambda line: "Trusted" in line.text and problems.append(line.text))

    def start(url, context=None, **options):
        if context is None:
            context = browser.new_context(**{"viewport": {"width": 1100, "height": 800}, **options})
            contexts.append(context)
        page = context.new_page()
        page.set_default_timeout(10_000)
        watch(page, url)
        page.goto(url)
        page.locator("#model:enabled, dialog[open], #notice:not([hidden])").first.wait_for()
        return page

    yield start
    for context in contexts:
        context.close()
    assert problems == []


@pytest.fixture
def ask():
    """Sends a message and waits for the end of its answer: `ask(page, text) -> the last message of the page`."""

    def send(page, text, wait=True):
        answers = page.locator(".message.assistant").count()
        page.locator("#input").fill(text)
        page.locator("#input").press("Enter")
        page.locator(".message.assistant").nth(answers).wait_for(state="attached")
        if wait:
            page.locator('[aria-busy="true"]').wait_for(state="detached")
        return page.locator(".message").last

    return send
