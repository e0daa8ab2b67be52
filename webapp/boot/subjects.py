"""The rule for commit subjects, for the hook and for the test that reads the history."""

import re
import sys
from pathlib import Path

MAX_LENGTH = 72
SHAPE = re.compile(r"(?P<area>[a-z][a-z0-9 ,/-]*): (?P<sentence>[A-Z].*\.)")


def fault(subject: str) -> str | None:
    """Return what is wrong with a subject, or None: ``area: Imperative sentence.``."""
    if subject.startswith(("Merge ", "Revert ")):
        return None
    if len(subject) > MAX_LENGTH:
        return f"{len(subject)} characters, at most {MAX_LENGTH}"
    if not SHAPE.fullmatch(subject):
        return "not of the form `area: Imperative sentence.`"
    return None


def main(path: Path) -> int:
    """Check the message that git is about to commit."""
    subject = path.read_text("utf-8").splitlines()[0]
    found = fault(subject)
    if found:
        sys.stderr.write(f"Commit subject {subject!r}: {found}.\n")
    return int(found is not None)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
