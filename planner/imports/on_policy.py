"""Read what trainers state of a policy's own completions: their number, lengths and place.

A reward scores them (GRPO), or a teacher reads them (distillation).

Completions are the records of an update here, as in TRL's batches and the planner's.
"""

from planner.imports.draft import LARGEST_TOKENS, Draft, Option, Options, shown
from planner.imports.models import known_model
from planner.imports.shell import plain
from planner.imports.training import TrainDraft
from planner.specs.on_policy import DISTILLED, ON_POLICY_OBJECTIVES

# Tokens. Source: huggingface/trl 1.16.0, trl/trainer/grpo_config.py and distillation_config.py
USUAL_COMPLETION = 512
OTHER_DEVICES = "devices of the server of completions, which come on top of the trainer's"
ALONE = "of completions by vLLM, which the text does not turn on"
WHOLE = {
    "num_generations": ("workload.num_generations", 2),
    "num_iterations": ("workload.num_iterations", 1),
}
ENGINE_PINS = {
    "vllm_tensor_parallel_size": "tensor_parallel_size",
    "vllm_gpu_memory_utilization": "gpu_memory_utilization",
}
# Of GRPO alone: `trl distillation` refuses to start with them.
NOT_OF_DISTILLATION = (
    *WHOLE, "generation_batch_size", "steps_per_generation", "reward_funcs",
    "reward_model_name_or_path", "lmbda",
)  # fmt: skip
OF_DISTILLATION = frozenset({
    *ENGINE_PINS, "beta", "max_completion_length", "min_p", "temperature",
    "teacher_model_name_or_path", "teacher_model_revision", "top_k", "top_p", "use_vllm",
    "vllm_enable_sleep_mode", "vllm_mode",
})  # fmt: skip
IN_16_BITS = frozenset({"bfloat16", "float16", "auto"})
WIDE_TEACHER = (
    "TRL loads the teacher in fp32, and the plan has it in the 16 bits of the products: set "
    "--dtype bfloat16"
)
OTHER_TEMPERATURE = (
    "of the completions and of the compared probabilities: it changes no time and no memory, and "
    "the draft has 1; set the training's temperature"
)

OF_COMPLETIONS = frozenset(
    {
        *WHOLE, *ENGINE_PINS, "beta", "generation_batch_size", "max_completion_length",
        "max_prompt_length", "reward_funcs", "reward_model_name_or_path", "steps_per_generation",
        "lmbda", "teacher_model_name_or_path", "use_vllm", "vllm_enable_sleep_mode", "vllm_mode",
    }
)  # fmt: skip


def add_completions(train: TrainDraft, *, of_program: bool = False) -> None:
    """Record the completions of a trainer with TRL's names of settings, if it generates them.

    ``of_program``: the text is a program of the reader's own, not a command of TRL.

    Source: huggingface/trl 1.16.0, trl/trainer/grpo_config.py, trl/trainer/distillation_config.py
    and their scripts in trl/scripts.
    """
    draft, options = train.draft, train.options
    objective = draft.value("workload.objective")
    if objective not in ON_POLICY_OBJECTIVES:
        return
    if objective == DISTILLED:
        _add_teacher(draft, draft.take(options, "teacher_model_name_or_path"))
        _add_of_distillation(draft, options, of_program=of_program)
    for name, (field, least) in WHOLE.items():
        option = draft.take(options, name)
        if option is not None:
            draft.put(option.source, field, option.whole(least))
    beta = draft.take(options, "beta")
    if beta is not None:
        draft.put(
            beta.source, "workload.beta", beta.number(0, 1 if objective == DISTILLED else 1000)
        )
    completion = draft.take(options, "max_completion_length")
    tokens = completion.whole(most=LARGEST_TOKENS) if completion else USUAL_COMPLETION
    source = completion.source if completion else f"max_completion_length {tokens} (the default)"
    draft.put(source, "workload.max_completion_length", tokens)
    put_prompt_length(train, draft.take(options, "max_prompt_length"), source, tokens)
    _add_generation_batch(train)
    _add_generator(train)
    add_rewards(draft, draft.take(options, "reward_funcs"))
    model = draft.take(options, "reward_model_name_or_path")
    if model is not None and known_model(model.text) is not None:
        draft.put(model.source, "workload.reward_model", model.text)
    elif model is not None:
        draft.assume(model.source, "no model of the catalog: its scores take no time in the plan")


def _add_teacher(draft: Draft, option: Option | None) -> None:
    """Record the teacher by its name, which a site may know though the catalog does not."""
    if option is not None:
        draft.put(option.source, "workload.teacher_model", option.text)
    else:
        draft.need("workload.teacher_model", "the model whose probabilities are learnt")


def _add_of_distillation(draft: Draft, options: Options, *, of_program: bool) -> None:
    """Record the teacher's dtype and the temperature; reject what `trl distillation` has not.

    Source: huggingface/trl 1.16.0, trl/trainer/distillation_config.py and
    trl/scripts/distillation.py.
    """
    for name in NOT_OF_DISTILLATION:
        if (option := draft.take(options, name)) is not None:
            draft.reject(option.source, name, OF_DISTILLATION, "trl distillation")
    stated = options.get("dtype") or options.get("torch_dtype")
    is_open = of_program or "teacher_model_init_kwargs" in options
    if stated is None and not is_open:
        draft.assume("no --dtype (float32 by default)", WIDE_TEACHER)
    elif stated is not None and stated.text not in IN_16_BITS and not stated.is_variable:
        draft.assume(stated.source, WIDE_TEACHER)
        options.pop(stated.name, None)
    temperature = draft.take(options, "temperature")
    if temperature is not None and temperature.number(0, 1000) != 1:
        draft.assume(temperature.source, OTHER_TEMPERATURE)
    elif temperature is not None:
        draft.ignore(temperature.source, "as the draft has it")


def put_prompt_length(train: TrainDraft, prompt: Option | None, source: str, tokens: int) -> None:
    """Record the longest prompt, and the sequence that has it and a completion of ``tokens``."""
    if prompt is None:
        return
    longest = prompt.whole(most=LARGEST_TOKENS)
    train.draft.put(prompt.source, "workload.max_prompt_length", longest)
    stated = train.options.get("sequence_length")
    if stated is None or stated.whole(most=LARGEST_TOKENS) < longest + tokens:
        if stated is not None:
            train.draft.ignore(stated.source, "prompt and completion are longer together")
        both = f"{prompt.source} {source}"
        train.options["sequence_length"] = Option("sequence_length", longest + tokens, both, both)


def add_rewards(draft: Draft, option: Option | None) -> None:
    """Record the names of reward functions, which a plan has no time of."""
    if option is None:
        return
    value = option.value if isinstance(option.value, list) else option.text.split()
    names = tuple(plain(str(each)) for each in value)
    draft.rewards += names
    draft.note_rewards(option.source, shown(", ".join(names)))


def _add_generation_batch(train: TrainDraft) -> None:
    """Record the completions of one generation, where it is not that of one update."""
    draft, options = train.draft, train.options
    batch, steps = (
        draft.take(options, name) for name in ("generation_batch_size", "steps_per_generation")
    )
    micro = options.get("micro_batch")
    if batch is not None:
        completions = batch.whole(most=LARGEST_TOKENS)
        draft.put(batch.source, "workload.generation_batch_size", completions)
    if steps is None:
        return
    if batch is None and micro is not None and train.world:
        completions = micro.whole() * train.world * steps.whole()
        draft.put(steps.source, "workload.generation_batch_size", completions)
    else:
        draft.ignore(steps.source, "times the batch of all devices, whose number is not stated")


def _add_generator(train: TrainDraft) -> None:
    """Record where completions are generated, and the share of the devices that they take."""
    draft, options = train.draft, train.options
    switch, mode = draft.take(options, "use_vllm"), draft.take(options, "vllm_mode")
    sleep = draft.take(options, "vllm_enable_sleep_mode")
    parts = {name: draft.take(options, name) for name in ENGINE_PINS}
    is_used = switch is not None and switch.is_on
    is_shared = mode is None or mode.text.lower() != "server"
    if not is_used:
        source = switch.source if switch else "no use_vllm (off by default)"
        draft.put(source, "pins.rollout.engine", "transformers")
    elif switch is not None:
        place = " ".join(each.source for each in (switch, mode) if each)
        draft.put(place, "pins.rollout.engine", "vllm")
        draft.put(place, "workload.generator", "colocated" if is_shared else "separate")
        mode = None
        if not is_shared:
            draft.need("workload.rollout_devices", OTHER_DEVICES)
    for option in (mode, sleep if not is_used else None):
        if option is not None:
            draft.ignore(option.source, ALONE)
    if is_used and sleep is not None:
        value = "generator" if sleep.is_on else "none"
        draft.put(sleep.source, "pins.rollout.sleep", value)
    for name, option in parts.items():
        if option is None:
            continue
        if not is_used or not is_shared:
            draft.ignore(option.source, ALONE if not is_used else "of the server beside it")
        elif name == "vllm_tensor_parallel_size":
            draft.put(option.source, f"pins.rollout.{ENGINE_PINS[name]}", option.whole())
        else:
            draft.put(option.source, f"pins.rollout.{ENGINE_PINS[name]}", option.number(0.01, 1))
