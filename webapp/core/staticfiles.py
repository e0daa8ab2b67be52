"""Hashed file names for every asset, so that a browser may keep them for ever."""

from django.contrib.staticfiles.storage import ManifestStaticFilesStorage


class HashedStaticFilesStorage(ManifestStaticFilesStorage):
    """Manifest storage that falls back to plain names before the first collectstatic."""

    manifest_strict = False
