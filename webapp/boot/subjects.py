"""The rule for commit subjects, used by the commit-msg hook."""

import re
import sys
from pathlib import Path

MAX_LENGTH = 72
SHAPE = re.compile(r"(?P<area>[a-z][a-z0-9 ,/-]*): (?P<sentence>[A-Z].*\.)")


def fault(subject: str) -> str | None:
    """Return the fault of a subject, or None if it is ``area: Imperative sentence.``."""
    if subject.startswith(("Merge ", "Revert ")):
        return None
    if len(subject) > MAX_LENGTH:
        return f"{len(subject)} characters, at most {MAX_LENGTH}"
    if not SHAPE.fullmatch(subject):
        return "not of the form `area: Imperative sentence.`"
    return None


def main(path: Path) -> int:
    """Check a commit message file; return 0 if its subject is valid."""
    subject = path.read_text("utf-8").splitlines()[0]
    problem = fault(subject)
    if problem:
        sys.stderr.write(f"Commit subject {subject!r}: {problem}.\n")
    return int(problem is not None)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
