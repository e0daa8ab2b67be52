"""Addresses of the API and of the health checks."""

from django.contrib.auth.decorators import login_not_required
from django.urls import URLPattern, URLResolver, path
from ninja import NinjaAPI

from webapp.api import attempts, health, hosts, jobs, plans, problems

api = NinjaAPI(
    title="Slipway",
    version="1",
    urls_namespace="api-v1",
    description="What hosts report to, and what pages and scripts read from.",
)
problems.install(api)
api.add_router("/hosts", hosts.router)
api.add_router("/attempts", attempts.router)
api.add_router("/plans", plans.router)
api.add_router("", jobs.router)


NEEDS_LOGIN = frozenset({"openapi-json", "openapi-view", "api-root"})


def _opened(patterns: list[URLPattern | URLResolver]) -> list[URLPattern | URLResolver]:
    """Take the operations out of the login requirement: each has a check of its own."""
    for pattern in patterns:
        if isinstance(pattern, URLPattern) and pattern.name not in NEEDS_LOGIN:
            pattern.callback = login_not_required(pattern.callback)
    return patterns


_patterns, _app, _namespace = api.urls
urlpatterns: list[URLPattern | URLResolver] = [
    path("api/v1/", (_opened(_patterns), _app, _namespace)),
    path("healthz", health.healthz, name="healthz"),
    path("readyz", health.readyz, name="readyz"),
]
