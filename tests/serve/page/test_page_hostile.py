"""Texts of a model that try to run scripts, load files or stop the browser: all are shown, none does anything."""

import pytest

pytestmark = pytest.mark.browser

SCRIPTS = [
    "<script>window.hacked = 1</script>",
    "<img src=x onerror='window.hacked = 1'>",
    "<svg onload=window.hacked=1></svg><iframe srcdoc='<script>parent.hacked = 1</script>'></iframe>",
    '<a href="javascript:window.hacked=1">press</a><style>body { display: none }</style><base href=//evil.example>',
    "<form action=//evil.example><button>Send</button></form><meta http-equiv=refresh content='0;url=//evil.example'>",
    "# <script>window.hacked = 1</script>\n\n- <b onclick=alert(1)>x</b>\n\n"
    "| <img src=//evil.example/a.png> |\n| --- |\n| <script>",
    "```html\n<script>window.hacked = 1</script>\n```",
    '```"><script>window.hacked=1</script>\nx\n```',
    "`<script>window.hacked = 1</script>`",
    "<think><script>window.hacked = 1</script></think>Done.",
    "![pixel](https://evil.example/pixel.png) ![x](data:image/svg+xml,<svg onload=alert(1)>)",
]
ADDRESSES = [
    "javascript:alert(1)",
    "JaVaScRiPt:alert(1)",
    " javascript:alert(1)",
    "java&#10;script:alert(1)",
    "\x01javascript:alert(1)",
    "data:text/html,<script>alert(1)</script>",
    "vbscript:msgbox(1)",
    "file:///etc/passwd",
    "blob:null/x",
    "//evil.example/",
    "/v1/models",
    "page/../../x",
    "#top",
    "http:",
    "https://",
    "&#106;avascript:alert(1)",
]
SAFE = [
    "https://example.org/a?b=(c)",
    "http://example.org",
    "mailto:a@example.org",
    "HTTPS://EXAMPLE.ORG/%22onclick=%22x",
]
BOMBS = {
    "quotes": ">" * 20_000,
    "lists": "\n".join("  " * depth + "- x" for depth in range(600)),
    "markers": "- " * 20_000 + "x",
    "emphasis": "*a **b " * 6_000 + "c** d*" * 6_000,
    "stars": "*" * 50_000,
    "closers": "a** b* " * 8_000,
    "strikes": "~~a _b " * 8_000,
    "brackets": "[" * 50_000 + "](" * 20_000,
    "links": "[a](b" * 10_000,
    "images": "![![" * 10_000,
    "titles": '[a](https://e.org "' * 5_000,
    "backticks": "".join("`" * (length % 60 + 1) + "x" for length in range(3_000)),
    "wide table": "|a" * 3_000 + "|\n" + "|-" * 3_000 + "|\n" + "|x\n" * 3_000,
    "table rows": "|a|b|\n|-|-|\n" + "|1|2|\n" * 3_000,
    "long line": "a" * 300_000,
    "long code": "```js\n" + "x = '" * 9_000 + "\n" + "/*" * 9_000,
    "spaces": "a" + " " * 100_000 + "b\n#" + " " * 50_000 + "#" + " #" * 20_000,
    "addresses": "https://a.b/" + "(" * 3_000 + ")." * 3_000,
    "entities": "&#x41;&bad;&#1114112;" * 5_000,
    "right to left": "\u202e\u2066\u200b\ufeff\0" * 2_000,
}
TREE = """root => {
  let deepest = 0, count = 0;
  for (const element of root.querySelectorAll('*')) {
    count += 1;
    let depth = 0;
    for (let one = element; one !== root; one = one.parentElement) depth += 1;
    deepest = Math.max(deepest, depth);
  }
  return { deepest, count };
}"""


@pytest.fixture
def page(open_page, canned):
    return open_page(canned.url)


def test_texts_of_scripts_are_shown_and_run_nothing(page, canned, ask):
    """`open_page` fails the test for a dialog, a violated policy or a request to another host."""
    for text in SCRIPTS:
        canned.answer = lambda body, text=text: [*text]
        message = ask(page, text)
        assert message.locator("script, img, iframe, form, style, base, meta, object, embed, b, [onclick]").count() == 0
        assert message.locator(".foot svg").count() == message.locator(".foot .icon").count()
        assert "hacked" not in text or "hacked" in message.locator(".body").text_content()
        assert page.locator(".bubble").last.text_content() == text
    page.reload()
    assert page.locator(".message.assistant").count() == len(SCRIPTS)
    assert page.evaluate("window.hacked") is None
    assert page.locator("#chats .chat").text_content() == SCRIPTS[0]
    assert page.title() == f"{SCRIPTS[0]} · Weft"


def test_only_web_and_mail_addresses_become_links(page, canned, ask):
    forms = ("[press]({0})", "![press]({0})", "<{0}>", "[press](<{0}>)", '[press]({0} "title")')
    unsafe = [form.format(address) for address in ADDRESSES for form in forms]
    canned.answer = lambda body: ["\n\n".join(unsafe)]
    message = ask(page, "unsafe")
    assert message.locator("a").count() == 0
    canned.answer = lambda body: ["\n\n".join(form.format(address) for address in SAFE for form in forms)]
    message = ask(page, "safe")
    links = message.locator("a")
    assert links.count() == len(SAFE) * len(forms)
    for link in links.all():
        assert link.get_attribute("href").startswith(("https://example.org/", "http://example.org/", "mailto:a@"))
        assert set(link.get_attribute("rel").split()) >= {"noopener", "noreferrer"}
        assert link.get_attribute("target") == "_blank"
        assert not link.get_attribute("onclick")


def test_bombs_are_shown_in_a_small_tree(page, canned, ask):
    """The number of elements is linear in the text, and their depth is bounded, while the text arrives and after it."""
    for name, text in BOMBS.items():
        size = len(text) // 30 + 1
        canned.answer = lambda body, text=text, size=size: [text[at : at + size] for at in range(0, len(text), size)]
        page.get_by_role("button", name="New chat").click()
        message = ask(page, name)
        tree = message.locator(".body").evaluate(TREE)
        assert tree["deepest"] <= 60, name
        assert tree["count"] <= len(text), name
        assert message.locator(".body").text_content(), name
    canned.answer = lambda body: ["Still here."]
    assert ask(page, "?").locator(".prose").last.text_content() == "Still here."


def test_a_name_of_a_model_is_text(open_page, canned, ask):
    canned.models = [{"id": "<img src=x onerror=alert(1)>", "parent": None}]
    page = open_page(canned.url)
    message = ask(page, "Hello")
    assert message.locator(".summary").text_content().startswith("<img src=x onerror=alert(1)> · ")
