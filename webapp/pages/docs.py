"""Documentation pages: Markdown files in templates/docs, found and rendered."""

import re
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
def docs_page(request: HttpRequest, page: str) -> HttpResponse:
    """Show one page of the documentation with the list of all pages."""
    found = find_page(page)
    if found is None and (name := RENAMED.get(page.strip("/"))):
        return redirect("docs", name, permanent=True)
    if found is None:
        raise Http404(page)
    listed = [(path, page_title(path)) for path in page_paths()]
    context = {
        "page": found,
        "html": mark_safe(found.html),  # noqa: S308 -- rendered from our own files only
        "guides": [entry for entry in listed if "/" not in entry[0]],
        "decisions": [entry for entry in listed if "/" in entry[0]],
    }
    return render(request, "docs/page.html", context)
