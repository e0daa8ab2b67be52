"""Documentation pages: Markdown files in templates/docs, found and rendered."""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import markdown
from django.conf import settings
from django.http import Http404, HttpRequest, HttpResponse
from django.shortcuts import redirect, render
from django.utils.safestring import mark_safe
from django.views.decorators.http import require_GET
from markdown.extensions.toc import slugify_unicode

from webapp.bench.technique_states import ratio_table, state_table
from webapp.core.figures import figure_table
from webapp.core.parameters import reads_query

# Find and render documentation pages: Markdown files in templates/docs.


DOCS_ROOT = Path(settings.BASE_DIR) / "templates" / "docs"
PAGE_NAME = re.compile(r"[a-z0-9-]+(/[a-z0-9-]+)*")
PICTURES = re.compile(r"<p>\[\[picture:([a-z-]+)\]\]</p>")
TABLES = {
    "[[table:states]]": state_table,
    "[[table:ratios]]": ratio_table,
    "[[table:figures]]": figure_table,
}
RENAMED = {"postgres": "configuration"}  # pages, by their former path
LINK = re.compile(r'href="(?!https?:|/|#|mailto:)([a-z0-9/.-]+?)\.md(#[\w-]+)?"')


TASKS: dict[str, tuple[str, ...]] = {  # pages by what a reader wants to do, in reading order
    "Start": ("index", "walk", "glossary"),
    "Plan": ("planner", "layouts", "techniques", "compression", "training-memory", "tuning"),
    "Run": (
        "jobs", "training-data", "models-by-name", "generation", "workflows", "queue", "failures",
    ),
    "Serve": ("serving", "deployments", "endpoints", "observed-servers"),
    "Hosts": ("hosts", "slurm", "kubernetes", "ray"),
    "Operate": (
        "configuration", "operations", "backup", "proxies", "command-line-server", "threats",
        "trust", "asvs",
    ),
    "Reference": (
        "command-line", "api", "agents", "figures", "accuracy", "quality", "layout-times",
        "training-kernels",
    ),
    "Change Slipway": ("architecture", "tests"),
}  # fmt: skip
READING_ORDER = tuple(path for paths in TASKS.values() for path in paths)
MOST_FOUND = 20
SHORTEST_WORD = 2
EXCERPT = 160  # characters around the first word that was found


@dataclass(frozen=True)
class Found:
    """A section of a page that has all words of a search."""

    url: str
    title: str
    heading: str
    excerpt: str


@cache
def _sections() -> tuple[tuple[str, str, str, str], ...]:
    """Return each page's sections: path, heading, anchor, text without markup."""
    found = []
    for path in page_paths():
        text = (DOCS_ROOT / f"{path}.md").read_text(encoding="utf-8").partition("\n")[2]
        for at, part in enumerate(re.split(r"^## ", text, flags=re.MULTILINE)):
            heading, _, body = part.partition("\n") if at else ("", "", part)
            plain = re.sub(r"[*`#|]|\[\[.*?\]\]|\]\([^)]*\)|\[|<[^>]*>", " ", f"{heading}\n{body}")
            anchor = slugify_unicode(heading, "-") if heading else ""
            found.append((path, heading.replace("`", ""), anchor, " ".join(plain.split())))
    return tuple(found)


def search_docs(query: str) -> list[Found]:
    """Return the sections that have every word of a query, those with it in a title first."""
    words = [word for word in query.casefold().split() if len(word) >= SHORTEST_WORD]
    if not words:
        return []
    matches = []
    for path, heading, anchor, text in _sections():
        title = page_title(path)
        whole = f"{title} {text}".casefold()
        if not all(word in whole for word in words):
            continue
        in_title = sum(word in f"{title} {heading}".casefold() for word in words)
        count = sum(whole.count(word) for word in words)
        start = max(0, text.casefold().find(words[0]) - EXCERPT // 2)
        excerpt = f"{'… ' if start else ''}{text[start : start + EXCERPT]} …"
        url = f"/docs/{path}{f'#{anchor}' if anchor else ''}"
        matches.append((in_title, count, Found(url, title, heading, excerpt)))
    matches.sort(key=lambda each: (-each[0], -each[1], each[2].url))
    return [found for *_, found in matches[:MOST_FOUND]]


@dataclass(frozen=True)
class Page:
    """One page: path below /docs/, title, HTML text and table of contents."""

    path: str
    title: str
    html: str
    contents: tuple[tuple[str, str], ...]  # anchor, heading


@cache
def page_paths() -> tuple[str, ...]:
    """Return every page's path: index first, subfolders (decisions) last."""
    files = (file.relative_to(DOCS_ROOT).with_suffix("") for file in DOCS_ROOT.rglob("*.md"))
    return tuple(sorted((path.as_posix() for path in files), key=_order))


def _order(path: str) -> tuple[bool, bool, str]:
    return ("/" in path, path != "index", path)


@cache
def page_title(path: str) -> str:
    """Return a page's title: its first heading."""
    first = (DOCS_ROOT / f"{path}.md").read_text(encoding="utf-8").split("\n", 1)[0]
    return first.removeprefix("# ").strip()


def find_page(path: str) -> Page | None:
    """Return the page at ``path``, or None if there is none or the name is invalid."""
    name = path.strip("/") or "index"
    if not PAGE_NAME.fullmatch(name) or name not in page_paths():
        return None
    return _render(name)


@cache
def _render(name: str) -> Page:
    """Return the rendered page; its Markdown is trusted and may contain HTML."""
    title, _, body = (DOCS_ROOT / f"{name}.md").read_text(encoding="utf-8").partition("\n")
    for place, table in TABLES.items():
        body = body.replace(place, table() if place in body else "")
    converter = markdown.Markdown(
        extensions=["fenced_code", "tables", "toc"],
        extension_configs={"toc": {"slugify": slugify_unicode, "toc_depth": "2-2"}},
        output_format="html",
    )
    html = converter.convert(body)
    tokens = converter.toc_tokens  # type: ignore[attr-defined] # set by the toc extension
    contents = tuple((token["id"], token["name"]) for token in tokens)
    return Page(name, title.removeprefix("# ").strip(), _finish(html, name), contents)


def _finish(html: str, name: str) -> str:
    """Return the HTML with pictures inlined and links to Markdown files as page URLs."""
    folder = Path(name).parent

    def address(match: re.Match[str]) -> str:
        target = (DOCS_ROOT / folder / match[1]).resolve().relative_to(DOCS_ROOT.resolve())
        return f'href="/docs/{target.as_posix()}{match[2] or ""}"'

    html = PICTURES.sub(lambda match: _picture(match[1]), html)
    html = html.replace("<pre>", '<pre tabindex="0">')  # scrollable, so it must be focusable
    html = html.replace("<table>", '<div class="table-wrap"><table>')
    html = html.replace("</table>", "</table></div>")
    return LINK.sub(address, html)


def _picture(name: str) -> str:
    """Return a picture as inline SVG, so that it inherits the page's colours."""
    svg = (DOCS_ROOT / "pictures" / f"{name}.svg").read_text(encoding="utf-8")
    return f'<figure class="chart">{svg}</figure>'


@require_GET
@reads_query("q")
def docs_page(request: HttpRequest, page: str) -> HttpResponse:
    """Show one page of the documentation with all pages by task, or what ``q`` finds in them."""
    found = find_page(page)
    if found is None and (name := RENAMED.get(page.strip("/"))):
        return redirect("docs", name, permanent=True)
    if found is None:
        raise Http404(page)
    query = request.GET.get("q", "").strip()
    decisions = [path for path in page_paths() if "/" in path]
    order = [*READING_ORDER, *decisions]
    at = order.index(found.path)
    context = {
        "page": found,
        "html": mark_safe(found.html),  # noqa: S308 -- rendered from our own files only
        "tasks": [(task, _titled(paths)) for task, paths in TASKS.items()],
        "decisions": _titled(decisions),
        "before": _titled(order[at - 1 : at])[0] if at else None,
        "after": _titled(order[at + 1 : at + 2])[0] if at + 1 < len(order) else None,
        "sought": query,
        "found": search_docs(query),
    }
    return render(request, "docs/page.html", context)


def _titled(paths: Iterable[str]) -> list[tuple[str, str]]:
    return [(path, page_title(path)) for path in paths]
