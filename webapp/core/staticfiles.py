"""Static files and templates."""

import gzip
import os
import tempfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import brotli
from asgiref.sync import async_to_sync, sync_to_async
from django.contrib.staticfiles.finders import AppDirectoriesFinder
from django.contrib.staticfiles.storage import ManifestStaticFilesStorage
from django.core.files.base import File
from django.http import HttpRequest, HttpResponseBase
from django.template.backends import django
from django.template.context import make_context
from django.utils.safestring import SafeString
from servestatic.middleware import ServeStaticMiddleware

# ---------------------------------------------------------------------------
# Storage of static files with hashed names and compressed variants, for immutable caching.
#
# Files may be collected while a web process reads them, for example at a start after a crash. So
# every file is replaced atomically and none is deleted; files of older releases stay for pages
# that are still open.
#
# Each hashed file has compressed variants, ``.br`` and ``.gz``, which servestatic selects by the
# Accept-Encoding header. The content of a hashed name never changes, so a variant is written once.
# All assets take Brotli 0.29 s of processor time at quality 6, 1.45 s at 9 for 1.3 % less and
# several times that at 11: every first start waits for it. So files of packages that no page loads
# (two thirds of all bytes) are not collected.
# ---------------------------------------------------------------------------


READABLE_BY_ALL = 0o644
BROTLI_QUALITY = 6
GZIP_LEVEL = 6
SMALLEST_BYTES = 500  # for smaller files, the headers outweigh the gain
WORTH_IT = 0.95  # maximum ratio; fonts and pictures are compressed already
ENCODERS: dict[str, Callable[[bytes], bytes]] = {
    ".br": lambda data: brotli.compress(data, quality=BROTLI_QUALITY),
    ".gz": lambda data: gzip.compress(data, GZIP_LEVEL, mtime=0),
}


# Of django-htmx everything (the site has its own htmx), of django-ninja the pages of Redoc.
NEVER_LOADED = ("*.map", "django_htmx", "redoc.standalone.js")


class LoadedFilesFinder(AppDirectoriesFinder):
    """Finder of the files of installed apps, without those that no page loads."""

    def list(self, ignore_patterns: Iterable[str] | None) -> Iterator[Any]:
        """Yield the path and storage of each file to collect; servestatic ignores none."""
        yield from super().list([*(ignore_patterns or ()), *NEVER_LOADED])


class HashedStaticFilesStorage(ManifestStaticFilesStorage):
    """Manifest storage that falls back to unhashed names before the first collectstatic."""

    manifest_strict = False
    patterns = tuple(  # references to source maps stay: the maps are not collected
        (glob, tuple(each for each in found if "sourceMappingURL" not in str(each)))
        for glob, found in ManifestStaticFilesStorage.patterns
    )

    def stored_name(self, name: str) -> str:
        """Return the hashed name, or the plain name before the first collection."""
        try:
            return super().stored_name(name)
        except ValueError:
            return name

    def delete(self, name: str) -> None:
        """Keep the file: it is replaced atomically, and a process may be reading it."""

    def get_available_name(self, name: str, max_length: int | None = None) -> str:  # noqa: ARG002 -- as in Django
        """Return the name itself: an existing file is replaced."""
        return name

    def post_process(self, *args: Any, **kwargs: Any) -> Iterator[Any]:
        """Yield each file with its hashed name, after writing its compressed variants."""
        for name, hashed, processed in super().post_process(*args, **kwargs):
            if hashed and not isinstance(processed, Exception):
                _compress(Path(self.path(hashed)), root=Path(self.location))
            yield name, hashed, processed

    def _save(self, name: str, content: File[Any]) -> str:
        """Write the file atomically."""
        pieces = (
            piece.encode() if isinstance(piece, str) else piece for piece in content.chunks()
        )
        _replace(Path(self.path(name)), pieces, root=Path(self.location))
        return name


def _compress(path: Path, *, root: Path) -> None:
    """Write the missing compressed variants of a hashed file, if they are small enough."""
    if path.stat().st_size < SMALLEST_BYTES:
        return
    for suffix, encode in ENCODERS.items():
        variant = path.with_name(path.name + suffix)
        if variant.exists():
            continue
        data = path.read_bytes()
        encoded = encode(data)
        if len(encoded) <= WORTH_IT * len(data):
            _replace(variant, [encoded], root=root)


def _replace(target: Path, pieces: Iterable[bytes], *, root: Path) -> None:
    """Write a file atomically, through a temporary file next to the folder ``root``."""
    target.parent.mkdir(parents=True, exist_ok=True)
    descriptor, fresh = tempfile.mkstemp(prefix=f"{root.name}-", dir=root.parent)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.writelines(pieces)
        Path(fresh).chmod(READABLE_BY_ALL)
        Path(fresh).replace(target)
    except BaseException:
        Path(fresh).unlink(missing_ok=True)
        raise


class StaticFilesMiddleware:
    """Serves static files with servestatic's middleware, and hands on all else in its own thread.

    That middleware is asynchronous alone: between synchronous ones it took every request through
    another thread and back, 2 ms of processor time each.
    """

    def __init__(self, get_response: Callable[[HttpRequest], HttpResponseBase]) -> None:
        self.get_response = get_response
        self._static = ServeStaticMiddleware(sync_to_async(get_response))

    def __call__(self, request: HttpRequest) -> HttpResponseBase:
        """Return the file at the request's path, or what the next handler responds."""
        if request.path_info.startswith(self._static.static_prefix):
            response: HttpResponseBase = async_to_sync(self._static)(request)
            return response
        return self.get_response(request)


# ---------------------------------------------------------------------------
# Django's template backend with contexts that are freed right after rendering.
#
# Django's ``ContextDict`` references its context. Through this cycle, all rows of a page would
# live until a collection of the oldest generation.
# ---------------------------------------------------------------------------


class Templates(django.DjangoTemplates):
    """Django's engine with templates that free their contexts."""

    def from_string(self, template_code: str) -> "Template":
        """Return a template from its text."""
        return Template(super().from_string(template_code).template, self)

    def get_template(self, template_name: str) -> "Template":
        """Return a template by its name."""
        return Template(super().get_template(template_name).template, self)


class Template(django.Template):
    """A template that frees its context after rendering."""

    def render(
        self, context: dict[str, Any] | None = None, request: HttpRequest | None = None
    ) -> SafeString:
        """Return the rendered text."""
        django_context = make_context(context, request, autoescape=self.backend.engine.autoescape)
        try:
            return self.template.render(django_context)
        finally:
            django_context.dicts.clear()
