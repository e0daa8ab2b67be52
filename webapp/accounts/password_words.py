"""Passwords of words that anybody who knows the site would try first."""

from django.conf import settings
from django.contrib.auth.models import AbstractBaseUser
from django.core.exceptions import ValidationError

WORDS = ("slipway", "password", "administrator", "admin", "operator", "practitioner", "viewer")
SHORTEST_WORD = 4
LEAST_BESIDE = 8  # characters that are in none of the words


class ContextWordsValidator:
    """Refuses passwords with fewer than eight characters beside words of the context.

    The words: ``WORDS``, the parts of the site's names and of the person's teams' names.
    """

    def validate(self, password: str, user: AbstractBaseUser | None = None) -> None:
        """Check a password.

        Raises:
            ValidationError: little of it is not such a word; the message names one.
        """
        rest, found = password.casefold(), ""
        for word in sorted(context_words(user), key=len, reverse=True):
            if word in rest:
                rest, found = rest.replace(word, ""), found or word
        if found and len(rest) < LEAST_BESIDE:
            raise ValidationError(
                f"This password is little more than “{found}”, a word that belongs to this site. "
                f"Use at least {LEAST_BESIDE} other characters.",
                code="password_context",
            )

    def get_help_text(self) -> str:
        """Return the rule for forms."""
        return "Your password cannot consist of words that belong to this site."


def context_words(user: AbstractBaseUser | None) -> set[str]:
    """Return the words of the context in small letters; those of teams for a stored account."""
    from webapp.accounts.models import Membership  # here: the settings name this module

    names = [name.replace(".", " ").replace("-", " ") for name in settings.ALLOWED_HOSTS]
    if user is not None and user.pk is not None:
        names += Membership.objects.filter(user_id=user.pk).values_list("team__name", flat=True)
    words = {word.strip("'.,").casefold() for name in names for word in name.split()}
    return set(WORDS) | {word for word in words if len(word) >= SHORTEST_WORD}
