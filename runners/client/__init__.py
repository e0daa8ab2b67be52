"""The Python client of Slipway's API, synchronous and for asyncio.

>>> from runners.client import Slipway
>>> with Slipway("https://slipway.lan", "slp_…") as slipway:  # doctest: +SKIP
...     for job in slipway.paginate(slipway.list_jobs, state="running"):
...         print(job.name, job.progress.words)

- ``generated`` the operations, one declaration for both clients, and the clients
- ``requests``  the types of requests
- ``replies``   the types of replies, by subject: the server sends the same ones
- ``operation`` from a declaration to a method of both clients
- ``transport`` credentials, retries, errors, files and event streams

``manage.py client`` writes the first two from the API's schema.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from runners.client.generated import AsyncSlipway, Slipway
    from runners.client.transport import ApiError, Event, UnreachableError

__all__ = ["ApiError", "AsyncSlipway", "Event", "Slipway", "UnreachableError"]
GENERATED = {"AsyncSlipway", "Slipway"}


def __getattr__(name: str) -> Any:  # noqa: ANN401 (a class)
    """Load the client when it is used: its types take a tenth of a second."""
    if name not in __all__:
        raise AttributeError(name)
    from importlib import import_module

    module = "generated" if name in GENERATED else "transport"
    return getattr(import_module(f"runners.client.{module}"), name)
