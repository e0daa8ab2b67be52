"""Django settings; installation-specific values come from environment variables."""

import os
import sys
from pathlib import Path
from typing import Any

import dj_database_url
import django_stubs_ext
from csp.constants import NONCE, NONE, SELF

from runners.shared.addresses import is_loopback
from webapp.boot.broker import own_url
from webapp.core.bodies import DEFAULT_BYTES
from webapp.core.log_collector import collector_start
from webapp.core.logs import configure_logs, fault_logging
from webapp.core.site_settings import (
    admin_networks,
    admin_path,
    allowed_hosts,
    breached_passwords,
    certificates,
    check,
    data_folder,
    database_url,
    email_of,
    flag,
    gateways,
    public_hosts,
    public_site,
    read_secret_files,
    redis_url,
    secret_key,
    syslog_address,
)
from webapp.core.time_zones import time_zone

django_stubs_ext.monkeypatch()
read_secret_files(os.environ)
_collector = collector_start(syslog_address(os.environ))
configure_logs(_collector)
LOGGING = fault_logging(_collector)

BASE_DIR = Path(__file__).resolve().parent.parent
check(os.environ)
DATA_DIR = data_folder(os.environ, BASE_DIR / "var")
SECRET_KEY = secret_key(os.environ, DATA_DIR)
DEBUG = flag(os.environ, "SLIPWAY_DEBUG")
ALLOWED_HOSTS = [
    "127.0.0.1",
    "localhost",
    "[::1]",
    *allowed_hosts(os.environ.get("SLIPWAY_ALLOWED_HOSTS", "")),
    *public_hosts(os.environ.get("SLIPWAY_PUBLIC_URL", "")),
]

# Whoever uses the site sits at this machine: nobody else's loopback is read as theirs.
IS_ON_ONE_MACHINE = all(is_loopback(name.strip("[]")) for name in ALLOWED_HOSTS)

INSTALLED_APPS = [
    "webapp.accounts",
    "webapp.hosts",
    "webapp.plans",
    "webapp.modelhub",
    "webapp.datasets",
    "webapp.jobs",
    "webapp.tunings",
    "webapp.workflows",
    "webapp.deployments",
    "webapp.servers",
    "webapp.audit",
    "webapp.metrics",
    "webapp.core",
    "webapp.operations",
    "template_partials",
    "ninja",
    "webapp.operations.staff_app.StaffConfig",
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
    "webapp.core.middleware.ReleaseMiddleware",  # outside all that set request attributes
    "webapp.core.middleware.PoliciesMiddleware",  # outer: applies to errors and files too
    "webapp.core.middleware.AddressMiddleware",  # before the redirect to TLS, which it explains
    "django.middleware.security.SecurityMiddleware",
    "webapp.core.staticfiles.StaticFilesMiddleware",
    "webapp.core.middleware.CompressionMiddleware",
    "webapp.core.middleware.ReadableTextMiddleware",
    "django.contrib.sessions.middleware.SessionMiddleware",
    "django.middleware.common.CommonMiddleware",
    "webapp.accounts.sign_in.CsrfMiddleware",
    "django.contrib.auth.middleware.AuthenticationMiddleware",
    "django.contrib.auth.middleware.LoginRequiredMiddleware",
    "webapp.accounts.initial_passwords.OwnPasswordFirstMiddleware",
    "webapp.accounts.sign_in.SessionInUse",
    "django.contrib.messages.middleware.MessageMiddleware",
    "django.middleware.clickjacking.XFrameOptionsMiddleware",
    "django_htmx.middleware.HtmxMiddleware",
    "webapp.core.middleware.ProblemMiddleware",
]
AUTHENTICATION_BACKENDS = [
    "webapp.accounts.backends.MembershipBackend",
    "django.contrib.auth.backends.ModelBackend",  # sessions of releases before it
]
ROOT_URLCONF = "webapp.urls"
ASGI_APPLICATION = "webapp.asgi.application"
TEMPLATES = [
    {
        "BACKEND": "webapp.core.staticfiles.Templates",
        "NAME": "django",
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
    if url := database_url(os.environ):
        main: dict[str, Any] = dict(dj_database_url.parse(url))
        if main["ENGINE"] == "django.db.backends.postgresql":
            pool = {"min_size": 1, "max_size": 10, "timeout": 5}
            main["OPTIONS"] = {**main.get("OPTIONS", {}), "pool": pool}
            main["CONN_HEALTH_CHECKS"] = True  # the pool has dead connections after a restart
            return {"default": main}
        main["OPTIONS"] = _SQLITE_OPTIONS
        metrics = {**main, "NAME": f"{main['NAME']}-metrics"}
        return {"default": main, "metrics": metrics}
    sqlite = {"ENGINE": "django.db.backends.sqlite3", "OPTIONS": _SQLITE_OPTIONS}
    # Tests use files too, so that locks between processes behave as in production.
    return {
        alias: {
            **sqlite,
            "NAME": str(DATA_DIR / f"{name}.sqlite3"),
            "TEST": {"NAME": str(DATA_DIR / f"test-{name}.sqlite3")},
        }
        for alias, name in (("default", "slipway"), ("metrics", "metrics"))
    }


DATABASES = _databases()
DATABASE_ROUTERS = ["webapp.metrics.models.MetricsRouter"]
METRICS_DATABASE = "metrics" if "metrics" in DATABASES else "default"
DEFAULT_AUTO_FIELD = "django.db.models.BigAutoField"

REDIS_URL = redis_url(os.environ, "REDIS_URL") or own_url(DATA_DIR)
REDIS_CA = certificates(os.environ, "SLIPWAY_REDIS_CA")  # CA file for a Redis behind TLS
# Redis URL for hosts on other machines; without it they use HTTP only.
HOST_REDIS_URL = redis_url(os.environ, "SLIPWAY_HOST_REDIS_URL") or (
    REDIS_URL if REDIS_URL.startswith("rediss://") else None
)
# WebSocket URLs of the gateways for hosts with endpoints; empty: this site is the gateway.
GATEWAYS = gateways(os.environ)
# Drills (test jobs without a model, which occupy a host) must be enabled by the operator.
ALLOWS_DRILLS = flag(os.environ, "SLIPWAY_DRILLS")
ARTEFACTS_DIR = DATA_DIR / "artefacts"
DATASETS_DIR = DATA_DIR / "datasets"
COPIES_DIR = DATA_DIR / "copies"  # models on their way from one host to another
DATA_UPLOAD_MAX_MEMORY_SIZE = DEFAULT_BYTES  # of what is no file

LANGUAGE_CODE = "en-gb"
TIME_ZONE, ZONE_WORDS = time_zone(os.environ)
if ZONE_WORDS:
    sys.stderr.write(f"{ZONE_WORDS}\n")
USE_I18N = False
USE_TZ = True

STATIC_URL = "static/"
STATICFILES_DIRS = [BASE_DIR / "static"]
STATICFILES_FINDERS = [
    "django.contrib.staticfiles.finders.FileSystemFinder",
    "webapp.core.staticfiles.LoadedFilesFinder",
]
STATIC_ROOT = DATA_DIR / "static"
STORAGES = {
    "default": {"BACKEND": "django.core.files.storage.FileSystemStorage"},
    "staticfiles": {"BACKEND": "webapp.core.staticfiles.HashedStaticFilesStorage"},
}

# Path of the administration; an unusual name avoids scans of the default one.
ADMIN_PATH = admin_path(os.environ)
ADMIN_NETWORKS = admin_networks(os.environ)  # empty: from anywhere
# Argon2 for new passwords; PBKDF2 hashes of older versions are replaced at login.
PASSWORD_HASHERS = [
    "webapp.accounts.sign_in.SmallArgon2PasswordHasher",
    "django.contrib.auth.hashers.PBKDF2PasswordHasher",
]
AUTH_PASSWORD_VALIDATORS: list[dict[str, Any]] = [
    {
        "NAME": "django.contrib.auth.password_validation.MinimumLengthValidator",
        "OPTIONS": {"min_length": 12},
    },
    {"NAME": "django.contrib.auth.password_validation.CommonPasswordValidator"},
    {"NAME": "webapp.accounts.password_words.ContextWordsValidator"},
    {"NAME": "webapp.accounts.initial_passwords.InitialPasswordValidator"},
    {"NAME": "django.contrib.auth.password_validation.UserAttributeSimilarityValidator"},
]
if _breached := breached_passwords(os.environ):
    AUTH_PASSWORD_VALIDATORS.append(
        {
            "NAME": "webapp.accounts.breached_passwords.BreachedPasswordValidator",
            "OPTIONS": {"source": _breached},
        }
    )
PASSWORD_RESET_TIMEOUT = 24 * 3600
LOGIN_URL = "login"
LOGIN_REDIRECT_URL = "home"
LOGOUT_REDIRECT_URL = "login"
SESSION_COOKIE_HTTPONLY = True
SESSION_COOKIE_AGE = 12 * 3600  # after the last request
SESSION_COOKIE_SAMESITE = "Lax"
MESSAGE_STORAGE = "webapp.accounts.sign_in.MessageStorage"  # a cookie of this host alone
CSRF_USE_SESSIONS = True  # for logged-in users; see webapp/accounts/sign_in.py
SECURE_CONTENT_TYPE_NOSNIFF = True
X_FRAME_OPTIONS = "DENY"
_EMAIL = email_of(os.environ)
HAS_EMAIL = bool(_EMAIL)
globals().update(_EMAIL)
globals().update(public_site(os.environ.get("SLIPWAY_PUBLIC_URL", "")))
# The second style source is the hash of the empty string: Plotly inserts empty <style> elements
# and fills them through CSSOM.
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
