"""Functions and modules that turn text into code, queries or weak secrets are used nowhere."""

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SOURCES = {
    path.relative_to(ROOT).as_posix(): path.read_text("utf-8")
    for folder in ("webapp", "runners")
    for path in sorted((ROOT / folder).rglob("*.py"))
}
SCRIPTS = {path.name: path.read_text("utf-8") for path in (ROOT / "static/js").glob("*.js")}
# Commands of an operator, which no request reaches.
COMMANDS = ("webapp/bench/", "webapp/boot/", "webapp/operations/", "webapp/audit/guard.py")
CODE = re.compile(
    r"(?<![\w.])(?:eval|exec|__import__)\(|\bos\.(?:system|popen)\(|shell=True"
    r"|^ *(?:import|from) (?:pickle|marshal|shelve|dill|xml|lxml|ldap|py?memcache)\b",
    re.MULTILINE,
)
QUERY = re.compile(r"\.raw\(|\.extra\(|RawSQL|\.execute\(\s*(?![\s\"')]|raise_on_error)")
SITE_ONLY = re.compile(r"^ *(?:import|from) (?:yaml|random|jinja2|uuid)\b", re.MULTILINE)
WEAK = re.compile(r"hashlib\.(?:md5|sha1)\b|\b(?:DES|ARC4|ECB|PKCS1v15)\b")
SECRET = re.compile(r"secrets\.(token_\w+)\((\d+)\)")
MIN_SECRET_BYTES, NAME_OF_FILE = 16, ("token_hex", 4)
# What makes code or markup of text, listens to other windows, keeps anything or bars a paste.
IN_BROWSERS = re.compile(
    r"\beval\(|new Function|(?:inner|outer)HTML\s*\+?=[^=]|insertAdjacentHTML|document\.write"
    r"|setTimeout\(\s*['\"`]|postMessage|addEventListener\(['\"](?:message|paste|copy)['\"]"
    r"|localStorage|sessionStorage|indexedDB|Object\.assign|__proto__"
)


def found_by(pattern: re.Pattern[str], sources: dict[str, str]) -> dict[str, list[str]]:
    """Return what a pattern finds, by file."""
    found = {name: pattern.findall(text) for name, text in sources.items()}
    return {name: texts for name, texts in found.items() if texts}


def test_no_text_becomes_code_an_object_or_a_query():
    site = {name: text for name, text in SOURCES.items() if name.startswith("webapp/")}
    served = {name: text for name, text in site.items() if not name.startswith(COMMANDS)}
    assert len(served) > 80
    assert found_by(CODE, SOURCES) == {}
    assert found_by(SITE_ONLY, served) == {}
    assert found_by(QUERY, served) == {}


def test_secrets_have_128_bits_and_hashes_no_known_collisions():
    # The key of published lists of passwords; git's name of a small file, which the Hub gives;
    # MD5, which an object store has as the ETag of what was uploaded.
    assert found_by(WEAK, SOURCES) == {
        "runners/hub/listing.py": [*["hashlib.md5"] * 4, "hashlib.sha1"],
        "webapp/core/password_files.py": ["hashlib.sha1"],
    }
    sizes = [(name, int(size)) for text in SOURCES.values() for name, size in SECRET.findall(text)]
    assert len(sizes) > 10
    assert {each for each in sizes if each[1] < MIN_SECRET_BYTES} <= {NAME_OF_FILE}


def test_scripts_of_pages_make_neither_code_nor_markup_and_keep_nothing():
    assert len(SCRIPTS) >= 5
    assert found_by(IN_BROWSERS, SCRIPTS) == {}
    text = "\n".join(SCRIPTS.values())
    assert re.findall(r"document\.cookie = .(\S+?)=", text) == ["${prefix}theme"]
    # The one key of an object that comes from outside is one of two words.
    assert [
        line.strip() for line in text.splitlines() if re.search(r"\w\[[a-z]\w*\] = ", line)
    ] == ['else if (field === "id" || field === "event") frame[field] = value;']
