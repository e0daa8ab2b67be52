"""An observed server as a text that the wizard reads: “Plan this”."""

import shlex

from webapp.servers.models import ObservedServer


def command_of(server: ObservedServer) -> str:
    """Return a command line that starts such a server, for the wizard's pasted text.

    Only what was read stands in it: the model and its longest request. A model that is named as a
    file or by an alias is named as it is, and the wizard says if it finds none of that name.
    Empty without a model.
    """
    if not server.served_models:
        return ""
    first = server.served_models[0]
    model = shlex.quote(first.get("root") or first["name"])
    length = first.get("max_model_len")
    if server.engine == "sglang":
        option = f" --context-length {length}" if length else ""
        return f"python -m sglang.launch_server --model-path {model}{option}"
    if server.engine == "llamacpp":
        option = f" -c {length}" if length else ""
        return f"llama-server -m {model}{option}"
    if server.engine == "ollama":
        return f"ollama run {model}"
    option = f" --max-model-len {length}" if length else ""
    return f"vllm serve {model}{option}"
