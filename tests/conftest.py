"""What every test shares; fixtures of one area live in that area's own conftest."""

pytest_plugins = ["tests.plugins.chromium", "tests.plugins.order"]
