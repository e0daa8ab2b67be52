"""The engine process: llama.cpp's HTTP server on a loopback port, until its parent ends.

Its settings are one JSON line on stdin, so that the key appears in no process list.
"""

import importlib
import json
import signal
import sys

from runners.jobs.serve.llamacpp.arguments import ArgumentsError, read_arguments
from runners.jobs.serve.llamacpp.writer import ARGUMENTS_REFUSED, LISTENING
from runners.supervision.child import die_with


def main() -> None:
    """Load the model, print the listening address, and serve."""
    settings = json.loads(sys.stdin.readline())
    die_with(settings["parent"])
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # the parent ends it after its clients
    xllamacpp = importlib.import_module("xllamacpp")  # only this environment has it
    params = xllamacpp.CommonParams()
    if settings["arguments"]:  # first: what the endpoint sets itself stands over them
        try:
            read_arguments(params, settings["arguments"])
        except ArgumentsError as error:
            sys.exit(f"{ARGUMENTS_REFUSED}{error}")
    params.model.path = settings["path"]
    params.hostnames = ["127.0.0.1"]
    params.port = 0
    params.api_keys = [settings["key"]]
    params.n_parallel = settings["slots"]
    params.n_ctx = settings["context_tokens"]  # of all slots together
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = settings["threads"]
    params.lora_adapters = [  # without effect unless a request names one
        xllamacpp.CommonAdapterLoraInfo(each, 0.0) for each in settings["adapters"]
    ]
    params.fit_params = False
    params.ui = False
    server = xllamacpp.Server(params)
    sys.stdout.write(f"{LISTENING}{server.listening_address}\n")
    sys.stdout.flush()
    signal.pause()


if __name__ == "__main__":
    main()
