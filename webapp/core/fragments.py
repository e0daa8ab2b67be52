"""Cached rendering of small HTML fragments that occur many times on a page."""

from collections.abc import Hashable
from functools import lru_cache

from django.template.loader import render_to_string
from django.utils.safestring import SafeString

KEPT = 1024  # fragments; their values are short, such as a name or a duration


@lru_cache(maxsize=KEPT, typed=True)  # typed: a SafeString is a different key than an equal str
def fragment(template_name: str, **values: Hashable) -> SafeString:
    """Return a template rendered with ``values``, from the cache if possible.

    The template must depend on nothing else: not on request, time or language.
    """
    return render_to_string(template_name, values)
