"""Endpoints whose engine has an OpenAI API itself, as a child process behind our HTTP server.

Keys, limits, errors, idle stop and metrics are the endpoint's own; a request is validated by
``request_fields`` and forwarded, and the engine's response is returned unchanged.
"""
