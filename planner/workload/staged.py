"""One forward pass on identical devices or on pipeline stages with different devices.

Each stage runs its share of the layers at the speed of its own devices and sends its output over
the link to the next node. The ledger records the time of all layers per kind of device and the
resulting time per stage.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from typing import cast

from planner.cost.columns import largest, where
from planner.cost.communication import point_to_point_seconds
from planner.cost.equation import Equation, Ledger, Line, Origin, P, Unrecorded
from planner.cost.quantity import Quantity
from planner.cost.stages import paced_time, pass_time, stage_time
from planner.workload.attention import attention
from planner.workload.forward import PassCost, whole_pass
from planner.workload.linear import output_head
from planner.workload.operators import Operation, Part, Pass
from planner.workload.ranks import StagePlace
from planner.workload.setting import Setting

STAGE = Origin("modelled", "of one pass: the layers of a stage at its own devices' pace")


class Aside(Ledger):
    """A ledger that writes into another one, with a suffix on the group of every line."""

    def __init__(self, ledger: Ledger, where_to: str) -> None:
        super().__init__()
        self.entries, self.where_to = ledger.entries, where_to

    def term(
        self, formula: Equation[P], line: Line, /, *args: P.args, **kwargs: P.kwargs
    ) -> float:
        """Return the result of a formula and record it under the suffixed group."""
        suffixed = replace(line, group=f"{line.group} on {self.where_to}")
        return super().term(formula, suffixed, *args, **kwargs)


def aside(ledger: Ledger, where_to: str) -> Ledger:
    """Return a ledger with suffixed groups, or the same one if it does not record."""
    return Aside(ledger, where_to) if ledger.records else ledger


@dataclass(frozen=True)
class StagePass:
    """A pass on one stage: all layers on its devices, the output head and the send to the next."""

    layers: PassCost
    head: PassCost
    hop_s: float

    def of(self, held: Quantity, num_layers: int, *, is_last: bool) -> PassCost:
        """Return the cost of the stage with ``held`` of ``num_layers`` layers."""
        own = self.layers.scaled(cast("float", held / num_layers))
        return own.plus(self.head) if is_last else own.plus(_link_cost(self.hop_s))


def forward_pass(
    setting: Setting, ledger: Ledger, work: Pass, beside: Pass | None = None
) -> PassCost:
    """Return the cost of one forward pass, plus the attention of a second one if given."""
    if not setting.places:
        return _with_second_pass(setting, ledger, work, beside)
    passes = list(stage_passes(setting, ledger, work, beside))
    total, last = setting.model.num_hidden_layers, len(passes) - 1
    parts = [
        stage_pass.of(layers, total, is_last=stage == last)
        for stage, (stage_pass, layers) in enumerate(zip(passes, setting.split, strict=True))
    ]
    if ledger.records:
        _record_stages(setting, ledger, work, passes)
    whole = reduce(PassCost.plus, parts)
    slowest = largest(part.total_s for part in parts)
    even = whole.total_s / slowest
    ledger.term(
        pass_time,
        setting.line(work.group, "All stages in sequence", key="stages"),
        slowest_s=slowest,
        even_stages=even,
    )
    return replace(whole, even_stages=even)


def _record_stages(
    setting: Setting, ledger: Ledger, work: Pass, passes: Sequence[StagePass]
) -> None:
    total, last = setting.model.num_hidden_layers, len(passes) - 1
    for stage, (stage_pass, layers) in enumerate(zip(passes, setting.split, strict=True)):
        title = f"Stage {stage + 1}: {layers} layers on {setting.places[stage].device.id}"
        ledger.term(
            stage_time,
            replace(setting.line(work.group, title, key="stage"), origin=STAGE),
            layers=layers,
            layer_s=stage_pass.layers.total_s / total,
            rest_s=stage_pass.head.total_s if stage == last else stage_pass.hop_s,
        )


def stage_passes(
    setting: Setting, ledger: Ledger, work: Pass, beside: Pass | None = None
) -> Iterator[StagePass]:
    """Yield the pass of each stage for all layers; identical stages are costed once."""
    costed: list[tuple[StagePlace, PassCost, PassCost]] = []
    for stage, place in enumerate(setting.places):
        stage_setting = alone(setting, place)
        cost = next(((whole, head) for other, whole, head in costed if other == place), None)
        if cost is None:
            head = _head(stage_setting, work)
            whole = _with_second_pass(stage_setting, aside(ledger, place.device.id), work, beside)
            cost = whole.plus(head.scaled(-1.0)), head
            costed.append((place, *cost))
        is_last = stage == len(setting.places) - 1
        yield StagePass(
            *cost, 0.0 if is_last else _hop_seconds(stage_setting, ledger, work, place, stage)
        )


def alone(setting: Setting, place: StagePlace) -> Setting:
    """Return the setting of a stage's devices as if they ran all layers."""
    layout = replace(setting.layout, pipeline=1)
    own = replace(setting, device=place.device, cluster=place.cluster, layout=layout)
    return replace(own, places=(), split=())


def _with_second_pass(
    setting: Setting, ledger: Ledger, work: Pass, beside: Pass | None
) -> PassCost:
    whole = whole_pass(setting, ledger, work)
    if beside is None:
        return whole
    run = Operation(setting, setting.rates, ledger, beside)
    return whole.plus(_cost_of_part(attention(run)))


def _head(setting: Setting, work: Pass) -> PassCost:
    """Return the product with the vocabulary, which only the last stage computes."""
    return _cost_of_part(output_head(Operation(setting, setting.rates, Unrecorded(), work)))


def _cost_of_part(part: Part) -> PassCost:
    computing = where(part.is_compute, part.seconds, 0.0)
    return PassCost(computing, part.seconds - computing, 0.0, 0.0, part.seconds, part.flops)


def _link_cost(seconds: float) -> PassCost:
    return PassCost(0.0, 0.0, seconds, 0.0, seconds, 0.0)


def _hop_seconds(
    setting: Setting, ledger: Ledger, work: Pass, place: StagePlace, stage: int
) -> float:
    """Return the seconds to send a stage's output to the next stage."""
    rates = setting.rates
    line = setting.line(work.group, f"Hand-over to stage {stage + 2}", "communication", "pipeline")
    return ledger.term(
        point_to_point_seconds,
        line,
        payload_bytes=work.new_tokens
        * setting.model.hidden_size
        * setting.activation_element_bytes,
        ranks=2,
        link_bytes_per_s=rates.link_bytes_per_s
        if place.inside_node
        else rates.inter_node_bytes_per_s,
        latency_s=rates.latency_s,
    )


def paced(
    setting: Setting, ledger: Ledger, cost: PassCost, group: str, in_flight: float
) -> PassCost:
    """Return a pass lengthened by waiting for the slowest stage of the pipeline."""
    if cost.even_stages is None:
        return cost
    seconds = ledger.term(
        paced_time,
        setting.line(group, "From one pass to the next", key="paced"),
        pass_s=cost.total_s,
        in_flight=in_flight,
        even_stages=cost.even_stages,
    )
    return cost.scaled(seconds / cost.total_s)
