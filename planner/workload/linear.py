"""The matrix products of one pass: layers, output head and dequantisation."""

from planner.cost.roofline import memory_seconds
from planner.cost.weight_formats import WeightFormat
from planner.cost.weights import key_value_share, linear_parameters_per_rank
from planner.workload.operators import Operation, Part
from planner.workload.setting import Setting


def linear(run: Operation) -> Part:
    """Cost the matrix products of all layers, without routed experts."""
    setting, counts, layout = run.setting, run.setting.counts, run.setting.layout
    used = run.ledger.term(
        linear_parameters_per_rank,
        setting.line(run.work.group, "Linear weights that every token visits", key="linear_used"),
        split=counts.query_output + counts.feed_forward,
        key_value=counts.key_value,
        experts=0,
        tensor_parallel_size=layout.tensor,
        kv_share=key_value_share(setting.model, layout.tensor),
        expert_ranks=layout.expert_group,
        replicated=counts.replicated,
    )
    moved = _bytes_read(run, used) * run.work.steps
    return run.matmul("Linear layers", "linear", used, run.work.new_tokens, moved)


def _bytes_read(run: Operation, used: float) -> float:
    """Return the bytes of the weights that every token uses, each part in its format."""
    setting, counts, layout = run.setting, run.setting.counts, run.setting.layout
    attention, dense = setting.format_of("attention"), setting.format_of("feed_forward")
    if attention == dense:
        return used * read_bytes_per_weight(setting, dense)
    attention_weights = run.ledger.term(
        linear_parameters_per_rank,
        setting.line(run.work.group, "Attention weights that the pass reads", key="linear_read"),
        split=counts.query_output,
        key_value=counts.key_value,
        experts=0,
        tensor_parallel_size=layout.tensor,
        kv_share=key_value_share(setting.model, layout.tensor),
        expert_ranks=layout.expert_group,
        replicated=counts.replicated,
    )
    rest = (used - attention_weights) * read_bytes_per_weight(setting, dense)
    return rest + attention_weights * read_bytes_per_weight(setting, attention)


def read_bytes_per_weight(setting: Setting, stored: WeightFormat) -> float:
    """Return the bytes that a product reads per weight: 16 bits after dequantising."""
    if stored.dtype in setting.engine.dequantise_ops:
        return setting.plain_element_bytes
    return stored.element_bytes


def dequantise(run: Operation) -> Part:
    """Cost reading quantised weights and writing them in 16 bits before each product."""
    setting = run.setting
    if setting.weight_dtype not in setting.engine.dequantise_ops:
        return Part(0.0)
    each = setting.weight_element_bytes + setting.plain_element_bytes
    seconds = run.ledger.term(
        memory_seconds,
        setting.line(run.work.group, "Dequantising weights", "memory_bandwidth", "dequantise"),
        moved_bytes=setting.counts.layer_linear / setting.layout.tensor * each,
        memory_bytes_per_s=run.rates.memory_bytes_per_s,
        memory_efficiency=run.rates.stream_efficiency,
    )
    return Part(seconds)


def output_head(run: Operation) -> Part:
    """Cost the output head for the tokens whose logits are needed."""
    model = run.setting.model
    parameters = model.vocab_size * model.hidden_size / run.setting.layout.tensor
    moved = parameters * run.setting.head_element_bytes
    return run.matmul("Output head", "output_head", parameters, run.work.sampled_tokens, moved)
