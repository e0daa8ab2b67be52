"""Read the servers that people run at home: Ollama, by command or Modelfile, and MLX LM."""

import re

from planner.imports.draft import LARGEST_TOKENS, Draft, Option, shown
from planner.imports.models import add_gguf, known_model, put_gguf_type
from planner.imports.servers import add_any_model, add_llama_layers
from planner.imports.serving import ServerDraft, add_cache_dtype, need_requests
from planner.imports.shell import ignore_rest, ignore_words, plain, read_options, source_of
from planner.imports.trainer_scripts import read_mlx_trainer
from planner.imports.training import TrainDraft
from planner.specs.base import BadRequestError
from planner.specs.model import ModelSpec

# ---------------------------------------------------------------------------
# Ollama
# ---------------------------------------------------------------------------


FROM_WORDS = 2
OLLAMA_TYPE = "q4_k_m"  # of Ollama's library, unless a tag names another
TAGGED = re.compile(
    r"^(?P<size>.*?)[-_]?(?P<kind>i?q\d(_[\w]+)?|fp16|bf16|f16|f32|mxfp4)$", re.IGNORECASE
)
# The sizes that the library's tag "latest" stands for. Sources: the README of ollama/ollama until
# 2025 (gemma2, gemma3, llama3.1 to 3.3); the others as users of the library list them.
LATEST = {
    "gemma2": "9b",
    "gemma3": "4b",
    "gpt-oss": "20b",
    "llama3": "8b",
    "llama3.1": "8b",
    "llama3.2": "3b",
    "llama3.3": "70b",
    "qwen2.5": "7b",
    "qwen3": "8b",
}
OLLAMA_SWITCHES = frozenset({"--verbose", "--insecure", "--nowordwrap", "--hidethinking"})
PARAMETERS = {
    "num_ctx": "context",
    "num_gpu": "layers",
    "num_batch": "batch",
    "num_predict": "predict",
}
OF_SAMPLING = frozenset(
    {
        "temperature",
        "top_k",
        "top_p",
        "min_p",
        "typical_p",
        "seed",
        "stop",
        "repeat_penalty",
        "repeat_last_n",
        "presence_penalty",
        "frequency_penalty",
        "mirostat",
        "mirostat_eta",
        "mirostat_tau",
        "penalize_newline",
        "tfs_z",
        "num_keep",
        "draft_num_predict",
    }
)
OF_HOST = frozenset({"num_thread", "use_mmap", "use_mlock", "main_gpu", "numa", "low_vram"})
VARIABLES = {
    "OLLAMA_CONTEXT_LENGTH": "context",
    "OLLAMA_NUM_PARALLEL": "parallel",
    "OLLAMA_KV_CACHE_TYPE": "cache",
    "OLLAMA_FLASH_ATTENTION": "flash",
}


def is_modelfile(text: str) -> bool:
    """Return whether a text is a Modelfile: it begins with FROM, and is no Dockerfile."""
    lines = [line.strip() for line in text.splitlines()]
    words = [line.split() for line in lines if line and not line.startswith("#")]
    if not words or words[0][0].upper() != "FROM" or len(words[0]) != FROM_WORDS:
        return False
    known = {
        "FROM",
        "PARAMETER",
        "TEMPLATE",
        "SYSTEM",
        "ADAPTER",
        "LICENSE",
        "MESSAGE",
        "REQUIRES",
    }
    of_docker = {"RUN", "CMD", "ENTRYPOINT", "COPY", "ADD", "WORKDIR", "ENV", "EXPOSE"}
    first = {each[0].upper() for each in words}
    return bool(first & known) and not first & of_docker


def read_modelfile(draft: Draft, text: str) -> None:
    """Read an Ollama Modelfile: its model, and the parameters that a plan has fields for.

    Source: ollama/ollama, docs/modelfile.mdx.
    """
    settings: dict[str, Option] = {}
    for line in _instructions(text):
        word, _, rest = line.partition(" ")
        source, rest = shown(line), rest.strip()
        instruction = word.upper()
        if instruction == "FROM":
            settings["model"] = Option("model", rest, source, "FROM")
        elif instruction == "PARAMETER":
            name, _, value = rest.partition(" ")
            if name.lower() in PARAMETERS:
                key = PARAMETERS[name.lower()]
                if key in settings:
                    reason = "the parameter stands there again, and the last one counts"
                    draft.ignore(settings[key].source, reason)
                settings[key] = Option(key, value.strip(), source, name)
            elif name.lower() in OF_SAMPLING:
                draft.ignore(source, "no effect on the plan: sampling of tokens")
            elif name.lower() in OF_HOST:
                draft.ignore(source, "no effect on the plan: threads and processes of the host")
            else:
                draft.reject(source, name, {*PARAMETERS, *OF_SAMPLING, *OF_HOST})
        elif instruction == "ADAPTER":
            draft.assume(source, "Slipway does not model adapters at serving time")
        elif instruction in {"TEMPLATE", "SYSTEM", "LICENSE", "MESSAGE", "REQUIRES"}:
            draft.ignore(source, "no effect on the plan: the text of prompts")
        else:
            draft.reject(source, word, {"FROM", "PARAMETER", "ADAPTER", "TEMPLATE", "SYSTEM"})
    _read_ollama(draft, settings)


def _instructions(text: str) -> list[str]:
    """Return the instructions of a Modelfile, without the further lines of quoted texts."""
    found: list[str] = []
    is_open = False
    for line in text.splitlines():
        marks = line.count('"""')
        if not is_open and line.strip() and not line.lstrip().startswith("#"):
            found.append(" ".join(line.split()))
        is_open = is_open != (marks % 2 == 1)
    return found


def read_ollama(draft: Draft, words: list[str]) -> None:
    """Read ``ollama run MODEL`` and its like.

    Raises:
        BadRequestError: the command starts no model.
    """
    command, *rest = [plain(word) for word in words] or [""]
    named = next((word for word in rest if not word.startswith("-")), None)
    if command not in {"run", "pull", "serve", "show"} or (command != "serve" and named is None):
        raise BadRequestError(
            f"{shown(f'ollama {command}')!r} runs no model that it names: paste `ollama run "
            "MODEL`, or a Modelfile",
            "text",
        )
    settings: dict[str, Option] = {}
    prompt: list[str] = []
    at = 0
    while at < len(rest):
        word = rest[at]
        takes = word in {"--keepalive", "--format", "--think"} and at + 1 < len(rest)
        if word in OLLAMA_SWITCHES or word.partition("=")[0] in {
            "--keepalive",
            "--format",
            "--think",
        }:
            source = source_of(*rest[at : at + 1 + takes])
            draft.ignore(source, "no effect on the plan: form of the answers")
            at += takes
        elif word.startswith("-"):
            draft.reject(source_of(word), word.lstrip("-"), {"verbose", "keepalive", "format"})
        elif "model" not in settings and command != "serve":
            settings["model"] = Option("model", word, source_of(word), "MODEL")
        else:
            prompt.append(word)
        at += 1
    if prompt:
        draft.ignore(source_of(*prompt), "the text of a prompt")
    _read_ollama(draft, settings)


def _read_ollama(draft: Draft, settings: dict[str, Option]) -> None:
    draft.request["engine"] = "llama_cpp"
    server = ServerDraft(draft, settings)
    for variable, name in VARIABLES.items():
        option = draft.variable(variable)
        if option is not None and name not in settings:
            settings[name] = option
        elif option is not None:
            draft.ignore(option.source, "the Modelfile states it")
    named = server.take("model")
    if named is None:
        draft.need("model", "the command names none")
    else:
        server.spec = add_ollama_model(draft, named.source, named.text)
    layers = server.take("layers")
    if layers is not None:
        add_llama_layers(server, layers)
    slots = server.take("parallel")
    count = slots.whole() if slots is not None and slots.text != "0" else None
    if slots is not None and count is not None:
        draft.put(slots.source, "workload.concurrency", count)
    else:
        if slots is not None:
            draft.ignore(slots.source, "0: the server chooses its slots itself")
        # Source: ollama/ollama, envconfig/config.go at fb30760 (2026-08).
        draft.put("OLLAMA_NUM_PARALLEL=1 (the default)", "workload.concurrency", 1)
    server.put_whole("context", "workload.max_request_tokens", most=LARGEST_TOKENS)
    server.put_whole("batch", "pins.max_batch_tokens")
    add_cache_dtype(server, "cache")
    flash = server.take("flash")
    if flash is not None:
        draft.put(flash.source, "pins.attention", "flash" if flash.is_on else "eager")
    server.ignore("predict", "the longest answer; a plan needs the typical one")
    need_requests(draft)


def add_ollama_model(draft: Draft, source: str, name: str) -> ModelSpec | None:
    """Record a model of Ollama's library, of a file, or of Hugging Face.

    The library's tags state a size and a tuning, and may end in the type of the file.
    """
    text = re.sub(r"^(hf\.co|huggingface\.co)/", "", name.strip())
    if "/" in text or text.lower().endswith(".gguf"):
        return add_gguf(draft, source, text)
    family, _, tag = text.partition(":")
    typed = TAGGED.match(tag)
    kind = typed["kind"].lower() if typed else ""
    size = typed["size"].strip("-_") if typed else tag
    size = LATEST.get(family.lower(), "") if size in {"", "latest"} else size
    candidates = [f"{family}:{size}", f"{family}-{size}"] if size else [family]
    spec = next((known for each in candidates if (known := known_model(each))), None)
    if spec is None:
        draft.model = text
        draft.ignore(source, "the name is not one model of the catalog")
        tagless = "" if tag else ", such as its name with a size (:8b)"
        draft.need("model", f"{shown(text)} is not one model of the catalog: choose one{tagless}")
        return None
    draft.model = spec.id
    draft.put(source, "model", spec.id)
    put_gguf_type(draft, source, kind.replace("fp16", "f16") or OLLAMA_TYPE, spec)
    return spec


# ---------------------------------------------------------------------------
# MLX LM
# ---------------------------------------------------------------------------


NO_MLX = "Slipway does not model MLX: the plan is of an engine that it chooses"


def read_mlx(draft: Draft, command: str, words: list[str]) -> None:
    """Read MLX LM's server, its answer to one prompt, or its trainer.

    Raises:
        BadRequestError: the command is another one.
    """
    if command == "lora":
        draft.goal = "train"
        draft.assume("mlx_lm.lora", NO_MLX)
        read_mlx_trainer(TrainDraft(draft, {}, world=1, per_node=1), words)
        return
    if command not in {"server", "generate", "chat"}:
        raise BadRequestError(
            f"mlx_lm.{shown(command)} is no work that Slipway plans: paste mlx_lm.server, "
            "mlx_lm.generate or mlx_lm.lora",
            "text",
        )
    draft.assume(f"mlx_lm.{command}", NO_MLX)
    arguments = read_options(draft, words, "mlx")
    ignore_words(draft, arguments.positional)
    server = ServerDraft(draft, arguments.options)
    named = server.take("model")
    if named is None:
        draft.need("model", "the command names none")
    else:
        server.spec = add_any_model(draft, named)
    longest = server.take("max_tokens")
    if command == "server":
        server.put_whole("decode_concurrency", "workload.concurrency")
        if longest is not None:
            draft.ignore(longest.source, "the longest answer; a plan needs the typical one")
        need_requests(draft)
    else:
        draft.goal = "generate"
        draft.put("one prompt", "workload.batch_size", 1)
        draft.need("workload.input_tokens", "tokens of the prompt")
        if longest is None:
            draft.need("workload.output_tokens", "tokens of the answer (--max-tokens)")
        else:
            tokens = longest.whole(most=LARGEST_TOKENS)
            draft.put(longest.source, "workload.output_tokens", tokens)
    ignore_rest(draft, server.options, "mlx")
