"""What a program writes, as lines of text: where a line ends, what it shows, how it is cut.

The supervisor's events and exit records, the pages, the downloads, the search and every sentence
that quotes a program use these functions, so that all of them show the same lines. Standard
library only.

A line ends at a line feed and nowhere else. Of the states that a progress bar writes between
carriage returns the line shows the last one; a bar below another, for which tqdm moves the cursor
up and down again, is one line too. Control sequences of terminals (colours, cursor,
links, titles, clipboard: ECMA-48, xterm's ctlseqs) are left out. Other control characters, and
those that are invisible or turn the direction of text, are shown as ``less`` shows them: ``^@``,
``<U+202E>``.
"""

import re
from typing import AnyStr

LINE_CHARACTERS = 2000  # of one line on a page and in an exit record
QUOTED_CHARACTERS = 300  # of a program's line within a sentence
_CHARACTER_BYTES = 4  # at most, in UTF-8
_SEQUENCE_BYTES = 4096  # of a link, a title or the like; a longer one is shown
_STRING = rf"[^\x00-\x1f\x7f-\x9f]{{0,{_SEQUENCE_BYTES}}}"
_SEQUENCE = re.compile(
    r"(?:\x1b\[|\x9b)[0-?]*[ -/]*[@-~]"  # colour, cursor, modes
    # links, titles, the clipboard
    rf"|(?:\x1b[\]PX^_]|[\x90\x98\x9d-\x9f]){_STRING}(?:\x07|\x1b\\|\x9c)"
    r"|\x1b[ -/]+[0-~]"  # character sets
    r"|\x1b[0-OQ-WYZ\\`-~]"
)
_UNFINISHED_SEQUENCE = re.compile(
    rb"\x1b(?:\[[0-?]*[ -/]*|[\]PX^_][^\x00-\x1f\x7f]{0,%d}\x1b?|[ -/]*)\Z" % _SEQUENCE_BYTES
)
_UNFINISHED_CHARACTER = re.compile(  # less bytes than its first one announces
    rb"(?:[\xc2-\xdf]|[\xe0-\xef][\x80-\xbf]?|[\xf0-\xf4][\x80-\xbf]{0,2})\Z"
)
_LATER_BYTES = re.compile(rb"[\x80-\xbf]{0,3}")  # of a character
_INVISIBLE = "\u200b\u2028-\u202e\u2060\u2066-\u2069\ufeff"
_SPECIAL = re.compile(f"[\x00-\x08\x0b-\x1f\x7f-\x9f{_INVISIBLE}]")
_UP = "\x1b[A"
_MOST_BARS = 10  # one below the other
_OVERWRITTEN = re.compile(rb"(?m)^[^\n]*\r(?=[^\r\n])")


def plain(text: str) -> str:
    """Return the text of a log event as it is stored and shown; twice gives the same.

    If it begins with a carriage return, its first line replaces the unfinished line that came
    before on the same stream.
    """
    if not _SPECIAL.search(text):
        return text
    lines = without_moves(text, _UP, "\n").split("\n")
    is_replacing = lines[0].startswith("\r") or "\r" in lines[0].rstrip("\r")
    states = "\n".join(line.rstrip("\r").rpartition("\r")[2] for line in lines)
    shown = _SPECIAL.sub(_notation, _SEQUENCE.sub("", states))
    return f"\r{shown}" if is_replacing else shown


def _notation(match: re.Match[str]) -> str:
    code = ord(match[0])
    if code < ord(" "):
        return f"^{chr(code + ord('@'))}"
    return "^?" if match[0] == "\x7f" else f"<U+{code:04X}>"


def lines_of(output: str | bytes) -> list[str]:
    """Return the lines of a program's output, without their ends; no lines of an empty one."""
    text = output if isinstance(output, str) else output.decode(errors="replace")
    text = plain(text).removeprefix("\r")
    return text.removesuffix("\n").split("\n") if text else []


def last_line(output: str | bytes, otherwise: str = "") -> str:
    """Return a program's last line that is not blank, to be quoted; else ``otherwise``."""
    last = next((line.strip() for line in reversed(lines_of(output)) if line.strip()), otherwise)
    return shortened(last, QUOTED_CHARACTERS)


def shortened(line: str, most: int = LINE_CHARACTERS) -> str:
    """Return a line of at most ``most`` characters, with a note if there were more."""
    if len(line) <= most:
        return line
    return f"{line[:most]} … (a line of {len(line):,} characters)"


# Output in bytes, as it is read: positions where it may be cut.


def without_moves(output: AnyStr, up: AnyStr, down: AnyStr) -> AnyStr:
    """Return output without the pairs of moves, up and down, that end in the same line."""
    for _ in range(_MOST_BARS):
        if (pair := up + down) not in output:
            break
        output = output.replace(pair, up[:0])
    return output


def joined(partial: bytes, data: bytes) -> tuple[bytes, bytes]:
    """Return the whole lines of an unfinished line and what follows, and the unfinished rest.

    Both are without the states that a progress bar wrote over.
    """
    data = without_moves(partial + data, _UP.encode(), b"\n")
    end = data.rfind(b"\n") + 1
    return last_states(data[:end]), last_state(data[end:])


def last_state(line: bytes) -> bytes:
    """Return of an unfinished line what it shows: the bytes after its last carriage return.

    One return at the end is kept: with a line feed it is the end of the line.
    """
    body = line.rstrip(b"\r")
    state = body[body.rfind(b"\r") + 1 :]
    return state + b"\r" if len(body) < len(line) else state


def last_states(lines: bytes) -> bytes:
    """Return whole lines without the states that a progress bar wrote over."""
    return _OVERWRITTEN.sub(b"", lines) if b"\r" in lines else lines


def half_character(data: bytes) -> int:
    """Return how many bytes at the end of UTF-8 text begin a character that is not complete."""
    half = _UNFINISHED_CHARACTER.search(data[-_CHARACTER_BYTES + 1 :])
    return len(half[0]) if half else 0


def half_sequence(data: bytes) -> int:
    """Return how many bytes at the end begin a control sequence that is not complete."""
    half = _UNFINISHED_SEQUENCE.search(data[-_SEQUENCE_BYTES:])
    return len(half[0]) if half else 0


def character_at(data: bytes, begin: int) -> int:
    """Return the first position from ``begin`` on that is not within a character."""
    later = _LATER_BYTES.match(data, begin)
    return later.end() if later else begin
