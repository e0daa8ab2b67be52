"""Find system programs that the product or its tests can use."""

import os
import shutil

CHROMIUM_NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")


def find_chromium() -> str | None:
    """Return the path of a Chromium: the one set in SLIPWAY_CHROMIUM, or one on PATH."""
    named = os.environ.get("SLIPWAY_CHROMIUM")
    if named:
        return shutil.which(named)
    return next(filter(None, map(shutil.which, CHROMIUM_NAMES)), None)
