"""The address under which clients reach the gateway."""

from django.http import HttpRequest

GATEWAY_PATH = "/v1"


def gateway_url(request: HttpRequest) -> str:
    """Return the base URL for OpenAI's clients."""
    return request.build_absolute_uri(GATEWAY_PATH)
