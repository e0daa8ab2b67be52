"""Find out which tool a pasted text is for, and read it into a draft of a plan request.

The text is bounded, never executed and never written anywhere: shell words are split but not
expanded, and files that it names are not opened.
"""

import json
import re
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from planner.catalog.devices import get_device
from planner.catalog.models import model_from_config
from planner.imports.compression import AUTO_ROUND_RECIPES, read_auto_round, read_llama_quantize
from planner.imports.containers import container_script, is_container_file, server_replicas
from planner.imports.documents import read_json, read_yaml
from planner.imports.draft import (
    REFUSED,
    BadSettingError,
    Draft,
    Header,
    Import,
    Item,
    Kind,
    Option,
    is_secret,
    refuse_many_settings,
    shown,
)
from planner.imports.load_tests import (
    read_aiperf,
    read_sglang_bench,
    read_vllm_batch,
    read_vllm_bench,
)
from planner.imports.local_servers import (
    VARIABLES,
    is_modelfile,
    read_mlx,
    read_modelfile,
    read_ollama,
)
from planner.imports.programs import (
    FACTORY_PROGRAMS,
    SWIFT_PROGRAMS,
    TRL_PROGRAMS,
    UNREAD_WORK,
    VERL_PROGRAMS,
    read_launcher,
    read_python,
    refuse_unread,
    tool_of_arguments,
)
from planner.imports.python_text import PYTHON_LINE, read_python_text
from planner.imports.servers import read_llama_cpp, read_sglang, read_tensorrt_llm, read_vllm
from planner.imports.shell import (
    LITERAL_DOLLAR,
    Command,
    Script,
    ignore_words,
    option_table,
    plain,
    read_arguments,
    read_script,
    source_of,
)
from planner.imports.torchtitan import is_torchtitan_file, read_torchtitan_file
from planner.imports.trainer_scripts import read_swift
from planner.imports.trainers import PREFERENCE, paste_file, read_trl
from planner.imports.training import TrainDraft
from planner.imports.training_files import (
    from_version_1,
    read_accelerate_config,
    read_axolotl,
    read_deepspeed_config,
    read_llama_factory,
    read_llama_factory_file,
    read_trl_file,
)
from planner.specs.base import BadRequestError, JsonObject, PlannerError

Files = dict[str, str]
Reader = Callable[[Draft, list[str], Files], None]
ToolMatch = tuple[Kind, int, Reader]
MOST_CHARACTERS = 64 * 1024
MOST_OTHERS = 20
MOST_REFUSED = 20  # settings with values outside their limits, each of which reads the text again
CONTROL = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f]")
YAML_LINE = re.compile(r"(---\s*$|[\w.\-\"']+\s*:(\s|$))")
PROMPT = re.compile(r"^[ \t]*[$>%] (?=\S)", re.MULTILINE)
FENCE = re.compile(r"^[ \t]*```[\w-]*[ \t]*$", re.MULTILINE)
# The top of an export; a plan on several kinds of device has none of its own here.
HEADER = re.compile(
    r"^# (?P<model>\S+) on (?:(?P<devices>\d{1,5}) x )?(?P<device>[^,+\n]+), planned for \w+$",
    re.MULTILINE,
)
SERVERS_NOTE = re.compile(
    r"^# note: (\d{1,5}) servers, on ports? [\d to]+(?: of each of (\d{1,5}) nodes)?:",
    re.MULTILINE,
)
KNOWN_TOOLS = (
    "vllm serve, python -m sglang.launch_server, llama-server, trtllm-serve, ollama run, "
    "mlx_lm.server, vllm bench serve, aiperf, llama-quantize, auto-round, torchrun, "
    "accelerate launch, deepspeed, trl, swift sft, python train.py --model_name_or_path …, a "
    "script of Unsloth or LLM Compressor, a YAML file of Axolotl, LLaMA-Factory or Accelerate, "
    "torchtitan's TOML, DeepSpeed's JSON, a Modelfile, or a model's config.json"
)
VISIBLE_DEVICES = frozenset(
    {
        "CUDA_VISIBLE_DEVICES",
        "HIP_VISIBLE_DEVICES",
        "ROCR_VISIBLE_DEVICES",
        "NVIDIA_VISIBLE_DEVICES",
    }
)
AXOLOTL_KEYS = frozenset({"base_model", "base_model_config"})
LLAMA_FACTORY_KEYS = frozenset(
    {
        "finetuning_type",
        "stage",
        "infer_backend",
        "export_dir",
        "cutoff_len",
        "template",
        "dataset",
    }
)
LLAMA_FACTORY_V1_KEYS = frozenset(
    {"dist_config", "peft_config", "init_config", "train_dataset", "quant_config", "model_class"}
)
ACCELERATE_KEYS = frozenset({"compute_environment", "distributed_type"})
DEEPSPEED_KEYS = frozenset(
    {"zero_optimization", "train_micro_batch_size_per_gpu", "train_batch_size"}
)


def read_paste(text: str) -> Import:
    """Return the draft of a plan request that another tool's command line or file describes.

    A setting whose value is outside its limits is left out and named, and the others are read.

    Raises:
        PlannerError: the text is too long, for no known tool or not complete, or its settings
            contradict each other; the message names it and the way out.
    """
    if len(text) > MOST_CHARACTERS:
        raise BadRequestError(
            f"the text has {len(text):,} characters: at most {MOST_CHARACTERS:,} are read; paste "
            "the command or the configuration alone",
            "text",
        )
    text = FENCE.sub("", text.replace("\r\n", "\n").replace("\r", "\n").lstrip("\ufeff"))
    control = CONTROL.search(text)
    if control:
        raise BadRequestError(
            f"character {control.start() + 1} is the control character {control[0]!r}: paste "
            "plain text",
            "text",
        )
    refused: dict[str, str] = {}
    while True:
        token = REFUSED.set(frozenset(refused))
        try:
            return _with_refused(_read(text), refused)
        except BadSettingError as error:
            if not error.source or error.source in refused or len(refused) == MOST_REFUSED:
                raise
            refused[error.source] = error.reason
        finally:
            REFUSED.reset(token)


def _with_refused(imported: Import, refused: dict[str, str]) -> Import:
    """Return an import with the settings that it leaves out because of their values."""
    items = tuple(Item(source=source, reason=reason) for source, reason in refused.items())
    words = tuple(f"{source}: {reason}" for source, reason in refused.items())
    return imported.model_copy(
        update={
            "ignored": imported.ignored + items,
            "assumptions": imported.assumptions + words,
        }
    )


def _read(text: str) -> Import:
    """Read a text whose characters and length are checked, without settings refused before."""
    header = read_header(text)
    first = next((line for line in text.splitlines() if _is_content(line)), "")
    if not first:
        raise BadRequestError(f"the text is empty: paste {KNOWN_TOOLS}", "text")
    if first.lstrip().startswith("{"):
        return _read_document(read_json(text), header).finish()
    if is_torchtitan_file(text):
        draft = Draft("torchtitan", "train", header)
        read_torchtitan_file(draft, text)
        return draft.finish()
    if is_modelfile(text):
        draft = Draft("ollama", "serve", header)
        read_modelfile(draft, text)
        return draft.finish()
    if PYTHON_LINE.match(first.strip()):
        draft = Draft("transformers", "train", header)
        read_python_text(draft, text)
        return draft.finish()
    if YAML_LINE.match(first):
        return _read_yaml(text, header)
    return _read_commands(read_script(PROMPT.sub("", text)), header).finish()


def read_header(text: str) -> Header | None:
    """Return what the comment at the top of a file that Slipway exported states, if it is one.

    Source: planner/exports/export.py, ``Format.with_body``.
    """
    match = HEADER.search(text)
    if match is None:
        return None
    try:
        device = get_device(match["device"]).id
    except PlannerError:
        return None
    servers = SERVERS_NOTE.search(text)
    return Header(
        source=shown(match[0].lstrip("# ")),
        model=match["model"],
        device=device,
        devices=int(match["devices"] or 1),
        servers=int(servers[1]) if servers else 1,
        nodes=int(servers[2] or 1) if servers else 1,
    )


def _is_content(line: str) -> bool:
    return bool(line.strip()) and not line.lstrip().startswith("#")


def _unknown_tool(what: str) -> BadRequestError:
    return BadRequestError(f"{what}: paste {KNOWN_TOOLS}", "text")


# ---------------------------------------------------------------------------
# Files
# ---------------------------------------------------------------------------


def _read_yaml(text: str, header: Header | None) -> Import:
    documents = [each for each in read_yaml(text) if each is not None]
    if not documents or not isinstance(documents[0], dict):
        raise _unknown_tool("the YAML has no mapping of settings")
    document = {str(key): value for key, value in documents[0].items()}
    if is_container_file(document):
        replicas = server_replicas(documents)
        if header is not None and replicas > 1:
            header = replace(header, servers=replicas)
        draft = _read_commands(container_script(documents), header)
        if header is None and replicas > 1:
            reason = "each replica is a server of its own: plan one, or pin data_parallel_size"
            draft.ignore(f"replicas: {replicas}", reason)
        return draft.finish()
    draft = _read_document(document, header)
    for other in documents[1:]:
        draft.ignore(shown(other), "a further document: the first one is read")
    return draft.finish()


def _read_document(document: JsonObject, header: Header | None) -> Draft:
    """Read a mapping by the keys that only one tool's files have.

    Raises:
        BadRequestError: no known tool has such keys.
    """
    keys = set(document)
    if AXOLOTL_KEYS & keys:
        draft = Draft("axolotl", "train", header)
        read_axolotl(draft, document)
    elif ACCELERATE_KEYS & keys:
        draft = Draft("accelerate_config", "train", header)
        read_accelerate_config(draft, document)
    elif "model" in keys and LLAMA_FACTORY_V1_KEYS & keys:
        draft = Draft("llama_factory", "train", header)
        read_llama_factory_file(draft, from_version_1(draft, document))
    elif "model_name_or_path" in keys and _is_llama_factory(keys):
        draft = Draft("llama_factory", header=header)
        read_llama_factory_file(draft, document)
    elif "model_name_or_path" in keys:
        draft = Draft("trl", "train", header)
        read_trl_file(draft, document)
    elif DEEPSPEED_KEYS & keys:
        draft = Draft("deepspeed_config", "train", header)
        read_deepspeed_config(draft, document)
    elif server := _server_of_file(keys):
        draft = Draft(server[0], "serve", header)
        server[1](draft, _as_words(document), {})
    elif "model_type" in keys or "architectures" in keys:
        draft = Draft("hf_config", header=header)
        _read_config(draft, document)
    else:
        named = ", ".join(sorted(keys)[:6]) or "no keys"
        raise _unknown_tool(f"no known tool has a file with the keys {shown(named)}")
    return draft


def _is_llama_factory(keys: set[str]) -> bool:
    """Return whether LLaMA-Factory knows more keys of a file than the Hugging Face trainer."""
    own, other = (
        len(keys & option_table(tool).names) for tool in ("llama_factory", "transformers")
    )
    return own > other or (own == other and bool(LLAMA_FACTORY_KEYS & keys - {"dataset"}))


def _server_of_file(keys: set[str]) -> tuple[Kind, Reader] | None:
    """Return the server whose ``--config`` file has such keys, None for other files."""
    for tool, named in (("vllm", "model"), ("sglang", "model_path")):
        table = option_table(tool)
        names = [table.name_of(key) for key in sorted(keys)]
        if named in names and None not in names and len(names) > 1:
            return {"vllm": VLLM, "sglang": SGLANG}[tool]
    return None


def _as_words(document: JsonObject) -> list[str]:
    """Return the keys of a server's file as the options that they stand for."""
    words: list[str] = []
    for key, value in document.items():
        if isinstance(value, bool):
            words.append(f"--{key}" if value else f"--no-{key}")
        elif isinstance(value, list):
            words += [f"--{key}", *map(str, value)]
        elif value is not None:
            text = json.dumps(value) if isinstance(value, dict) else str(value)
            words.append(f"--{key}={text}")
    return [word.replace("$", LITERAL_DOLLAR) for word in words]


def _read_config(draft: Draft, document: JsonObject) -> None:
    """Record a model's ``config.json`` as an inline model, after reading its shape."""
    name = str(document.get("_name_or_path") or "custom")
    spec = model_from_config(document, name)
    draft.model = document
    draft.request["model"] = document
    layers = f"{spec.num_hidden_layers} layers of {spec.hidden_size}"
    draft.understood.append(
        Item(
            source=f"config.json of model_type {shown(spec.model_type)}",
            field="model",
            value=layers,
        )
    )
    if spec.note:
        draft.ignore("config.json", shown(spec.note))
    draft.need("workload", "what the model should do: serve, generate, train or compress")


# ---------------------------------------------------------------------------
# Commands
# ---------------------------------------------------------------------------


SERVERS = frozenset({"vllm", "sglang", "llama_server", "tensorrt_llm", "ollama", "mlx"})
# Tools that people run beside a server, whose own command states more of the plan.
BESIDE = frozenset({"vllm_bench", "sglang_bench", "aiperf", "llama_quantize", "auto_round"})
# Environment variables that a tool's reader takes.
READ_VARIABLES: dict[Kind, frozenset[str]] = {
    "swift": frozenset({"NPROC_PER_NODE", "NNODES"}),
    "ollama": frozenset(VARIABLES),
}


@dataclass
class Invocation:
    """A tool's command: its kind, its words, the words before it, and what reads it."""

    kind: Kind
    words: list[str]
    before: list[str]
    read: Reader
    variables: list[tuple[str, str]] = field(default_factory=list)


def _read_commands(script: Script, header: Header | None) -> Draft:
    """Read the first command of a known tool; the others are listed as ignored.

    Raises:
        BadRequestError: no command is one of a known tool.
    """
    found = [(at, invocation) for at, command in enumerate(script.commands)
             if (invocation := find_invocation(command)) is not None]  # fmt: skip
    first = [each for each in found if each[1].kind not in BESIDE] or found
    if not first:
        refuse_work(script)
        words = next((command.words for command in script.commands if command.words), [])
        named = source_of(*words[:4]) or "no command"
        raise _unknown_tool(f"{named!r} is no command of a known tool")
    at, chosen = first[0]
    chosen.variables = [pair for each in script.commands[: at + 1] for pair in each.variables]
    others = [command for number, command in enumerate(script.commands) if number != at]
    draft = Draft(chosen.kind, "serve" if chosen.kind in SERVERS else "train", header)
    read = READ_VARIABLES.get(chosen.kind, frozenset())
    draft.variables = {name: value for name, value in chosen.variables if name in read}
    chosen.variables = [each for each in chosen.variables if each[0] not in read]
    _read_before(draft, chosen)
    _read_container(draft, script)
    chosen.read(draft, chosen.words, script.files)
    rest = [command for command in others if command.words]
    for command in rest[:MOST_OTHERS]:
        reason = "another command: one command of a tool is read, and none is run"
        draft.ignore(source_of(*command.words), reason)
    if len(rest) > MOST_OTHERS:
        draft.ignore(f"{len(rest) - MOST_OTHERS} further commands", "one command is read")
    return draft


def refuse_work(script: Script) -> None:
    """Refuse a program that does what a plan of one's own states, and say what to state.

    Raises:
        BadRequestError: the text starts one.
    """
    for command in script.commands:
        words = command.words
        for at, word in enumerate(words[:-1]):
            name, is_module = _program(word), at > 0 and words[at - 1] == "-m"
            is_started = not at or is_module or "/" in word
            two = f"{name} {words[at + 1]}"
            program = two if two in UNREAD_WORK else name
            if program == two or (is_started and program in UNREAD_WORK):
                raise BadRequestError(f"{program!r} {UNREAD_WORK[program]}", "text")


def find_invocation(command: Command) -> Invocation | None:
    """Return the tool that a command starts, with its arguments; None for other commands."""
    words = command.words
    for at in range(len(words)):
        found = _match_tool(words, at)
        if found is not None:
            kind, skipped, read = found
            arguments = words[at + skipped :]
            # An image's or a module's name may be followed by the program and its command.
            for again in (["vllm", "serve"], ["serve"]):
                if kind in SERVERS and arguments[: len(again)] == again:
                    arguments = arguments[len(again) :]
            is_image = bool(at) and any(each.search(words[at]) for each, _ in IMAGES)
            return Invocation(kind, arguments, words[: at + is_image], read)
    return None


def _read_llama_once(draft: Draft, words: list[str], _files: Files) -> None:
    draft.goal = "generate"
    read_llama_cpp(draft, words, answers_once=True)


def _read_swift(draft: Draft, words: list[str], _files: Files) -> None:
    _refuse_files(words[:2])
    command = plain(words[0]) if words else ""
    if command not in SWIFT_COMMANDS:
        raise BadRequestError(
            f"'swift {shown(command)}' is no training that Slipway reads: paste swift sft, swift "
            "pt or swift rlhf, or the command of the engine that serves",
            "text",
        )
    read_swift(TrainDraft(draft, {}), f"swift {command}", command, words[1:])


def _auto_round(program: str) -> tuple[Kind, Reader]:
    return "auto_round", lambda draft, words, _files: read_auto_round(draft, words, program)


def _mlx(command: str | None) -> Reader:
    def read(draft: Draft, words: list[str], _files: Files) -> None:
        first = command or (plain(words[0]) if words else "")
        read_mlx(draft, first, words if command else words[1:])

    return read


def _refused(title: str) -> Reader:
    def read(_draft: Draft, _words: list[str], _files: Files) -> None:
        raise BadRequestError(
            f"the command is of {title}, whose settings Slipway does not read: state the model, "
            "the lengths, the batch and the hardware in a plan of your own",
            "text",
        )

    return read


def _read_llama_factory(draft: Draft, words: list[str], _files: Files) -> None:
    _refuse_files(words)
    table = option_table("llama_factory")
    arguments = read_arguments(words, table)
    for source in arguments.repeated:
        draft.ignore(source, "the option stands there again, and the last one counts")
    for source, name in arguments.unknown:
        draft.reject(source, name, table.names)
    command, *rest = arguments.positional or [""]
    ignore_words(draft, rest)
    if not arguments.options:
        raise BadRequestError(
            f"llamafactory-cli {shown(plain(command))} has no settings: paste its file, or the "
            "command with its options",
            "text",
        )
    if command in CHAT_COMMANDS:
        backend = Option("infer_backend", "huggingface", f"llamafactory-cli {command}")
        arguments.options.setdefault("infer_backend", backend)
    read_llama_factory(draft, arguments.options)


def _read_axolotl_line(_draft: Draft, words: list[str], _files: Files) -> None:
    _refuse_files(words)
    raise BadRequestError(
        "Axolotl's command names no file of settings: paste the content of the file", "text"
    )


def _refuse_files(words: list[str]) -> None:
    """Refuse a command whose settings are in a file that the text does not have.

    Raises:
        BadRequestError: the command names a file.
    """
    named = next((word for word in words if word.endswith((".yaml", ".yml", ".json"))), "")
    if named:
        raise paste_file(plain(named))


def _without_files(read: Callable[[Draft, list[str]], None]) -> Reader:
    return lambda draft, words, _files: read(draft, words)


VLLM: tuple[Kind, Reader] = ("vllm", _without_files(read_vllm))
SGLANG: tuple[Kind, Reader] = ("sglang", _without_files(read_sglang))
LLAMA: tuple[Kind, Reader] = ("llama_server", _without_files(read_llama_cpp))
LLAMA_ONCE: tuple[Kind, Reader] = ("llama_server", _read_llama_once)
TORCHRUN: tuple[Kind, Reader] = ("torchrun", read_launcher)
FACTORY: tuple[Kind, Reader] = ("llama_factory", _read_llama_factory)
AXOLOTL: tuple[Kind, Reader] = ("axolotl", _read_axolotl_line)
VLLM_BENCH: tuple[Kind, Reader] = ("vllm_bench", _without_files(read_vllm_bench))
VLLM_BATCH: tuple[Kind, Reader] = ("vllm_batch", _without_files(read_vllm_batch))
SGLANG_BENCH: tuple[Kind, Reader] = ("sglang_bench", _without_files(read_sglang_bench))
AIPERF: tuple[Kind, Reader] = ("aiperf", _without_files(read_aiperf))
QUANTIZE: tuple[Kind, Reader] = ("llama_quantize", _without_files(read_llama_quantize))
MLX_COMMANDS = ("server", "generate", "chat", "lora")
SWIFT_COMMANDS = frozenset({"sft", "pt", "rlhf"})
# The name of a program, without its folder.
BY_NAME: dict[str, tuple[Kind, Reader]] = {
    "llama-server": LLAMA,
    "llama-cli": LLAMA_ONCE,
    "llama-completion": LLAMA_ONCE,
    "llama-simple": LLAMA_ONCE,
    "torchrun": TORCHRUN,
    "trtllm-serve": ("tensorrt_llm", read_tensorrt_llm),
    "llamafactory-cli": FACTORY,
    "axolotl": AXOLOTL,
    "llama-quantize": QUANTIZE,
    **{name: _auto_round(name) for name in (*AUTO_ROUND_RECIPES, "auto_round")},
    "benchmark_serving.py": VLLM_BENCH,  # vLLM's, before it was a command
    "ollama": ("ollama", _without_files(read_ollama)),
    **{f"mlx_lm.{name}": ("mlx", _mlx(name)) for name in MLX_COMMANDS},
}
# Tools that no reader knows, by their program or by the module after -m, to be refused by name.
UNREAD_TOOLS: dict[str, str] = {
    "text-generation-launcher": "Text Generation Inference",
    "lmdeploy": "LMDeploy",
    "ktransformers": "KTransformers",
    "ktransformers.server.main": "KTransformers",
    "mistralrs": "mistral.rs",
    "mistralrs-server": "mistral.rs",
    "aphrodite": "Aphrodite",
    "mlc_llm": "MLC LLM",
    "tabbyapi": "TabbyAPI",
    "koboldcpp": "KoboldCpp",
    "tune": "torchtune",
    "litgpt": "LitGPT",
    "xtuner": "XTuner",
    "oumi": "Oumi",
    "nemo": "NeMo",
    "automodel": "NeMo",
    "composer": "Composer",
}
UNREAD_COMMANDS = frozenset(
    {"run", "serve", "train", "pretrain", "finetune", "finetune_lora", "llm", "chat"}
)
# llama.cpp's names before 2024-06, which are common words: only with their folder.
BY_PATH = {"server": LLAMA, "main": LLAMA_ONCE}
# Two words: a program and its command, or -m and a module of Python.
BY_TWO_WORDS: dict[tuple[str, str], tuple[Kind, Reader]] = {
    ("vllm", "serve"): VLLM,
    ("vllm", "run-batch"): VLLM_BATCH,
    ("-m", "vllm.entrypoints.openai.run_batch"): VLLM_BATCH,
    ("-m", "sglang.bench_serving"): SGLANG_BENCH,
    ("-m", "sglang.benchmark.serving"): SGLANG_BENCH,
    ("aiperf", "profile"): AIPERF,
    ("genai-perf", "profile"): AIPERF,
    ("trl", "vllm-serve"): VLLM,
    ("llama", "serve"): LLAMA,
    ("llama", "quantize"): QUANTIZE,
    ("-m", "auto_round"): _auto_round("auto-round"),
    ("-m", "vllm.entrypoints.openai.api_server"): VLLM,
    ("-m", "vllm.entrypoints.api_server"): VLLM,
    ("-m", "vllm.entrypoints.cli.main"): VLLM,
    ("sglang", "serve"): SGLANG,
    ("-m", "sglang.launch_server"): SGLANG,
    ("-m", "torch.distributed.run"): TORCHRUN,
    ("-m", "torch.distributed.launch"): TORCHRUN,
    ("accelerate", "launch"): ("accelerate", read_launcher),
    ("-m", "accelerate.commands.launch"): ("accelerate", read_launcher),
    ("-m", "axolotl.cli.train"): AXOLOTL,
    ("-m", "mlx_lm"): ("mlx", _mlx(None)),
    **{("-m", f"mlx_lm.{name}"): ("mlx", _mlx(name)) for name in MLX_COMMANDS},
    **{("mlx_lm", name): ("mlx", _mlx(name)) for name in MLX_COMMANDS},
}
# Commands of LLaMA-Factory that answer prompts.
CHAT_COMMANDS = frozenset({"api", "chat", "webchat"})
# Commands of TRL; the word stays, because the reader reads it.
TRL_COMMANDS = frozenset({"sft", *PREFERENCE})
# Images that start a server with the words after their name.
IMAGES: tuple[tuple[re.Pattern[str], tuple[Kind, Reader]], ...] = (
    (re.compile(r"(^|/)vllm-openai(-[\w.]+)?([:@]|$)"), VLLM),
    (re.compile(r"llama\.cpp:server"), LLAMA),
    *(
        (re.compile(rf"(^|/){name}([:@]|$)"), ("transformers", _refused(title)))
        for name, title in (
            ("text-generation-inference", "Text Generation Inference"),
            ("mistral.rs", "mistral.rs"),
            ("tabbyapi", "TabbyAPI"),
            ("koboldcpp", "KoboldCpp"),
        )
    ),
)
KNOWN_PROGRAMS = (FACTORY_PROGRAMS, SWIFT_PROGRAMS, TRL_PROGRAMS, VERL_PROGRAMS)
PYTHON = re.compile(r"python[\d.]*")


def _match_tool(words: list[str], at: int) -> ToolMatch | None:
    """Return the tool whose name stands at a position, and how many words the name has."""
    word, following = words[at], words[at + 1] if at + 1 < len(words) else ""
    name = _program(word)
    two = BY_TWO_WORDS.get((name, following))
    image = next((tool for pattern, tool in IMAGES if at and pattern.search(word)), None)
    found: ToolMatch | None = None
    if two:
        found = (two[0], 2, two[1])
    elif [name, *words[at + 1 : at + 3]] == ["vllm", "bench", "serve"]:
        found = (VLLM_BENCH[0], 3, VLLM_BENCH[1])
    elif name in BY_NAME and (following or name != "axolotl") and "install" not in words[:at]:
        found = (BY_NAME[name][0], 1, BY_NAME[name][1])
    elif name in BY_PATH and "/" in word.replace("\\", "/"):
        found = (BY_PATH[name][0], 1, BY_PATH[name][1])
    elif image:
        found = (image[0], 1, image[1])
    elif name == "deepspeed" and following and "install" not in words[:at]:
        found = ("deepspeed", 1, read_launcher)
    elif name == "trl" and following in TRL_COMMANDS:
        found = ("trl", 1, _without_files(read_trl))
    elif name == "swift" and following and not following.startswith("-"):
        found = ("swift", 1, _read_swift)
    elif _is_unread(words, at):
        found = ("transformers", 1, _refused(UNREAD_TOOLS[name]))
    elif _runs_trainer(words, at) and not UNREAD_WORK.keys() & set(words[at : at + 3]):
        found = ("transformers", 0, read_python)
    return found


def _is_unread(words: list[str], at: int) -> bool:
    """Return whether a tool that no reader knows starts at a position."""
    name, following = _program(words[at]), words[at + 1] if at + 1 < len(words) else ""
    if name not in UNREAD_TOOLS:
        return False
    is_module = at > 0 and words[at - 1] == "-m"
    return is_module or following in UNREAD_COMMANDS or following.startswith("--")


def _runs_trainer(words: list[str], at: int) -> bool:
    """Return whether Python runs the script or module at a position with a trainer's arguments."""
    word = plain(words[at])
    before = [_program(each) for each in words[:at]]
    if any(PYTHON.fullmatch(each) for each in before):
        is_first = all(each.startswith("-") for each in before[_last_python(before) + 1 :])
    else:
        is_first = at == 0 or before[-1] == "run" or before[0] in {"uv", "poetry", "pixi", "pdm"}
    is_module = at > 0 and words[at - 1] == "-m"
    if not is_first or not (is_module or word.endswith(".py")):
        return False
    refuse_unread(word)
    known = any(each.search(word) for each in KNOWN_PROGRAMS)
    return known or tool_of_arguments([plain(each) for each in words[at + 1 :]]) is not None


def _last_python(names: list[str]) -> int:
    return max(at for at, each in enumerate(names) if PYTHON.fullmatch(each))


def _program(word: str) -> str:
    """Return the name of a program without its folder, or a word as it is."""
    return word.replace("\\", "/").rsplit("/", 1)[-1].removesuffix(".exe")


def _read_before(draft: Draft, chosen: Invocation) -> None:
    """Record environment variables and the words of wrappers, such as ``docker run``."""
    refuse_many_settings(len(chosen.variables))
    for name, value in chosen.variables:
        source = source_of(f"{name}={value}")
        devices = [part for part in value.split(",") if part]
        is_list = re.fullmatch(r"[\w,-]+", value) is not None and value != "all"
        if name in VISIBLE_DEVICES and devices and is_list:
            draft.put(source, "cluster.devices_per_node", len(devices))
        else:
            draft.ignore(source, "an environment variable: Slipway reads options alone")
    if not chosen.before:
        return
    count = _container_devices(chosen.before)
    if count is not None:
        draft.put(count[0], "cluster.devices_per_node", count[1])
    draft.ignore(source_of(*chosen.before), "what starts the command does not change the plan")


def _read_container(draft: Draft, script: Script) -> None:
    """Record a container's devices, and its settings beside the command."""
    for source, text in script.devices:
        if re.fullmatch(r"[1-9]\d{0,3}", text):
            draft.put(shown(source), "cluster.devices_per_node", int(text))
        else:
            draft.ignore(shown(source), "as many as the machine has, which is not stated")
    for name, value in script.beside:
        hidden = "***" if is_secret(name.rpartition(".")[2]) else value
        reason = "what starts the command does not change the plan"
        draft.ignore(shown(f"{name}: {hidden}"), reason)


def _container_devices(words: list[str]) -> tuple[str, int] | None:
    """Return the devices that ``docker run --gpus`` gives a container, if it states a number."""
    for at, word in enumerate(words):
        name, joined, value = word.partition("=")
        if name != "--gpus":
            continue
        text = value if joined else (words[at + 1] if at + 1 < len(words) else "")
        listed = re.fullmatch(r'"?device=([\w,-]+)"?', text)
        if listed:
            return source_of(name, text), len([part for part in listed[1].split(",") if part])
        number = re.fullmatch(r"(?:count=)?([1-9]\d{0,3})", text)
        return (source_of(name, text), int(number[1])) if number else None
    return None
