"""The config.json of a repository of the Hub, for planning a model that the catalog lacks."""

import os
from typing import Any, NamedTuple

from runners.cli.errors import CliError, ExitCode

SECONDS = 30.0


class Published(NamedTuple):
    """A repository as it is named, and its config.json."""

    name: str
    config: dict[str, Any]


def read_repository(name: str, field: str) -> Published:
    """Return the config.json of a repository.

    ``name`` may state a revision or a GGUF file. ``HF_ENDPOINT``, ``HF_TOKEN`` and the proxies
    count as for the Hub's own library.

    Raises:
        CliError: it is no name of a repository, or the Hub cannot be asked or refuses it.
    """
    from planner.specs.base import PlannerError
    from runners.hub.errors import HubError
    from runners.hub.listing import look_up, read_config
    from runners.hub.names import parse
    from runners.hub.settings import HubSettingsError, from_environment

    try:
        repository = parse(name, from_environment(os.environ, hub="huggingface").endpoint)
        settings = from_environment(os.environ, hub=repository.hub)
        listing = look_up(repository, settings, SECONDS)
        config = read_config(listing, settings, SECONDS)
    except (HubError, HubSettingsError, PlannerError) as error:
        code = "unreachable" if getattr(error, "is_out_of_reach", False) else "unknown_model"
        raise CliError(
            f"{field} is {name!r}: {error}. Or download its config.json and give its path.",
            code=code,
            exit_code=ExitCode.FAILED,
            field=field,
        ) from error
    return Published(str(repository), config)
