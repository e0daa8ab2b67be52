"""``manage.py rotate_secrets``: encrypt all secrets with a new key and delete the old keys."""

from typing import Any

from django.core.management.base import BaseCommand, CommandError

from webapp.accounts.secrets import secrets_reseal
from webapp.core import vault
from webapp.core.vault import VaultError
from webapp.servers.keys import keys_reseal


class Command(BaseCommand):
    """Rotate the encryption key of the teams' secrets."""

    help = "Seal the teams' secrets and servers' keys anew; the old keys go once that is done."

    def handle(self, *_args: Any, **_options: Any) -> None:
        """Add a key if keys are in a file, encrypt the secrets again, delete the old keys."""
        try:
            if vault.has_own_file():
                vault.add_key()
            count = secrets_reseal() + keys_reseal()
        except VaultError as error:
            raise CommandError(str(error)) from error
        if vault.has_own_file():
            vault.drop_old_keys()
            self.stdout.write(f"{count} sealed with a new key; the old ones are gone.")
        else:
            self.stdout.write(
                f"{count} sealed with the first key of {vault.VARIABLE}; the others may go now."
            )
