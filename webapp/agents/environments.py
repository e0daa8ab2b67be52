"""The named environments of a host: their reported states and the operators' orders."""

from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from django.db import transaction
from pydantic import ValidationError

from runners.shared.messages import MAIN, EnvironmentOrder, EnvironmentState
from webapp.audit.models import event_record
from webapp.core.ids import new_ulid
from webapp.core.problems import InvalidProblem, NotFoundProblem
from webapp.hosts.models import Host
from webapp.hosts.services import checks_update, publish_host_checks

ENVIRONMENTS, ORDERS = "environments", "environment_orders"  # keys of Host.checks
ACTIONS = ("build", "remove")
Findings = dict[str, Any]


@dataclass(frozen=True)
class EnvironmentRow:
    """One environment on the host's page."""

    state: EnvironmentState
    pending_action: str  # pending order: "build", "remove" or ""

    @property
    def is_agent_environment(self) -> bool:
        """Return whether the agent runs in this environment, so that it cannot be removed."""
        return self.state.name == MAIN

    @property
    def is_built(self) -> bool:
        """Return whether a build of the environment is on the host's disk."""
        return self.state.stage in {"ready", "outdated"}

    @property
    def share(self) -> float | None:
        """Return the completed fraction of a running build, or None if none runs."""
        is_building = self.state.stage == "building" and self.state.total
        return self.state.done / self.state.total if is_building else None


def environments_of(host: Host) -> list[EnvironmentRow]:
    """Return the environments that a host reported, the agent's own first.

    States that another version of this server stored may not parse: they are skipped until the
    host reports them again.
    """
    orders = host.checks.get(ORDERS, {})
    states = []
    for each in host.checks.get(ENVIRONMENTS, ()):
        with suppress(ValidationError):
            states.append(EnvironmentState.model_validate(each))
    return [EnvironmentRow(each, orders.get(each.name, {}).get("action", "")) for each in states]


def orders_of(host: Host) -> tuple[EnvironmentOrder, ...]:
    """Return the pending environment orders of a host."""
    orders: Mapping[str, Findings] = host.checks.get(ORDERS, {})
    return tuple(
        EnvironmentOrder(name=name, action=each["action"], order_id=each["order_id"])
        for name, each in orders.items()
    )


def checks_with_environments(
    checks: Findings, environments: Iterable[EnvironmentState]
) -> Findings:
    """Return the host's checks with its reported environments, without completed orders.

    ``environments`` are the states that the latest heartbeat reports.
    """
    states = list(environments)
    done, names = {each.order_id for each in states}, {each.name for each in states}
    orders = {
        name: order
        for name, order in checks.get(ORDERS, {}).items()
        if name in names and order["order_id"] not in done
    }
    return {
        **checks,
        ENVIRONMENTS: [each.model_dump(mode="json") for each in states],
        ORDERS: orders,
    }


def environment_order(*, host: Host, name: str, action: str, by: str) -> None:
    """Order a host to build or remove an environment; a later order replaces this one.

    Raises:
        InvalidProblem: the agent's own environment cannot be built or removed.
        NotFoundProblem: the host reported no environment of that name.
    """
    if action not in ACTIONS or name == MAIN:
        raise InvalidProblem(
            "environment",
            f"The environment {name} cannot be rebuilt or removed: the agent runs in it.",
        )
    if name not in {row.state.name for row in environments_of(host)}:
        raise NotFoundProblem(
            "environment",
            f"{host.name} has no environment {name}. Its page lists the environments.",
        )
    with transaction.atomic():
        checks = Host.objects.select_for_update(no_key=True).only("checks").get(pk=host.pk).checks
        order = {"action": action, "order_id": new_ulid(), "by": by}
        host.checks = checks_update(host.pk, **{ORDERS: {**checks.get(ORDERS, {}), name: order}})
        event_record(host, f"host.environment_{action}", by, detail={"environment": name})
    publish_host_checks(host)
