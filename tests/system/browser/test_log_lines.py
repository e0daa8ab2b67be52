"""A log's lines as the page's script writes them: the same that the server renders."""

from pathlib import Path

from runners.shared.log_text import LINE_CHARACTERS, shortened
from runners.supervision.output import LogEvents
from tests.runners.program_logs import HOSTILE, PROGRAMS
from webapp.jobs.logs import lines_of, with_replaced
from webapp.jobs.models import AttemptEvent

SCRIPT = Path(__file__).parents[3] / "static/js/jobs.js"
TEXTS = ["🚢" * (LINE_CHARACTERS + 1) + "\n", "x" * LINE_CHARACTERS + " \n\n"]
OUTPUT = [log.encode() for log in PROGRAMS.values()] + [log for log, _ in HOSTILE.values()]
PAGE = "<div data-log data-last-seq='0'><span data-log-empty></span></div>"


def sent() -> list[tuple[str, str]]:
    """Return the texts of all programs, on two streams whose lines come in pieces."""
    streams = {"stdout": LogEvents(lambda: 0.0), "stderr": LogEvents(lambda: 0.0)}
    texts = []
    for number, data in enumerate(OUTPUT):
        for at in range(0, len(data), 30):
            for name, events in streams.items():
                if name == "stderr" or number % 2:
                    texts += [(name, text) for text in events.feed(data[at : at + 30])]
                    texts += [(name, text) for text in events.flush()]
    return [*texts, *(("stdout", text) for text in TEXTS)]


def test_the_script_writes_the_lines_that_the_server_renders(browser):
    source = SCRIPT.read_text()
    begin, end = source.index("const LINE_CHARACTERS"), source.index("const catchUp =")
    frames = [
        {"seq": seq, "t_ms": 0, "stream": stream, "text": text}
        for seq, (stream, text) in enumerate(sent(), start=1)
    ]
    page = browser.new_page()
    page.set_content(PAGE)
    rows = page.evaluate(
        "frames => { let lastSeq = 0; const log = document.querySelector('[data-log]');"
        f"{source[begin:end]} for (const frame of frames) write([frame]);"
        "return [...log.querySelectorAll('.line')].map((row) => row.lastChild.data); }",
        frames,
    )
    events = [
        AttemptEvent(seq=each["seq"], t_ms=0, kind="log", body=each) for each in reversed(frames)
    ]
    shown = [
        [shortened(line.text) for line in lines_of(event, is_replaced=is_replaced)]
        for event, is_replaced in with_replaced(events)
    ]
    assert rows == [line for lines in reversed(shown) for line in lines]
    assert len(rows) > 100
