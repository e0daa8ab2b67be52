"""A log's lines as the page's script writes them: the same that the server renders."""

from pathlib import Path

from webapp.jobs.models import AttemptEvent
from webapp.pages.attempt_log import LINE_CHARACTERS, lines_of

SCRIPT = Path(__file__).parents[3] / "static/js/jobs.js"
TEXTS = [
    "one\r\ntwo\r\n",
    "\r1 %\r2 %",
    "\r1 %\r2 %\r",
    "a\u2028b\rc\u2028d\n",
    "🚢" * (LINE_CHARACTERS + 1) + "\n",
    "x" * LINE_CHARACTERS + " \n\n",
]


def test_the_script_writes_the_lines_that_the_server_renders(browser):
    source = SCRIPT.read_text()
    begin, end = source.index("const LINE_CHARACTERS"), source.index("const write =")
    page = browser.new_page()
    for text in TEXTS:
        shown = page.evaluate(
            f"text => {{ {source[begin:end]} return text.replace(/\\n$/, '').split('\\n')"
            ".map((line) => shortened(lastState(line))); }",
            text,
        )
        event = AttemptEvent(seq=1, t_ms=0, kind="log", body={"stream": "stdout", "text": text})
        assert shown == [line.text for line in lines_of(event)], text[:20]
