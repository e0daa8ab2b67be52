"""Django's template backend with contexts that are freed right after rendering.

Django's ``ContextDict`` references its context. Through this cycle, all rows of a page would live
until a collection of the oldest generation.
"""

from typing import Any

from django.http import HttpRequest
from django.template.backends import django
from django.template.context import make_context
from django.utils.safestring import SafeString


class Templates(django.DjangoTemplates):
    """Django's engine with templates that free their contexts."""

    def from_string(self, template_code: str) -> "Template":
        """Return a template from its text."""
        return Template(super().from_string(template_code).template, self)

    def get_template(self, template_name: str) -> "Template":
        """Return a template by its name."""
        return Template(super().get_template(template_name).template, self)


class Template(django.Template):
    """A template that frees its context after rendering."""

    def render(
        self, context: dict[str, Any] | None = None, request: HttpRequest | None = None
    ) -> SafeString:
        """Return the rendered text."""
        django_context = make_context(context, request, autoescape=self.backend.engine.autoescape)
        try:
            return self.template.render(django_context)
        finally:
            django_context.dicts.clear()
