"""Contrast of the design tokens: text 4.5 : 1, what carries meaning or takes input 3 : 1."""

import math
import re

from webapp.settings import BASE_DIR

TOKEN = re.compile(r"--([\w-]+): light-dark\(oklch\(([^)]*)\), oklch\(([^)]*)\)\)")
TEXT = ("ink", "ink-2", "ink-3", "accent", "good", "warn", "bad")
SHAPES = (
    "field", "focus", "predicted", "series-2", "series-3", "series-4",
    *(f"term-{name}" for name in
      ("weights", "kv-cache", "activations", "gradients", "optimizer", "overhead")),
)  # fmt: skip


def luminance(oklch: str) -> float:
    """Return the relative luminance of an opaque colour (Ottosson 2020, WCAG 2.2)."""
    light, chroma, hue = oklch.replace("%", "").split()[:3]
    lightness, angle = float(light) / 100, math.radians(float(hue))
    a, b = float(chroma) * math.cos(angle), float(chroma) * math.sin(angle)
    long = (lightness + 0.3963377774 * a + 0.2158037573 * b) ** 3
    medium = (lightness - 0.1055613458 * a - 0.0638541728 * b) ** 3
    short = (lightness - 0.0894841775 * a - 1.2914855480 * b) ** 3
    rgb = (
        4.0767416621 * long - 3.3077115913 * medium + 0.2309699292 * short,
        -1.2684380046 * long + 2.6097574011 * medium - 0.3413193965 * short,
        -0.0041960863 * long - 0.7034186147 * medium + 1.7076147010 * short,
    )
    red, green, blue = (min(1.0, max(0.0, each)) for each in rgb)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def contrast(one: str, other: str) -> float:
    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


def test_text_and_shapes_stand_out_from_the_surfaces_in_both_themes():
    css = (BASE_DIR / "static/css/tokens.css").read_text()
    tokens = {name: (light, dark) for name, light, dark in TOKEN.findall(css)}
    weak = []
    for name in (*TEXT, *SHAPES):
        least = 4.5 if name in TEXT else 3.0
        for ground in ("surface", "sunken"):
            for theme in (0, 1):
                found = contrast(tokens[name][theme], tokens[ground][theme])
                if found < least:
                    weak.append((name, ground, ("light", "dark")[theme], round(found, 2)))
    assert not weak, weak
    assert round(contrast("23% 0.02 255", "100% 0 0"), 1) > 15  # as browsers compute it
