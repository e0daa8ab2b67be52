"""Display names of browsers from their User-Agent."""

import re

# User-Agents contain the names of older browsers, so the most specific name comes first.
NAMES = (
    ("Edge", r"Edg(?:e|A|iOS)?/(\d+)"),
    ("Opera", r"OPR/(\d+)"),
    ("Firefox", r"(?:Firefox|FxiOS)/(\d+)"),
    ("Chrome", r"(?:Chrome|CriOS)/(\d+)"),
    ("Safari", r"Version/(\d+)[\d.]* (?:Mobile/\w+ )?Safari/"),
)
SYSTEMS = (
    ("Android", "Android"),
    ("iPhone", "iPhone"),
    ("iPad", "iPad"),
    ("Windows", "Windows"),
    ("macOS", "Mac OS X"),
    ("Linux", "Linux"),
)
LONGEST = 40


def browser_words(user_agent: str) -> str:
    """Return a browser's name, version and system; for an unknown one, the first characters."""
    for name, pattern in NAMES:
        if match := re.search(pattern, user_agent):
            system = next((words for words, mark in SYSTEMS if mark in user_agent), "")
            return f"{name} {match[1]} on {system}" if system else f"{name} {match[1]}"
    return user_agent[:LONGEST] or "unknown"
