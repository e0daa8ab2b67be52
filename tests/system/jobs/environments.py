"""Environments of the host that jobs under test run in, built once for a test run."""

from pathlib import Path

import pytest

from runners.environments.builder import BuildError, Store, ensure
from runners.shared.config import HostDir


def build_environment(host: Path, name: str) -> None:
    """Build an environment on a host; skip where no package index is reached."""
    store = Store(HostDir(host))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PIP_NO_COMPILE", "0")  # pip's way to say yes: only what is imported is
        try:
            ensure(store, store.pins(name), print)
        except BuildError as error:
            if "cannot be reached" not in str(error):
                raise
            pytest.skip(f"the environment {name} needs a package index: {error}")
