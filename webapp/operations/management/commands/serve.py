"""``manage.py serve web|gateway``: one server of a site whose processes are started one by one.

``manage.py up`` starts both at one address. Here each listens alone, as often as wanted; a proxy
passes ``/v1`` and ``/tunnel/`` to the gateways and the rest to the web processes.
"""

import logging
import os

import uvicorn
from django.core.management.base import BaseCommand, CommandError, CommandParser
from django.urls import get_resolver

from webapp.boot.front import APPLICATIONS, WEB
from webapp.core.connections import HeaderDeadlineProtocol
from webapp.core.logs import give_back_memory
from webapp.core.readiness import await_preparation
from webapp.core.serve import config_of
from webapp.core.site_settings import is_behind_proxy, trusted_proxies

LAST_PORT = 65_535


class Command(BaseCommand):
    """Serve until SIGTERM or SIGINT."""

    requires_system_checks = ()  # they load every page, before the process does so itself
    help = "Run one web process or one gateway, of a site whose processes are started one by one."

    def add_arguments(self, parser: CommandParser) -> None:
        """Add which server it is, and its address."""
        parser.add_argument("part", choices=APPLICATIONS, help="which of the two servers")
        parser.add_argument(
            "--host", default="127.0.0.1", help="address to bind (default %(default)s)"
        )
        parser.add_argument("--port", type=int, default=8000, help="port (default %(default)s)")

    def handle(self, *_args: object, part: str, host: str, port: int, **_options: object) -> None:
        """Serve, once ``manage.py prepare`` of this version has run.

        Raises:
            CommandError: the port is none; an address that is used ends the process.
        """
        if not 0 < port <= LAST_PORT:
            raise CommandError(f"--port is {port}; it can be 1 to {LAST_PORT}.")
        await_preparation()  # static files are listed once, at the start
        give_back_memory()  # before threads get their malloc arenas
        proxies = trusted_proxies(os.environ) if is_behind_proxy(os.environ) else ()
        application = APPLICATIONS[part]
        config = config_of(
            application, HeaderDeadlineProtocol, ",".join(proxies), host=host, port=port
        )
        config.load()
        logging.getLogger("uvicorn.access").propagate = False  # which Django's set-up reset
        if part == WEB:
            _ = get_resolver().url_patterns  # all pages: else the first request waits for them
        uvicorn.Server(config).run()
