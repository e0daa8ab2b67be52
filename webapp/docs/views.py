"""The view of documentation pages."""

from django.http import Http404, HttpRequest, HttpResponse
from django.shortcuts import render
from django.utils.safestring import mark_safe
from django.views.decorators.http import require_GET

from webapp.docs.pages import find_page, page_paths, page_title


@require_GET
def docs_page(request: HttpRequest, page: str) -> HttpResponse:
    """Show one page of the documentation with the list of all pages."""
    found = find_page(page)
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
