"""Hashed file names for every asset, so that a browser may keep them for ever."""

from django.contrib.staticfiles.storage import ManifestStaticFilesStorage


class HashedStaticFilesStorage(ManifestStaticFilesStorage):
    """Manifest storage that falls back to plain names before the first collectstatic."""

    manifest_strict = False

    def stored_name(self, name: str) -> str:
        """Return the hashed name, or the plain one where nothing was collected yet."""
        try:
            return super().stored_name(name)
        except ValueError:
            return name
