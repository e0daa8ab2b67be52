"""A team's secrets: written once, never shown again, given to jobs by their names.

What is sealed holds team and name beside the value, so that a row that was copied over another
one opens to nothing.
"""

import json
import re
from collections.abc import Iterable

from django.contrib.auth.models import User
from django.db import transaction
from django.views.decorators.debug import sensitive_variables

from webapp.accounts.models import Secret, Team
from webapp.core import vault
from webapp.core.clock import now
from webapp.core.problems import InvalidProblem
from webapp.core.vault import VaultError

NAME = re.compile(r"[A-Z][A-Z0-9_]{1,39}")
SHORTEST, LONGEST = 8, 16_384  # what is shorter could not be masked in a log without harm


@sensitive_variables("value")
def secret_store(*, team: Team, name: str, value: str, by: User) -> Secret:
    """Seal a value under a name of the team, in place of the one that it had.

    Raises:
        InvalidProblem: the name or the value is not fit to be one.
    """
    _check(name, value)
    document = json.dumps({"team": team.pk, "name": name, "value": value})
    secret: Secret = Secret.objects.update_or_create(
        team=team,
        name=name,
        defaults={"sealed": vault.seal(document), "changed_by": by, "changed_at": now()},
    )[0]
    return secret


@sensitive_variables("value")
def _check(name: str, value: str) -> None:
    if not NAME.fullmatch(name):
        raise InvalidProblem(
            "secret_name",
            f"{name[:60]!r} is no name of a secret: 2 to 40 capital letters, digits and "
            "underscores, a letter first, such as HF_TOKEN.",
        )
    if not SHORTEST <= len(value) <= LONGEST:
        raise InvalidProblem(
            "secret_value",
            f"The value has {len(value)} characters; {SHORTEST} to {LONGEST:,} are taken. "
            "A shorter one could not be masked in logs.",
        )
    if "\0" in value:
        raise InvalidProblem("secret_value", "The value holds a null byte, which no file takes.")


def secret_delete(*, secret: Secret) -> None:
    """Forget a secret; jobs that name it are refused by their hosts from now on."""
    secret.delete()


def secret_names(team: Team) -> list[str]:
    """Return what the team's jobs may be given."""
    return list(Secret.objects.filter(team=team).order_by("name").values_list("name", flat=True))


@sensitive_variables()
def secrets_open(*, team_id: str, names: Iterable[str]) -> dict[str, str]:
    """Return the values of a team's secrets by name; a name that is gone is left out.

    Raises:
        VaultError: a sealed text does not open, or it is another row's.
    """
    found: dict[str, str] = {}
    rows = Secret.objects.filter(team=team_id, name__in=set(names))
    for row in rows:
        document = json.loads(vault.unseal(row.sealed))
        if (document.get("team"), document.get("name")) != (team_id, row.name):
            raise VaultError(f"What is stored as {row.name} was sealed as something else.")
        found[row.name] = str(document["value"])
    rows.update(last_given_at=now())
    return found


def secrets_reseal() -> int:
    """Seal every secret anew with the newest key; return how many."""
    with transaction.atomic():
        rows = list(Secret.objects.select_for_update())
        for row in rows:
            row.sealed = vault.reseal(row.sealed)
        Secret.objects.bulk_update(rows, ["sealed"])
    return len(rows)
