"""Declared operations: a signature and a path, from which both clients have a method.

::

    @operation("GET", "/jobs/{job_id}")
    def get_job(self, job_id: str) -> JobDetail:
        "Return a job."

``client.get_job("x")`` then returns a ``JobDetail`` on :class:`Caller`, and a coroutine of one on
:class:`AsyncCaller`. Arguments that the path names fill it; ``body``, ``file``, ``sink`` and
``idempotency_key`` are what their names say; all others are the query. A declaration has no code.
"""

import inspect
import re
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Mapping
from functools import cache, wraps
from typing import (
    Any,
    Concatenate,
    ParamSpec,
    Protocol,
    TypeVar,
    cast,
    get_type_hints,
    overload,
)

from runners.client.transport import AsyncCaller, Call, Caller, Event, part

P = ParamSpec("P")
R = TypeVar("R")
R_co = TypeVar("R_co", covariant=True)
JsonObject = Mapping[str, Any]  # a body without a type of its own
PLACE = re.compile(r"\{(\w+)\}")


class Operation(Protocol[P, R_co]):
    """The type of an operation; at run time it is a function."""

    @overload
    def __get__(self, client: None, owner: type) -> Callable[Concatenate[Any, P], Any]: ...
    @overload
    def __get__(self, client: Caller, owner: type) -> Callable[P, R_co]: ...
    @overload
    def __get__(
        self, client: AsyncCaller, owner: type
    ) -> Callable[P, Coroutine[Any, Any, R_co]]: ...


class EventStream(Protocol[P]):
    """The type of an operation that returns events as they come."""

    @overload
    def __get__(self, client: None, owner: type) -> Callable[Concatenate[Any, P], Any]: ...
    @overload
    def __get__(self, client: Caller, owner: type) -> Callable[P, Iterator[Event]]: ...
    @overload
    def __get__(self, client: AsyncCaller, owner: type) -> Callable[P, AsyncIterator[Event]]: ...


def operation(
    method: str, path: str
) -> Callable[[Callable[Concatenate[Any, P], R]], Operation[P, R]]:
    """Return the decorator of an operation with one reply, of the type that it declares."""

    def declare(declared: Callable[Concatenate[Any, P], R]) -> Operation[P, R]:
        @wraps(declared)
        def send(self: Caller | AsyncCaller, *given: Any, **named: Any) -> Any:  # noqa: ANN401 (R)
            return self._run(self._call(call_of(declared, method, path, given, named)))

        return cast("Operation[P, R]", send)

    return declare


def event_stream(
    path: str,
) -> Callable[[Callable[Concatenate[Any, P], Iterator[Event]]], EventStream[P]]:
    """Return the decorator of an operation that returns server-sent events."""

    def declare(declared: Callable[Concatenate[Any, P], Iterator[Event]]) -> EventStream[P]:
        @wraps(declared)
        def follow(self: Caller | AsyncCaller, *given: Any, **named: Any) -> Any:  # noqa: ANN401
            return self._iterate(self._events(call_of(declared, "GET", path, given, named)))

        return cast("EventStream[P]", follow)

    return declare


@cache
def _signature(declared: Callable[..., Any]) -> tuple[inspect.Signature, Any]:
    """Return a declaration's signature and the type of its reply."""
    return inspect.signature(declared), get_type_hints(declared)["return"]


def call_of(
    declared: Callable[..., Any],
    method: str,
    path: str,
    given: tuple[Any, ...],
    named: Mapping[str, Any],
) -> Call:
    """Return the request of an operation for the arguments that its method got.

    Raises:
        TypeError: the arguments are not those of the declaration.
    """
    signature, reply = _signature(declared)
    try:
        bound = signature.bind(None, *given, **named)
    except TypeError as error:
        raise TypeError(f"{declared.__name__}(): {error}") from None
    bound.apply_defaults()
    _client, *arguments = bound.arguments.items()
    query = dict(arguments)
    body = query.pop("body", None)
    return Call(
        method=method,
        path=PLACE.sub(lambda place: part(query.pop(place[1])), path),
        body=query.pop("file", body),
        key=query.pop("idempotency_key", None),
        sink=query.pop("sink", None),
        query={name.removesuffix("_"): value for name, value in query.items()},
        reply=reply,
    )
