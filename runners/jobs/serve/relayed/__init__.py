"""Endpoints whose engine speaks OpenAI's form itself, as a child behind our door.

Keys, limits, errors, idle stop and figures stay ours; a request is held to what is written down
in ``wishes`` and handed on, and its answer comes back as the engine wrote it.
"""
