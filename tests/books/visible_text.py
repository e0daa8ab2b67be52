"""The text of a page as a person reads it: one line a block, with the state of its controls."""

import re
from html.parser import HTMLParser

BLOCKS = frozenset({
    "address", "article", "aside", "blockquote", "body", "caption", "dd", "details", "dialog",
    "div", "dl", "dt", "fieldset", "figcaption", "figure", "footer", "form", "h1", "h2", "h3",
    "h4", "h5", "header", "hr", "label", "legend", "li", "main", "nav", "ol", "option", "p", "pre",
    "section", "summary", "table", "tbody", "thead", "title", "tr", "ul", "br",
})  # fmt: skip
CELLS = frozenset({"td", "th"})
UNSEEN = frozenset({"script", "style", "template", "noscript"})
HEADINGS = {f"h{level}": "#" * level for level in range(1, 6)}
SPACE = re.compile(r"\s+")


class VisibleText(HTMLParser):
    """Collects lines of text; text in ``UNSEEN`` elements is left out."""

    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.lines: list[str] = []
        self._words: list[str] = []
        self._unseen = 0
        self._is_preformatted = False
        self._options: list[tuple[bool, str]] | None = None  # of the select that is open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = {name: value or "" for name, value in attrs}
        if tag in UNSEEN:
            self._unseen += 1
        if tag in BLOCKS:
            self._end_line()
        if tag == "pre":
            self._is_preformatted = True
        if tag in HEADINGS:
            self._words.append(HEADINGS[tag])
        elif tag in CELLS:
            self._words.append(" | ")
        elif tag == "select":
            self._end_line()
            self._options = []
        elif tag == "option" and self._options is not None:
            self._options.append(("selected" in given, ""))
        elif tag == "input":
            self._words.append(f" {control(given)} ")
        elif tag == "button":
            self._words.append(" [")

    def handle_endtag(self, tag: str) -> None:
        if tag in UNSEEN:
            self._unseen = max(0, self._unseen - 1)
        if tag == "select" and self._options is not None:
            self._words.append(f" {chosen_of(self._options)} ")
            self._options = None
        elif tag == "button":
            self._words.append("] ")
        if tag in BLOCKS:
            self._end_line()
        if tag == "pre":
            self._is_preformatted = False

    def handle_data(self, data: str) -> None:
        if self._unseen:
            return
        if self._options:
            is_selected, text = self._options[-1]
            self._options[-1] = (is_selected, text + data)
        elif self._options is None:
            first, *others = data.split("\n") if self._is_preformatted else [data]
            self._words.append(first)
            for line in others:
                self._end_line()
                self._words.append(line)

    def close(self) -> None:
        super().close()
        self._end_line()

    def _end_line(self) -> None:
        if self._options is not None:
            return
        line = SPACE.sub(" ", "".join(self._words)).strip(" |")
        self._words.clear()
        if line.strip("#"):
            self.lines.append(line)


def control(given: dict[str, str]) -> str:
    """Return an input as text: a tick, or its value or placeholder; nothing of a hidden one."""
    kind = given.get("type", "text")
    if kind == "hidden":
        return ""
    if kind in {"checkbox", "radio"}:
        return "[x]" if "checked" in given else "[ ]"
    return f"[{given.get('value') or given.get('placeholder', '')}]"


def chosen_of(options: list[tuple[bool, str]]) -> str:
    """Return a select's choice, and the other options of a short list."""
    names = [SPACE.sub(" ", text).strip() for _, text in options]
    chosen = next((at for at, (is_selected, _) in enumerate(options) if is_selected), 0)
    if not names:
        return "[]"
    others = [name for at, name in enumerate(names) if at != chosen]
    rest = ", ".join(others) if len(others) <= 12 else f"{len(others)} others"
    return f"[{names[chosen]}; {rest}]"


def visible_text(html: str) -> str:
    """Return the text of a page, one block a line."""
    parser = VisibleText()
    parser.feed(html)
    parser.close()
    return "\n".join(parser.lines)
