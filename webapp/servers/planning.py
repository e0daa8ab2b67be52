"""An observed server as a text that the wizard reads: “Plan this”."""

import shlex

from webapp.servers.engines import BY_NAME, Engine
from webapp.servers.models import ObservedServer

UNKNOWN = Engine("", "")  # any server of OpenAI's API is planned as one of the usual engine


def command_of(server: ObservedServer) -> str:
    """Return a command line that starts such a server, for the wizard's pasted text.

    Only what was read stands in it: the model and its longest request. A model that is named as a
    file or by an alias is named as it is, and the wizard says if it finds none of that name.
    Empty without a model.
    """
    if not server.served_models:
        return ""
    engine, first = BY_NAME.get(server.engine, UNKNOWN), server.served_models[0]
    command = engine.command.format(model=shlex.quote(first.get("root") or first["name"]))
    length, slots = first.get("max_model_len"), first.get("slots")
    if not length or not engine.length_option:
        return command
    if not slots or not engine.slots_option:
        return f"{command} {engine.length_option} {length}"
    return f"{command} {engine.length_option} {length * slots} {engine.slots_option} {slots}"


def planned_as(server: ObservedServer) -> str:
    """Return what differs between the server and what is planned, as a sentence; "" if nothing."""
    engine = BY_NAME.get(server.engine, UNKNOWN)
    if not engine.planned_as:
        return ""
    return (
        f"The planner knows no {engine.title}: the plan is for {engine.planned_as} with the same "
        "model and longest request."
    )
