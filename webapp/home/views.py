"""The first page and the search."""

from django.http import HttpRequest, HttpResponse
from django.shortcuts import render
from django.views.decorators.http import require_GET


@require_GET
def home(request: HttpRequest) -> HttpResponse:
    """Show what needs a person first, then what runs."""
    return render(request, "home/home.html")


@require_GET
def search(request: HttpRequest) -> HttpResponse:
    """List what the words of ``q`` are found in."""
    return render(request, "home/search.html", {"query": request.GET.get("q", "")})
