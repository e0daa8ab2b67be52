"""Read verl's command line of GRPO, whose settings are overrides of Hydra: ``data.x=1``.

verl counts batches in prompts, and the planner in completions, which are ``rollout.n`` times more.

Source: volcengine/verl b178a3c, verl/trainer/config, verl/workers/fsdp_workers.py and
examples/grpo_trainer.
"""

import re

from planner.imports.draft import LARGEST_TOKENS, Option, Options, shown
from planner.imports.shell import is_variable, plain, refuse_substitution, source_of
from planner.imports.trainers import put_world
from planner.imports.training import TrainDraft, read_training
from planner.specs.base import BadRequestError

OVERRIDE = re.compile(r"(?:\+\+|\+)?([\w.]+)=(.*)", re.DOTALL)
ACTOR, ROLLOUT = "actor_rollout_ref.actor.", "actor_rollout_ref.rollout."
MODEL = "actor_rollout_ref.model."
LENGTH = 512  # of data.max_prompt_length and data.max_response_length
PROMPTS = {"data.train_batch_size": 1024, f"{ACTOR}ppo_mini_batch_size": 256}
GPUS_PER_NODE = 8
COEFFICIENT = 0.001  # kl_loss_coef
ROLLOUT_SHARE, ROLLOUT_SIZE = 0.5, 2  # gpu_memory_utilization, tensor_model_parallel_size
# Settings that trainers share, by their common names.
COMMON = {
    f"{MODEL}path": "model",
    f"{ACTOR}ppo_micro_batch_size_per_gpu": "micro_batch",
    f"{ACTOR}ulysses_sequence_parallel_size": "context",
    f"{ACTOR}megatron.tensor_model_parallel_size": "tensor",
    f"{ACTOR}megatron.pipeline_model_parallel_size": "pipeline",
    f"{ACTOR}megatron.context_parallel_size": "context",
    f"{ACTOR}megatron.expert_model_parallel_size": "expert",
    f"{MODEL}enable_gradient_checkpointing": "recompute",
    f"{MODEL}lora_rank": "rank",
    f"{MODEL}lora.rank": "rank",
}
# The beginnings of other settings, and why a plan does not use them.
REASONS = (
    ("data.", "no effect on the plan: the data set and its preparation"),
    ("trainer.", "no effect on the plan: logs, metrics and traces, or how long a run lasts"),
    ("reward", "Slipway plans rewards as functions, in workload.reward_seconds"),
    ("custom_reward", "Slipway plans rewards as functions, in workload.reward_seconds"),
    ("critic.", "GRPO has no critic"),
    ("algorithm.", "no effect on the plan: the learning rate and regularisation"),
    (f"{ACTOR}optim.", "no effect on the plan: the learning rate and regularisation"),
    ("", "Slipway does not model it"),
)


def read_verl(train: TrainDraft, program: str, words: list[str]) -> None:
    """Read ``python -m verl.trainer.main_ppo algorithm.adv_estimator=grpo …``.

    Raises:
        BadRequestError: it trains by another method than GRPO.
    """
    draft = train.draft
    draft.kind = "verl"
    draft.ignore(source_of(program), "verl's trainer is read by its overrides")
    options = _overrides(train, words)
    method = draft.take(options, "algorithm.adv_estimator")
    if method is None or method.text.lower() != "grpo":
        named = method.text if method else "gae, its default"
        raise BadRequestError(
            f"verl trains by {shown(named)}: of its methods Slipway plans "
            "algorithm.adv_estimator=grpo alone; state another training in a plan of your own",
            "text",
        )
    draft.put(method.source, "workload.objective", "grpo")
    _add_devices(train, options)
    _add_batches(train, options)
    _add_divergence(train, options)
    _add_rollout(train, options)
    for name, setting in COMMON.items():
        option = draft.take(options, name)
        if option is not None and not (setting == "rank" and option.text == "0"):
            train.options[setting] = option
        elif option is not None:
            draft.ignore(option.source, "0: no adapters")
    default = "enable_gradient_checkpointing=True (the default)"
    train.options.setdefault("recompute", Option("recompute", "true", default, default))
    if "rank" in train.options:
        train.method = "lora"
    _add_sharding(train, options)
    read_training(train)
    for name, option in options.items():
        reason = next(reason for start, reason in REASONS if name.startswith(start))
        draft.ignore(option.source, reason)


def _overrides(train: TrainDraft, words: list[str]) -> Options:
    """Return the overrides of a command line; other words are recorded as not used."""
    options: Options = {}
    for word in words:
        refuse_substitution(word)
        match = OVERRIDE.fullmatch(plain(word))
        if match is None:
            train.draft.ignore(source_of(word), "no override of a setting: it is not read")
            continue
        name, value = match[1], match[2].strip("'\"")
        if name in options:
            train.draft.ignore(options[name].source, "it stands there again: the last one counts")
        source = source_of(word)
        options[name] = Option(name, value, source, name, is_variable=is_variable(word))
    return options


def _add_devices(train: TrainDraft, options: Options) -> None:
    draft = train.draft
    per_node = draft.take(options, "trainer.n_gpus_per_node")
    nodes = draft.take(options, "trainer.nnodes")
    source = " ".join(each.source for each in (per_node, nodes) if each)
    count = per_node.whole() if per_node else GPUS_PER_NODE
    source = source or f"trainer.n_gpus_per_node={GPUS_PER_NODE} (the default)"
    put_world(train, count, nodes.whole() if nodes else 1, source)


def _add_batches(train: TrainDraft, options: Options) -> None:
    """Record completions, their lengths, and batches of prompts times completions."""
    draft = train.draft
    each = draft.take(options, f"{ROLLOUT}n")
    if each is None:
        draft.need("workload.num_generations", f"completions of a prompt ({ROLLOUT}n)")
    else:
        draft.put(each.source, "workload.num_generations", each.whole(2))
    lengths = []
    for name, field in (
        ("data.max_prompt_length", "workload.max_prompt_length"),
        ("data.max_response_length", "workload.max_completion_length"),
    ):
        option = draft.take(options, name)
        lengths.append(option.whole(most=LARGEST_TOKENS) if option else LENGTH)
        source = option.source if option else f"{name}={LENGTH} (the default)"
        draft.put(source, field, lengths[-1])
    both = "prompts and responses together"
    train.options["sequence_length"] = Option("sequence_length", sum(lengths), both, both)
    for name, field in (
        ("data.train_batch_size", "generation_batch_size"),
        (f"{ACTOR}ppo_mini_batch_size", "global_batch_size"),
    ):
        option = draft.take(options, name)
        prompts = option.whole(most=LARGEST_TOKENS) if option else PROMPTS[name]
        source = option.source if option else f"{name}={prompts} (the default)"
        if each is not None and field == "global_batch_size":
            # Put as an option, of which the trainers' reader makes the batch.
            number = prompts * each.whole(2)
            train.options["global_batch"] = Option("global_batch", number, source, source)
        elif each is not None:
            draft.put(source, f"workload.{field}", prompts * each.whole(2))
    epochs = draft.take(options, f"{ACTOR}ppo_epochs")
    if epochs is not None:
        draft.put(epochs.source, "workload.num_iterations", epochs.whole())


def _add_divergence(train: TrainDraft, options: Options) -> None:
    """Record the weight of the divergence from a reference, which verl has in loss or reward."""
    draft = train.draft
    loss, reward = (
        draft.take(options, name) for name in (f"{ACTOR}use_kl_loss", "algorithm.use_kl_in_reward")
    )
    weight = draft.take(options, f"{ACTOR}kl_loss_coef")
    is_on = any(each is not None and each.is_on for each in (loss, reward))
    source = " ".join(each.source for each in (loss, reward, weight) if each)
    if is_on:
        beta = weight.number(0, 1000) if weight else COEFFICIENT
        draft.put(source, "workload.beta", beta)
    elif source:
        draft.ignore(source, "off: no reference model")


def _add_rollout(train: TrainDraft, options: Options) -> None:
    """Record the engine of completions, which shares the trainer's devices."""
    draft = train.draft
    draft.put("verl's hybrid engine", "workload.generator", "colocated")
    engine = draft.take(options, f"{ROLLOUT}name")
    if engine is not None and engine.text.lower() in {"vllm", "sglang"}:
        draft.put(engine.source, "pins.rollout.engine", engine.text.lower())
    elif engine is not None:
        draft.assume(engine.source, "Slipway plans completions by vLLM or SGLang")
    size = draft.take(options, f"{ROLLOUT}tensor_model_parallel_size")
    share = draft.take(options, f"{ROLLOUT}gpu_memory_utilization")
    draft.put(
        size.source if size else f"tensor_model_parallel_size={ROLLOUT_SIZE} (the default)",
        "pins.rollout.tensor_parallel_size",
        size.whole() if size else ROLLOUT_SIZE,
    )
    draft.put(
        share.source if share else f"gpu_memory_utilization={ROLLOUT_SHARE} (the default)",
        "pins.rollout.gpu_memory_utilization",
        share.number(0.01, 1) if share else ROLLOUT_SHARE,
    )
    freed = draft.take(options, f"{ROLLOUT}free_cache_engine")
    parts = [
        draft.take(options, f"{ACTOR}{kind}.{name}_offload")
        for kind in ("fsdp_config", "megatron")
        for name in ("param", "optimizer")
    ]
    stated = [each for each in parts if each is not None]
    is_both = sum(each.is_on for each in stated) == 2  # noqa: PLR2004 - weights and states
    source = " ".join(each.source for each in (freed, *stated) if each)
    sleep = "both" if is_both else "none" if freed is not None and not freed.is_on else "generator"
    draft.put(source or "free_cache_engine=True (the default)", "pins.rollout.sleep", sleep)


def _add_sharding(train: TrainDraft, options: Options) -> None:
    """Record FSDP, which verl shards by, unless the text has Megatron-LM's sizes."""
    draft = train.draft
    strategy = draft.take(options, f"{ACTOR}strategy")
    size = draft.take(options, f"{ACTOR}fsdp_config.fsdp_size")
    is_megatron = (strategy is not None and strategy.text == "megatron") or any(
        name in train.options for name in ("tensor", "pipeline", "expert")
    )
    if is_megatron:
        for option in (strategy, size):
            if option is not None:
                draft.ignore(option.source, "the parallel sizes of Megatron-LM are read")
        return
    source = strategy.source if strategy else "strategy=fsdp (the default)"
    draft.put(source, "pins.zero_stage", 3)
    if size is not None and not size.text.startswith("-"):
        draft.put(size.source, "pins.zero_shard_size", size.whole())
    elif size is not None:
        draft.ignore(size.source, "all ranks, as without it")
