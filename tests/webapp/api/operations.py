"""The operations of the API that people and their tokens may call, read from its routers."""

from collections.abc import Iterator
from typing import NamedTuple

from webapp.accounts.models import Scope
from webapp.api.auth import TokenAuth
from webapp.api.urls import api


class Operation(NamedTuple):
    """One method of one address, with the scope that a token needs for it."""

    name: str
    method: str
    path: str
    scope: Scope


def operations() -> Iterator[Operation]:
    """Yield every operation that an access token may be sent to."""
    for router in api._get_bound_routers():
        for path, view in router.path_operations.items():
            for each in view.operations:
                scopes = [one.scope for one in each.auth_callbacks if isinstance(one, TokenAuth)]
                for scope in scopes:
                    for method in each.methods:
                        address = f"{router.prefix}{path}"
                        yield Operation(each.operation_id or "", method, address, scope)


def paths() -> set[str]:
    """Return the addresses of the operations as the URL conf writes them."""
    return {each.path for each in operations()}
