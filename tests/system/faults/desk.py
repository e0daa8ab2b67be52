"""A person at the installation under test: services and laws, called line by line.

Runs as a process of its own, like the web process that it stands beside: whatever is asked here
goes through the product's services into the same database. One JSON object a line each way. Its
argument names the module that lists the calls.
"""

import importlib
import json
import os
import sys
import traceback

import django
from django.db import close_old_connections


def main() -> None:
    """Answer one call a line until the input ends."""
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # what the product logs is no answer
    os.environ.setdefault("DJANGO_SETTINGS_MODULE", "webapp.settings")
    django.setup()
    calls = importlib.import_module(sys.argv[1]).CALLS  # models need the line above
    for line in sys.stdin:
        name, arguments = json.loads(line)
        close_old_connections()
        try:
            answer = {"answer": calls[name](**arguments)}
        except Exception:
            answer = {"error": traceback.format_exc()}
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


if __name__ == "__main__":
    main()
