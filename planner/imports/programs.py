"""Find out which trainer a launcher or Python starts, and read its arguments.

A tool is known by its script or module, and by the arguments that it shares with no other tool:
``src/train.py --finetuning_type lora`` is LLaMA-Factory's under any launcher. What a script does
that no argument states is said by the plan itself.
"""

import re
from collections.abc import Callable

from planner.imports.draft import Draft
from planner.imports.shell import (
    ignore_rest,
    option_table,
    plain,
    read_arguments,
    source_of,
)
from planner.imports.torchtitan import TORCHTITAN_MODULES, read_torchtitan_line
from planner.imports.trainer_scripts import read_nanogpt, read_swift
from planner.imports.trainers import (
    LAUNCHERS,
    MEGATRON_PROGRAMS,
    add_preference,
    exported_plan,
    paste_file,
    read_exported,
    read_hugging_face,
    read_megatron,
    read_trl,
)
from planner.imports.training import TrainDraft
from planner.imports.training_files import read_llama_factory_line
from planner.imports.verl import read_verl
from planner.specs.base import BadRequestError

# Trainers whose settings no reader knows, by their command, script or module.
UNREAD: tuple[tuple[re.Pattern[str], str], ...] = tuple(
    (re.compile(pattern), title)
    for pattern, title in (
        (r"^openrlhf\.", "OpenRLHF"),
        (r"^verl\.(?!trainer\.main_ppo$)", "verl"),
        (r"^nemo(_run|_rl|_automodel)?\.|/nemo_(rl|automodel)/|^NeMo", "NeMo"),
        (r"^llm_foundry|/llmfoundry/", "LLM Foundry"),
        (r"^xtuner\.", "XTuner"),
        (r"^torchtune\.", "torchtune"),
        (r"^litgpt", "LitGPT"),
        (r"^colossalai", "Colossal-AI"),
        (r"^oumi", "Oumi"),
    )
)
# Scripts and modules that one tool alone has.
FACTORY_PROGRAMS = re.compile(r"(^|/)train_bash\.py$|llama_?factory([./]|$)|^llamafactory-cli$")
SWIFT_PROGRAMS = re.compile(r"(^|[/.])swift[/.](cli[/.])?(sft|pt|rlhf)(\.py)?$")
TRL_PROGRAMS = re.compile(r"(^|[/.])trl[/.]scripts[/.]\w+|^trl$")
VERL_PROGRAMS = re.compile(r"^verl\.trainer\.main_ppo$|(^|/)main_ppo\.py$")
# Arguments that a trainer of Hugging Face's has and a script of another kind hardly by chance.
OF_HUGGING_FACE = frozenset(
    {
        "model_name_or_path",
        "config_name",
        "per_device_train_batch_size",
        "num_train_epochs",
        "output_dir",
        "learning_rate",
        "bf16",
        "fp16",
        "use_peft",
        "deepspeed",
        "fsdp",
        "optim",
    }
)
# Example scripts that set nothing beside their arguments.
EXAMPLES = frozenset({"sft.py", "run_sft.py", "run_clm.py"})
# Trainers by the tables of their options, the most usual first: it wins among equals.
BY_ARGUMENTS = ("transformers", "llama_factory", "swift", "megatron", "nanogpt")


def read_launcher(draft: Draft, words: list[str], files: dict[str, str]) -> None:
    """Read ``torchrun``, ``accelerate launch`` or ``deepspeed`` with the program that it starts.

    Sources: torch/distributed/run.py; accelerate/commands/launch.py; deepspeed/launcher/runner.py.
    """
    table = option_table(draft.kind)
    arguments = read_arguments(words, table, launches=True)
    for source in arguments.repeated:
        draft.ignore(source, "the option stands there again, and the last one counts")
    for source, name in arguments.unknown:
        draft.reject(source, name, table.names | set(table.aliases))
    train = TrainDraft(draft, {})
    LAUNCHERS[draft.kind](train, arguments.options)
    ignore_rest(draft, arguments.options, draft.kind)
    if not arguments.positional:
        draft.need("workload", "the launcher names no program")
        draft.need("model", "the launcher names no program")
        return
    read_program(train, arguments.positional, files)


def read_python(draft: Draft, words: list[str], files: dict[str, str]) -> None:
    """Read a script or a module that Python itself starts, as one process."""
    read_program(TrainDraft(draft, {}, world=1, per_node=1), words, files)


def read_program(train: TrainDraft, words: list[str], files: dict[str, str]) -> None:
    """Read the program that a launcher starts.

    Raises:
        BadRequestError: its settings are in a file that the text does not have, or it is of a
            tool that is not read.
    """
    words = _without_python(words)
    program, *arguments = words
    named = plain(program)
    refuse_unread(named)
    script = files.get(named)
    if script is not None and (plan := exported_plan(script)) is not None:
        read_exported(train, plan, arguments)
        return
    tool = tool_of(named, arguments)
    configuration = next(
        (plain(word) for word in arguments if word.endswith((".yaml", ".yml"))), ""
    )
    if configuration and (tool in {"axolotl", "llama_factory"} or len(arguments) == 1):
        raise paste_file(configuration)
    READERS[tool](train, program, arguments)


def _without_python(words: list[str]) -> list[str]:
    """Return words from the program on: not ``python -u -m`` before it."""
    at = 0
    while at < len(words) - 1 and re.fullmatch(r"python[\d.]*|-[umOB]+", words[at].split("/")[-1]):
        at += 1
    return words[at:]


MEASURES = (
    "measures a server, and Slipway does not read its settings: state the model, the lengths, the "
    "concurrency and the rate in a plan of your own to serve, and start its load test"
)
# Programs, also as the module after -m or imported, and their commands, whose work a plan states.
UNREAD_WORK: dict[str, str] = {
    "vllm bench": MEASURES,
}


def refuse_unread(program: str) -> None:
    """Refuse a trainer by name that no reader knows.

    Raises:
        BadRequestError: it is one.
    """
    title = next((title for pattern, title in UNREAD if pattern.search(program)), None)
    if title is not None:
        raise BadRequestError(
            f"{program!r} is a program of {title}, whose settings Slipway does not read: state "
            "the model, the method, the lengths and the batch in a plan of your own",
            "text",
        )


def tool_of(program: str, arguments: list[str]) -> str:
    """Return the trainer that a program is, by its script or module, else by its arguments.

    >>> tool_of("src/train.py", ["--stage", "sft", "--finetuning_type", "lora"])
    'llama_factory'
    >>> tool_of("train.py", ["--model_name_or_path", "gpt2"])
    'transformers'
    """
    name = program.rsplit("/", 1)[-1]
    if name in MEGATRON_PROGRAMS:
        return "megatron"
    for pattern, tool in (
        (FACTORY_PROGRAMS, "llama_factory"),
        (SWIFT_PROGRAMS, "swift"),
        (TRL_PROGRAMS, "trl"),
        (TORCHTITAN_MODULES, "torchtitan"),
        (VERL_PROGRAMS, "verl"),
    ):
        if pattern.search(program):
            return tool
    if "axolotl" in program:
        return "axolotl"
    return tool_of_arguments(arguments) or "transformers"


def tool_of_arguments(arguments: list[str]) -> str | None:
    """Return the trainer that knows most of some arguments, None if they are no trainer's.

    nanoGPT's few names are common words: they are its own where none is Hugging Face's.
    """
    written = {word.partition("=")[0] for word in arguments if word.startswith("--")}
    names = {word.lstrip("-").replace("-", "_") for word in written}
    scores = {tool: len(names & _exact(tool)) for tool in BY_ARGUMENTS}
    is_hugging_face = names & (OF_HUGGING_FACE - option_table("nanogpt").names)
    scores["nanogpt"] = 0 if is_hugging_face else 2 * scores["nanogpt"]
    best = max(BY_ARGUMENTS, key=lambda tool: scores[tool])
    return best if scores[best] else None


def _exact(tool: str) -> frozenset[str]:
    table = option_table(tool)
    return table.names | frozenset(table.aliases)


# ---------------------------------------------------------------------------
# The readers of programs
# ---------------------------------------------------------------------------


def _trl(train: TrainDraft, program: str, arguments: list[str]) -> None:
    if plain(program) == "trl":
        read_trl(train.draft, arguments, train)
        return
    name = plain(program).rsplit("/", 1)[-1]
    if not add_preference(train.draft, source_of(program), plain(program), arguments):
        train.draft.ignore(source_of(program), f"{name} of TRL is read by its arguments")
    read_hugging_face(train, arguments)


def _hugging_face(train: TrainDraft, program: str, arguments: list[str]) -> None:
    draft, source, name = train.draft, source_of(program), plain(program).rsplit("/", 1)[-1]
    written = {word.partition("=")[0].lstrip("-").replace("-", "_") for word in arguments}
    is_known = bool(written & OF_HUGGING_FACE)
    if not add_preference(draft, source, plain(program), arguments):
        reason = f"{name} is read by the names of its arguments: what it sets itself is not known"
        (draft.ignore if name in EXAMPLES else draft.assume)(source, reason)
    if tool_of_arguments(arguments) is None:
        train.is_trainer = False
        draft.need("workload.method", f"no argument of {name} states one: full, lora, pretrain …")
    read_hugging_face(train, arguments, is_known=is_known)


def _llama_factory(train: TrainDraft, program: str, arguments: list[str]) -> None:
    name = plain(program).rsplit("/", 1)[-1]
    reason = f"{name} is read as LLaMA-Factory's, by its arguments"
    train.draft.ignore(source_of(program), reason)
    read_llama_factory_line(train, arguments)


def _swift(train: TrainDraft, program: str, arguments: list[str]) -> None:
    command = re.split(r"[/.]", plain(program).removesuffix(".py"))[-1]
    read_swift(train, program, command, arguments)


def _nanogpt(train: TrainDraft, program: str, arguments: list[str]) -> None:
    read_nanogpt(train, program, arguments)


def _megatron(train: TrainDraft, program: str, arguments: list[str]) -> None:
    name = plain(program).rsplit("/", 1)[-1]
    if name not in MEGATRON_PROGRAMS and not add_preference(
        train.draft, source_of(program), plain(program), ()
    ):
        reason = f"{name} is read as Megatron-LM's pretrain_gpt.py, by its arguments"
        train.draft.assume(source_of(program), reason)
    read_megatron(train, arguments)


def _axolotl(_train: TrainDraft, _program: str, _arguments: list[str]) -> None:
    raise BadRequestError(
        "Axolotl's command names no file of settings: paste the content of the file", "text"
    )


def _torchtitan(train: TrainDraft, program: str, arguments: list[str]) -> None:
    read_torchtitan_line(train, program, arguments)


def _verl(train: TrainDraft, program: str, arguments: list[str]) -> None:
    read_verl(train, program, arguments)


READERS: dict[str, Callable[[TrainDraft, str, list[str]], None]] = {
    "transformers": _hugging_face,
    "trl": _trl,
    "llama_factory": _llama_factory,
    "swift": _swift,
    "nanogpt": _nanogpt,
    "megatron": _megatron,
    "axolotl": _axolotl,
    "torchtitan": _torchtitan,
    "verl": _verl,
}
