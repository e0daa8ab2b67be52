"""The machines of a module's ``HOSTS`` and the product on them: one of each for a module."""

from collections.abc import Iterator

import pytest

from tests.system.namespaces.lab import SERVER, Lab, inside
from tests.system.namespaces.site import Site


@pytest.fixture(scope="module")
def lab(request) -> Iterator[Lab]:
    """The hosts that the module names, and this process on the server between them."""
    with Lab(request.module.HOSTS) as made, inside(made.space(SERVER)):
        yield made


@pytest.fixture(scope="module")
def site(lab, tmp_path_factory) -> Iterator[Site]:
    """The product, with every host enrolled."""
    with Site(tmp_path_factory.mktemp("site"), lab) as made:
        yield made
