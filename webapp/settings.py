"""Settings of the web side; what differs per installation comes from the environment."""

import os
import secrets
from pathlib import Path
from typing import Any

import dj_database_url
import django_stubs_ext
from csp.constants import NONCE, NONE, SELF

from webapp.accounts.networks import networks
from webapp.core.logs import configure_logs
from webapp.core.public_site import public_hosts, public_site

django_stubs_ext.monkeypatch()
configure_logs()

BASE_DIR = Path(__file__).resolve().parent.parent
DATA_DIR = Path(os.environ.get("SLIPWAY_DATA_DIR", BASE_DIR / "var")).resolve()
DATA_DIR.mkdir(mode=0o700, parents=True, exist_ok=True)


def _secret_key() -> str:
    """Return the site's secret from the environment, or from a 0600 file made on first use."""
    if from_environment := os.environ.get("SLIPWAY_SECRET_KEY"):
        return from_environment
    path = DATA_DIR / "secret_key"
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:
        return path.read_text().strip()
    with os.fdopen(descriptor, "w") as file:
        file.write(secrets.token_urlsafe(48))
    return path.read_text().strip()


SECRET_KEY = _secret_key()
DEBUG = os.environ.get("SLIPWAY_DEBUG") == "1"
ALLOWED_HOSTS = [
    "127.0.0.1",
    "localhost",
    "[::1]",
    *filter(None, os.environ.get("SLIPWAY_ALLOWED_HOSTS", "").split(",")),
    *public_hosts(os.environ.get("SLIPWAY_PUBLIC_URL", "")),
]

INSTALLED_APPS = [
    "webapp.accounts",
    "webapp.hosts",
    "webapp.plans",
    "webapp.modelhub",
    "webapp.datasets",
    "webapp.jobs",
    "webapp.audit",
    "webapp.metrics",
    "webapp.core",
    "template_partials",
    "ninja",
    "webapp.accounts.staff_app.StaffConfig",
    "django.contrib.auth",
    "django.contrib.contenttypes",
    "django.contrib.humanize",
    "django.contrib.sessions",
    "django.contrib.messages",
    "servestatic.runserver_nostatic",
    "django.contrib.staticfiles",
    "django_htmx",
]
MIDDLEWARE = [
    "csp.middleware.CSPMiddleware",  # first: its header is on every answer, errors and files too
    "django.middleware.security.SecurityMiddleware",
    "servestatic.middleware.ServeStaticMiddleware",
    "django.contrib.sessions.middleware.SessionMiddleware",
    "django.middleware.common.CommonMiddleware",
    "django.middleware.csrf.CsrfViewMiddleware",
    "django.contrib.auth.middleware.AuthenticationMiddleware",
    "django.contrib.auth.middleware.LoginRequiredMiddleware",
    "webapp.accounts.session_middleware.SessionInUse",
    "django.contrib.messages.middleware.MessageMiddleware",
    "django.middleware.clickjacking.XFrameOptionsMiddleware",
    "django_htmx.middleware.HtmxMiddleware",
    "webapp.core.middleware.ProblemMiddleware",
]
ROOT_URLCONF = "webapp.urls"
ASGI_APPLICATION = "webapp.asgi.application"
TEMPLATES = [
    {
        "BACKEND": "django.template.backends.django.DjangoTemplates",
        "DIRS": [BASE_DIR / "templates"],
        "APP_DIRS": True,
        "OPTIONS": {
            "context_processors": [
                "django.template.context_processors.request",
                "django.contrib.auth.context_processors.auth",
                "django.contrib.messages.context_processors.messages",
            ]
        },
    }
]

_SQLITE_OPTIONS = {
    "timeout": 20,
    "transaction_mode": "IMMEDIATE",
    "init_command": "PRAGMA journal_mode=WAL; PRAGMA synchronous=NORMAL",
}


def _databases() -> dict[str, dict[str, Any]]:
    """Return the main database and, on SQLite, the metric store's own file."""
    if url := os.environ.get("DATABASE_URL"):
        main: dict[str, Any] = dict(dj_database_url.parse(url))
        if main["ENGINE"] == "django.db.backends.postgresql":
            pool = {"min_size": 1, "max_size": 10, "timeout": 5}
            main["OPTIONS"] = {**main.get("OPTIONS", {}), "pool": pool}
            main["CONN_HEALTH_CHECKS"] = True  # after a restart the pool is full of dead ones
            return {"default": main}
        main["OPTIONS"] = _SQLITE_OPTIONS
        metrics = {**main, "NAME": f"{main['NAME']}-metrics"}
        return {"default": main, "metrics": metrics}
    sqlite = {"ENGINE": "django.db.backends.sqlite3", "OPTIONS": _SQLITE_OPTIONS}
    # Tests use files too: only there do the locks of two processes behave as in production.
    return {
        alias: {
            **sqlite,
            "NAME": str(DATA_DIR / f"{name}.sqlite3"),
            "TEST": {"NAME": str(DATA_DIR / f"test-{name}.sqlite3")},
        }
        for alias, name in (("default", "slipway"), ("metrics", "metrics"))
    }


DATABASES = _databases()
DATABASE_ROUTERS = ["webapp.metrics.router.MetricsRouter"]
METRICS_DATABASE = "metrics" if "metrics" in DATABASES else "default"
DEFAULT_AUTO_FIELD = "django.db.models.BigAutoField"

REDIS_URL = os.environ.get("REDIS_URL", f"unix://{DATA_DIR / 'redis.sock'}")
REDIS_CA = os.environ.get("SLIPWAY_REDIS_CA") or None  # who vouches for a Redis behind TLS
# What hosts on other machines are told; without it they work over HTTP alone.
HOST_REDIS_URL = os.environ.get("SLIPWAY_HOST_REDIS_URL") or (
    REDIS_URL if REDIS_URL.startswith("rediss://") else None
)
# Rehearsed jobs, which take a host's turn without a model: only where an operator wants them.
ALLOWS_DRILLS = os.environ.get("SLIPWAY_DRILLS") == "1"
ARTEFACTS_DIR = DATA_DIR / "artefacts"
DATASETS_DIR = DATA_DIR / "datasets"

LANGUAGE_CODE = "en-gb"
TIME_ZONE = os.environ.get("TZ") or "UTC"
USE_I18N = False
USE_TZ = True

STATIC_URL = "static/"
STATICFILES_DIRS = [BASE_DIR / "static"]
STATIC_ROOT = DATA_DIR / "static"
STORAGES = {
    "default": {"BACKEND": "django.core.files.storage.FileSystemStorage"},
    "staticfiles": {"BACKEND": "webapp.core.staticfiles.HashedStaticFilesStorage"},
}

# Where the administration lies; another name spares it the visits of whoever tries the usual one.
ADMIN_PATH = os.environ.get("SLIPWAY_ADMIN_PATH", "admin").strip("/") + "/"
ADMIN_NETWORKS = networks(os.environ.get("SLIPWAY_ADMIN_NETWORKS", ""))  # none: from anywhere
LOGIN_URL = "login"
LOGIN_REDIRECT_URL = "home"
LOGOUT_REDIRECT_URL = "login"
SESSION_COOKIE_HTTPONLY = True
SESSION_COOKIE_AGE = 12 * 3600  # after the last request
SESSION_COOKIE_SAMESITE = "Lax"
SECURE_CONTENT_TYPE_NOSNIFF = True
X_FRAME_OPTIONS = "DENY"
globals().update(public_site(os.environ.get("SLIPWAY_PUBLIC_URL", "")))
# The second style source is the hash of the empty string: Plotly fills empty <style>
# elements through CSSOM; nothing else is let in.
CONTENT_SECURITY_POLICY = {
    "DIRECTIVES": {
        "default-src": [SELF],
        "script-src": [SELF, NONCE],
        "style-src": [SELF, "'sha256-47DEQpj8HBSa+/TImW+5JCeuQeRkm5NMpJWZG3hSuFU='"],
        "img-src": [SELF, "data:"],
        "connect-src": [SELF],
        "object-src": [NONE],
        "base-uri": [NONE],
        "frame-ancestors": [NONE],
        "form-action": [SELF],
    }
}
