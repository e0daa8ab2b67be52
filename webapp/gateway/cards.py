"""Deployments as ``/v1/models`` lists them, with what their endpoints say of themselves.

An endpoint is asked once, through its host's tunnel, however many requests wait for it. What it
said stays while its deployment sleeps; without an answer a card has its own fields alone, and the
endpoint is asked again after ``FAILED_SECONDS``.
"""

import asyncio
from collections.abc import Iterable
from time import monotonic
from typing import Annotated, Any, NamedTuple

import structlog
from pydantic import BaseModel, Field

from runners.jobspec.base import parse_json
from webapp.gateway.routes import Route, Target
from webapp.gateway.tunnels import HostTunnels, TunnelError

MODELS = "/v1/models"
SECONDS = 2.0  # for an endpoint's answer
FAILED_SECONDS = 10.0  # until one that did not answer is asked again
MOST_BYTES = 256 * 1024  # of it: it names at most 64 adapters
MOST_KEPT = 4096  # deployments
Card = dict[str, Any]
Word = Annotated[str, Field(max_length=40)]
log = structlog.get_logger(__name__)


class EndpointCard(BaseModel):
    """What is taken of an endpoint's own card: its longest request and its capabilities."""

    max_model_len: Annotated[int, Field(ge=1)] | None = None
    capabilities: Annotated[list[Word], Field(max_length=40)] | None = None


class Report(NamedTuple):
    """What the endpoint of an attempt said of its model."""

    attempt_id: str
    fields: Card
    again_at: float | None = None  # monotonic, of one that did not answer


class Cards:
    """The cards of all deployments; each endpoint's own words are kept."""

    def __init__(self, tunnels: HostTunnels) -> None:
        self._tunnels = tunnels
        self._reports: dict[str, Report] = {}  # by deployment
        self._asking: dict[str, asyncio.Task[Card]] = {}  # by attempt

    async def of(self, routes: Iterable[Route]) -> list[Card]:
        """Return the cards of deployments, of their further names and their adapters."""
        known = list(routes)
        reported = await asyncio.gather(*(self._reported(each) for each in known))
        return [
            card
            for route, fields in zip(known, reported, strict=True)
            for card in cards_of(route, fields)
        ]

    async def _reported(self, route: Route) -> Card:
        kept = self._reports.get(route.id, Report("", {}))
        reached = (each for each in route.targets if self._tunnels.of(each.host_id))
        target = next(reached, None)
        if target is None:
            return kept.fields
        is_due = kept.again_at is not None and kept.again_at <= monotonic()
        if target.attempt_id == kept.attempt_id and not is_due:
            return kept.fields
        asking = self._asking.get(target.attempt_id)
        if asking is None:
            asking = asyncio.create_task(self._ask(route.id, target))
            self._asking[target.attempt_id] = asking
        return await asyncio.shield(asking)  # one who leaves does not end it for the others

    async def _ask(self, route_id: str, target: Target) -> Card:
        """Return what an endpoint says of its model, and keep it; nothing without an answer."""
        report = Report(target.attempt_id, {}, monotonic() + FAILED_SECONDS)
        try:
            async with asyncio.timeout(SECONDS):
                report = Report(target.attempt_id, await self._fetch(target))
        except (TunnelError, TimeoutError, ValueError, LookupError, TypeError) as error:
            log.info("an endpoint does not say what it serves", cause=repr(error)[:200])
        finally:
            del self._asking[target.attempt_id]
        while len(self._reports) >= MOST_KEPT:
            del self._reports[next(iter(self._reports))]
        self._reports[route_id] = report
        return report.fields

    async def _fetch(self, target: Target) -> Card:
        """Return what an endpoint says of its model.

        Raises:
            TunnelError: the endpoint does not answer.
            ValueError, LookupError, TypeError: its answer is no list of models.
        """
        tunnel = self._tunnels.of(target.host_id)
        headers = [(b"authorization", f"Bearer {target.key}".encode())]
        response = await tunnel.request(target.attempt_id, "GET", MODELS, headers, b"")
        try:
            body = bytearray()
            async for chunk in response.chunks():
                body += chunk
                if len(body) > MOST_BYTES:
                    raise ValueError("the answer is too long")
        finally:
            await response.close()
        card = EndpointCard.model_validate(parse_json(bytes(body))["data"][0])
        return card.model_dump(exclude_none=True)


def cards_of(route: Route, fields: Card) -> list[Card]:
    """Return a deployment's card, then those of its further names and its adapters."""
    card: Card = {
        "id": route.name,
        "object": "model",
        "created": int(route.created_at.timestamp()),
        "owned_by": "slipway",
        "state": route.state.value,
        **fields,
    }
    if route.seconds_to_go is not None:
        card["seconds_to_go"] = round(route.seconds_to_go, 1)
    if route.problem:
        card["problem"] = route.problem
    if route.has_chat_template is not None:
        card["has_chat_template"] = route.has_chat_template
    names = [*route.aliases, *(f"{route.name}/{each}" for each in route.adapters)]
    return [card, *({**card, "id": name, "parent": route.name} for name in names)]
