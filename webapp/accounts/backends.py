"""Who a session belongs to: the user with memberships and teams, in one query."""

from typing import Any

from django.contrib.auth.backends import ModelBackend
from django.contrib.auth.models import User
from django.core.exceptions import PermissionDenied
from django.http import HttpRequest

from webapp.accounts.models import Membership, memberships_keep


class MembershipBackend(ModelBackend):
    """Django's accounts and passwords; a session's user comes with what every page asks next.

    Django's own backend follows in the settings for the sessions of earlier releases, which name
    it. It is asked for their user alone: a wrong password ends here, hashed once.
    """

    def authenticate(
        self,
        request: HttpRequest | None,
        username: str | None = None,
        password: str | None = None,
        **kwargs: Any,
    ) -> User:
        """Return the user of a name and a password.

        Raises:
            PermissionDenied: they are no one's; no other backend is asked.
        """
        user = super().authenticate(request, username, password, **kwargs)
        if user is None:
            raise PermissionDenied
        return user

    def get_user(self, user_id: Any) -> User | None:  # noqa: ANN401 (Django's)
        """Return the user of a session with the memberships, None if the account is closed."""
        joined = Membership.objects.select_related("user", "team")
        memberships = list(joined.filter(user_id=user_id).order_by("pk"))
        if not memberships:
            return super().get_user(user_id)
        user = memberships[0].user
        memberships_keep(user, memberships)
        return user if self.user_can_authenticate(user) else None
