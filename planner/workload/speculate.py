"""Decoding with or without speculation by a draft model: time per token and memory.

The draft model runs on the devices of the target, token by token; then one pass of the target
verifies the drafted tokens of all requests and adds one token. Draft weights and KV cache are in
device memory in addition to the target's.
"""

from dataclasses import dataclass, replace

from planner.catalog.engine_limits import refusal
from planner.catalog.models import get_model
from planner.cost.columns import any_of
from planner.cost.dtypes import WIDE
from planner.cost.equation import Ledger, Unrecorded
from planner.cost.memory import MemoryUse, StageMemory
from planner.cost.parameters import count_parameters
from planner.cost.speculation import speculative_gap, tokens_per_round
from planner.errors import NotCoveredError, NotPossibleError
from planner.specs.model import ModelSpec
from planner.specs.strategy import SpeculativeSpec, Strategy
from planner.workload.formats import default_activation_dtype
from planner.workload.forward import PassCost
from planner.workload.generate import decode_pass, prefill_pass
from planner.workload.inference_memory import Load, inference_memory
from planner.workload.named_formats import default_group
from planner.workload.ranks import Layout
from planner.workload.setting import Setting

GROUP = "speculation"
VOCABULARY_SLACK = 0.02  # padded vocabularies of one tokenizer differ by less


@dataclass(frozen=True)
class Decoding:
    """The cost of a token of each sequence and the seconds of the whole step."""

    per_token: PassCost
    step_s: float


def decoding(setting: Setting, ledger: Ledger, sequences: float, context: float) -> Decoding:
    """Return the cost of decoding: one pass per token, or draft and verify rounds."""
    guess = setting.strategy.speculative
    if guess is None:
        plain = decode_pass(setting, ledger, sequences, context)
        return Decoding(plain, plain.total_s)
    verify = decode_pass(setting, ledger, sequences, context, drafted=float(guess.tokens))
    draft = decode_pass(draft_of(setting, guess), Unrecorded(), sequences, context)
    round_tokens = ledger.term(
        tokens_per_round,
        setting.line(GROUP, "Tokens made in a round", key="round_tokens"),
        acceptance_ratio=guess.acceptance_ratio,
        drafted_tokens=guess.tokens,
    )
    gap = ledger.term(
        speculative_gap,
        setting.line(GROUP, "Seconds per token of a round", key="speculative_gap"),
        drafted_tokens=guess.tokens,
        draft_s=draft.total_s,
        verify_s=verify.total_s,
        round_tokens=round_tokens,
    )
    return Decoding(
        _combined_cost(verify, draft, float(guess.tokens), 1 / round_tokens), gap * round_tokens
    )


def prefilling(
    setting: Setting, ledger: Ledger, sequences: float, tokens: float, cached: float = 0.0
) -> PassCost:
    """Return the cost of prefill, with that of the draft model."""
    target = prefill_pass(setting, ledger, sequences, tokens, cached)
    guess = setting.strategy.speculative
    if guess is None:
        return target
    draft = prefill_pass(draft_of(setting, guess), Unrecorded(), sequences, tokens, cached)
    return _combined_cost(target, draft, 1.0, 1.0)


def held_memory(setting: Setting, ledger: Ledger, load: Load) -> MemoryUse:
    """Return the memory of a replica, with the draft's weights and KV cache."""
    target = inference_memory(setting, ledger, load)
    guess = setting.strategy.speculative
    if guess is None:
        return target
    draft = inference_memory(draft_of(setting, guess), Unrecorded(), load).stages[0].by_class
    draft_bytes = {name: draft[name] for name in ("weights", "kv_cache")}
    stages = tuple(_with_draft(stage, draft_bytes) for stage in target.stages)
    return replace(target, stages=stages)


def draft_of(setting: Setting, guess: SpeculativeSpec) -> Setting:
    """Return the setting of the draft model: the target's devices and split, its own weights.

    A draft whose name or config states a format has the weights of its checkpoint, any other has
    16 bits.

    Raises:
        UnknownModelError: the catalog has no such draft model.
        NotPossibleError: its vocabulary differs from the target's, or the engine refuses its
            format.
        NotCoveredError: the target is split into pipeline stages.
    """
    model, target = get_model(guess.draft_model), setting.model
    field = "strategy.speculative.draft_model"
    if abs(model.vocab_size / target.vocab_size - 1) > VOCABULARY_SLACK:
        raise NotPossibleError(
            f"draft_model {model.id} has {model.vocab_size} tokens in its vocabulary, {target.id} "
            f"has {target.vocab_size}: choose a draft of the target's family",
            field,
        )
    if any_of(setting.layout.pipeline > 1):
        raise NotCoveredError(
            f"a draft model with pipeline_parallel_size {setting.layout.pipeline} cannot be "
            "costed yet: use tensor_parallel_size instead",
            "strategy.pipeline_parallel_size",
        )
    plain = {"sparsity": None, "offload": None, "speculative": None}
    strategy = setting.strategy.model_copy(update={**plain, **_draft_formats(setting, model)})
    whole = setting.layout
    layout = Layout(
        data=whole.data,
        tensor=whole.tensor,
        batch_tokens=whole.batch_tokens,
        chunked=whole.chunked,
    )
    return replace(
        setting,
        model=model,
        counts=count_parameters(model),
        strategy=strategy,
        layout=layout,
    )


def _draft_formats(setting: Setting, model: ModelSpec) -> dict[str, object]:
    """Return the weight format of a draft's checkpoint, and the activations that follow from it.

    Raises:
        NotPossibleError: the engine refuses them.
    """
    weight = model.weight_dtype or "bf16"
    if weight in WIDE:
        wide = {"weight_dtype": "bf16", "activation_dtype": "bf16"}
        return {**wide, "quantization": None, "group_size": None}
    activation = default_activation_dtype(weight, setting.device)
    formats = (weight, activation, setting.strategy.kv_cache_dtype)
    refused = refusal(setting.engine, setting.device, model, formats)
    if refused is not None:
        named = "" if refused.field == "model" else f"draft_model {model.id}: "
        raise NotPossibleError(f"{named}{refused.message}", "strategy.speculative.draft_model")
    stored = model.quantization or ""
    own = Strategy(weight_dtype=weight, quantization=stored if ":" in stored else None)
    return {
        "weight_dtype": weight,
        "activation_dtype": activation,
        "quantization": own.quantization,
        "group_size": default_group(own, model, weight, setting.engine),
    }


def _with_draft(stage: StageMemory, draft_bytes: dict[str, float]) -> StageMemory:
    by_class = {name: size + draft_bytes.get(name, 0.0) for name, size in stage.by_class.items()}
    return StageMemory(by_class)


def _combined_cost(first: PassCost, second: PassCost, times: float, scale: float) -> PassCost:
    """Return ``first`` plus ``times`` passes of ``second``, multiplied by ``scale``."""
    return PassCost(
        compute_s=(first.compute_s + times * second.compute_s) * scale,
        memory_s=(first.memory_s + times * second.memory_s) * scale,
        communication_s=(first.communication_s + times * second.communication_s) * scale,
        overhead_s=(first.overhead_s + times * second.overhead_s) * scale,
        total_s=(first.total_s + times * second.total_s) * scale,
        flops=(first.flops + times * second.flops) * scale,
    )
