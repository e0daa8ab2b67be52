"""Content-Security-Policy and Permissions-Policy headers.

One middleware sets both headers. It is the first, so that responses of other middlewares (files,
errors, redirects to TLS) have them too.
"""

from csp.middleware import CSPMiddleware
from django.http import HttpRequest
from django.http.response import HttpResponseBase

# Browser features that no page uses. Only writing to the clipboard is allowed.
DENIED = (
    "accelerometer",
    "browsing-topics",
    "camera",
    "clipboard-read",
    "display-capture",
    "encrypted-media",
    "fullscreen",
    "gamepad",
    "geolocation",
    "gyroscope",
    "hid",
    "idle-detection",
    "local-fonts",
    "magnetometer",
    "microphone",
    "midi",
    "payment",
    "picture-in-picture",
    "publickey-credentials-get",
    "screen-wake-lock",
    "serial",
    "storage-access",
    "usb",
    "window-management",
    "xr-spatial-tracking",
)
PERMISSIONS_POLICY = ", ".join(["clipboard-write=(self)", *(f"{name}=()" for name in DENIED)])


class PoliciesMiddleware(CSPMiddleware):
    """Adds both policies to every response of Django."""

    def process_response(
        self, request: HttpRequest, response: HttpResponseBase
    ) -> HttpResponseBase:
        """Return the response with both headers."""
        guarded: HttpResponseBase = super().process_response(request, response)
        guarded.headers.setdefault("Permissions-Policy", PERMISSIONS_POLICY)
        return guarded
