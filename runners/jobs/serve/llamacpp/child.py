"""The engine's process: llama.cpp's own HTTP server on a loopback port, until its parent ends.

Its wish comes as one JSON line on stdin, so that its key is in no list of processes.
"""

import importlib
import json
import signal
import sys

from runners.jobs.serve.llamacpp.process import LISTENING
from runners.parentage import die_with


def main() -> None:
    """Load the model, say where it listens, and serve."""
    wish = json.loads(sys.stdin.readline())
    die_with(wish["parent"])
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # the door ends it when its clients are served
    xllamacpp = importlib.import_module("xllamacpp")  # only this environment has it
    params = xllamacpp.CommonParams()
    params.model.path = wish["path"]
    params.hostnames = ["127.0.0.1"]
    params.port = 0
    params.api_keys = [wish["key"]]
    params.n_parallel = wish["slots"]
    params.n_ctx = wish["context_tokens"]  # of all slots together
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = wish["threads"]
    params.lora_adapters = [  # of no effect but where a request names one
        xllamacpp.CommonAdapterLoraInfo(each, 0.0) for each in wish["adapters"]
    ]
    params.fit_params = False
    params.ui = False
    server = xllamacpp.Server(params)
    sys.stdout.write(f"{LISTENING}{server.listening_address}\n")
    sys.stdout.flush()
    signal.pause()


if __name__ == "__main__":
    main()
