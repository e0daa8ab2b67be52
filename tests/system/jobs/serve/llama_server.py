"""llama.cpp's own HTTP server as vLLM is started: arguments in argv, its key in the environment.

It runs with the interpreter of the environment ``llamacpp`` and speaks OpenAI's form by itself.
"""

import importlib
import os
import signal
import sys


def main() -> None:
    """Load a GGUF file and serve: FILE PORT SLOTS TOKENS NAME."""
    path, port, slots, tokens, name = sys.argv[1:]
    xllamacpp = importlib.import_module("xllamacpp")  # only that environment has it
    params = xllamacpp.CommonParams()
    params.model.path, params.model_alias = path, {name}
    params.hostnames, params.port = ["127.0.0.1"], int(port)
    params.api_keys = [os.environ["LLAMA_KEY"]]
    params.n_parallel, params.n_ctx = int(slots), int(slots) * int(tokens)
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = 1
    params.fit_params = params.ui = False
    params.endpoint_metrics = True
    server = xllamacpp.Server(params)
    sys.stderr.write(f"listening on {server.listening_address}\n")
    signal.pause()


if __name__ == "__main__":
    main()
