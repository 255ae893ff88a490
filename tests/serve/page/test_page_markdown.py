"""Markdown of the page compared with markdown-it-py, and texts that arrive piece by piece with the full text."""

import random
from html.parser import HTMLParser

import pytest
from markdown_it import MarkdownIt

pytestmark = pytest.mark.browser

TEXTS = [
    "# One\n\nTwo *three* **four** ***five*** _six_ __seven__ `eight` ~~nine~~\nten  \neleven\\\ntwelve",
    "## A `b` **c** ##\n### D\n#### E #f\n##### G\n###### H\n####### not\n#hash",
    "- a\n- b\n  - c\n    - d\n- e\n\n  f\n- g",
    "1. a\n2. b\n   1. c\n\n      d\n3. e",
    "7) a\n8) b\n\n- x\n* y\n+ z",
    "- a\n\n\n- b\n\nc",
    "- ```python\n  x = 1\n\n    y\n  ```\n- > q\n  > r\n-   wide\n\n    still",
    "> a\n> b\n>\n> > c\n>\n> - d\n> - e\n\nf",
    "| a | b | c |\n|:--|:-:|--:|\n| 1 | *2* | `3` |\n| x \\| y | 6 | 7 | 8 |\n\nafter",
    "a | b\n--- | ---\n1 | 2",
    "not | a table\nat all",
    "```\ncode <b>&amp;\n\n  *no*\n```\ntext\n~~~~js\na\n~~~\nb\n~~~~",
    "```python\nnever closed\n\n    x",
    "   ```\n   three\n     five\n  ```",
    "---\n\n***\n\n_ _ _\n\n--\n\n- - -",
    "[a](https://e.org/) [b *c*](<https://e.org/x y> 'title') [d](https://e.org/(e)) [f] (g)",
    "[[a](https://e.org/)](//f.org) *[a*](https://e.org/) [a`](https://e.org/)` <https://e.org/x?y=1&z>",
    "\\*no\\* \\`no\\` \\[no](x) \\\\ \\a &amp; &lt;b&gt; &#65; &#x42; &unknown; <b>html</b>",
    "_a_b *a _b* c_ **a *b** c*",
    'foo_bar_baz _a_b _a b_ *a*b **a**b a*"b"*c 2*3*4 ** a ** *a _b* c_ **a *b** c* *** a',
    "``a`b`` ` c ` `` `d` `` `e\nf` `g ``h`",
    "***a** b* ***a* b** **a*b*c** *a**b**c* ****a**** _*a*_ *a **b***",
    "日本**語。**です **日本。**語 «*a*» 😀*a*😀",
    "a\n- b\nc\n1. d\n\n2. e\n\ntext\n2. not a list",
    "-\n- a\n-\n\n  b\n\n* \n\n1.\n2. x",
    "a\tb\n\n- c\n\n\tafter a tab\n\n  ```\n  \ttab\n  ```",
    "",
]
SYMBOLS = [
    *"*_`~[]()<>!#|-+>\\ \n\n",
    "**",
    "- ",
    "1. ",
    "> ",
    "```\n",
    "| ",
    "\n\n",
    "\n  ",
    "https",
    "a",
    "b",
    "c. ",
    "é",
]
RENDER = """async texts => {
  const { MarkdownView } = await import('/page/markdown.js');
  return texts.map((text) => {
    const view = new MarkdownView();
    view.update(text);
    return view.element.innerHTML;
  });
}"""
PIECES = """async texts => {
  const { MarkdownView } = await import('/page/markdown.js');
  return texts.map((text) => {
    const view = new MarkdownView();
    for (let end = 0; end < text.length; end += 1) view.update(text.slice(0, end), true);
    view.update(text);
    return view.element.innerHTML;
  });
}"""


@pytest.fixture
def render(open_page, canned):
    page = open_page(canned.url)
    return lambda texts, script=RENDER: page.evaluate(script, texts)


RENAMED = {f"h{level}": "h6" if level > 3 else f"h{level + 2}" for level in range(1, 7)}


class Tree(HTMLParser):
    """The tree of elements and texts, in one form for both renderers."""

    VOID = ("br", "hr", "input")

    def __init__(self, renamed):
        super().__init__()
        self.found, self.renamed, self.skipped = [], renamed, []

    def handle_starttag(self, tag, attributes):
        values = dict(attributes)
        tag = self.renamed.get(tag, tag)
        if self.skipped or values.get("class") == "code-head":
            self.skipped += [] if tag in self.VOID else [tag]
            return
        if tag in ("div", "span"):
            return
        kept = [values[name] for name in ("href", "start", "src") if name in values]
        align = (
            next((word for word in ("center", "right", "left") if word in str(values)), "")
            if tag in ("td", "th")
            else ""
        )
        self.found.append((tag, *kept, align))

    def handle_endtag(self, tag):
        tag = self.renamed.get(tag, tag)
        if self.skipped:
            assert self.skipped.pop() == tag
        elif tag not in ("div", "span") and tag not in self.VOID:
            self.found.append(f"/{tag}")

    def handle_data(self, data):
        if self.skipped or not data:
            return
        if self.found and self.found[-1][0] == "text":
            data = self.found.pop()[1] + data
        self.found.append(("text", data))


def tree(html, renamed=()):
    parser = Tree(dict(renamed))
    parser.feed(html)
    parser.close()
    inside, kept = 0, []
    for one in parser.found:
        inside += (one[0] == "pre") - (one == "/pre")
        if one[0] != "text":
            kept.append(one)
        # White space between blocks and at the ends of lines is not shown.
        elif text := one[1].rstrip("\n") if inside else " ".join(one[1].split()):
            kept.append(("text", text))
    return kept


def reference():
    """CommonMark without what the page leaves out."""
    tables = MarkdownIt("commonmark", {"html": False, "breaks": True}).enable(["table", "strikethrough"])
    return tables.disable(["code", "lheading", "reference"])


def test_texts_are_rendered_as_by_markdown_it(render):
    for text, html in zip(TEXTS, render(TEXTS), strict=True):
        assert tree(html) == tree(reference().render(text), RENAMED), text


def test_images_are_links_tasks_are_checkboxes_and_short_rows_stay_short(render):
    image, tasks, table = render(["![*a*](https://e.org/b)", "- [ ] a\n- [x] *b*", "|a|b|\n|-|-|\n|1|"])
    assert tree(image) == [("p", ""), ("a", "https://e.org/b", ""), ("em", ""), ("text", "a"), "/em", "/a", "/p"]
    names = "ul li input text / li input em text / / /"
    assert [part[0] for part in tree(tasks)] == names.split()
    assert ["checked" in item for item in tasks.split("</li>")] == [False, True, False]
    assert tree(table).count("/td") == 1


def test_texts_that_arrive_in_pieces_end_as_the_full_text(render):
    chooser = random.Random(4)
    texts = TEXTS + ["".join(chooser.choices(SYMBOLS, k=60)) for _ in range(150)]
    assert render(texts, PIECES) == render(texts)


def test_random_texts_lose_no_letter(render):
    """A text of letters between any symbols shows all of its letters, in their order."""
    chooser = random.Random(5)
    symbols = [each for each in SYMBOLS if each not in ("1. ", "https", "(", "<")]
    texts = ["".join(chooser.choices(symbols, k=80)) for _ in range(300)]
    for text, html in zip(texts, render(texts), strict=True):
        shown = "".join(part[1] for part in tree(html) if part[0] == "text")
        if "```" not in text:  # the word behind a fence is a language
            assert [letter for letter in shown if letter.isalpha()] == [letter for letter in text if letter.isalpha()]
