"""One forward pass wherever it runs: on devices of one kind, or on stages of unlike ones.

A stage of a pipeline takes its share of the layers at the pace of its own devices, and hands over
on the link between its node and the next. What a device would take for all layers is recorded for
each kind, and from it what each stage takes.
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
    """Writes into another ledger, every group with a word on where its terms belong."""

    def __init__(self, ledger: Ledger, where_to: str) -> None:
        super().__init__()
        self.entries, self.where_to = ledger.entries, where_to

    def term(
        self, formula: Equation[P], line: Line, /, *args: P.args, **kwargs: P.kwargs
    ) -> float:
        """Return what the formula gives, recorded in the group of this place."""
        apart = replace(line, group=f"{line.group} on {self.where_to}")
        return super().term(formula, apart, *args, **kwargs)


def aside(ledger: Ledger, where_to: str) -> Ledger:
    """Return a ledger that writes beside what another one has, if that one writes at all."""
    return Aside(ledger, where_to) if ledger.records else ledger


@dataclass(frozen=True)
class StagePass:
    """A pass on one stage: all layers on its devices, what the last stage adds, the way on."""

    layers: PassCost
    head: PassCost
    hop_s: float

    def of(self, held: Quantity, num_layers: int, *, is_last: bool) -> PassCost:
        """Return the pass of a stage that holds so many of the layers."""
        own = self.layers.scaled(cast("float", held / num_layers))
        return own.plus(self.head) if is_last else own.plus(_on_links(self.hop_s))


def forward_pass(
    setting: Setting, ledger: Ledger, work: Pass, beside: Pass | None = None
) -> PassCost:
    """Return the seconds of one forward pass, and of others' attention beside it."""
    if not setting.places:
        return _with_beside(setting, ledger, work, beside)
    passes = list(stage_passes(setting, ledger, work, beside))
    total, last = setting.model.num_hidden_layers, len(passes) - 1
    parts = [
        found.of(held, total, is_last=stage == last)
        for stage, (found, held) in enumerate(zip(passes, setting.split, strict=True))
    ]
    if ledger.records:
        _record_stages(setting, ledger, work, passes)
    whole = reduce(PassCost.plus, parts)
    slowest = largest(part.total_s for part in parts)
    even = whole.total_s / slowest
    ledger.term(
        pass_time,
        setting.line(work.group, "All stages in turn", key="stages"),
        slowest_s=slowest,
        even_stages=even,
    )
    return replace(whole, even_stages=even)


def _record_stages(
    setting: Setting, ledger: Ledger, work: Pass, passes: Sequence[StagePass]
) -> None:
    total, last = setting.model.num_hidden_layers, len(passes) - 1
    for stage, (found, held) in enumerate(zip(passes, setting.split, strict=True)):
        title = f"Stage {stage + 1}: {held} layers on {setting.places[stage].device.id}"
        ledger.term(
            stage_time,
            replace(setting.line(work.group, title, key="stage"), origin=STAGE),
            layers=held,
            layer_s=found.layers.total_s / total,
            rest_s=found.head.total_s if stage == last else found.hop_s,
        )


def stage_passes(
    setting: Setting, ledger: Ledger, work: Pass, beside: Pass | None = None
) -> Iterator[StagePass]:
    """Yield what each stage would take for all layers; stages that are alike are costed once."""
    known: list[tuple[StagePlace, PassCost, PassCost]] = []
    for stage, place in enumerate(setting.places):
        own = alone(setting, place)
        found = next(((whole, head) for seen, whole, head in known if seen == place), None)
        if found is None:
            head = _head(own, work)
            whole = _with_beside(own, aside(ledger, place.device.id), work, beside)
            found = whole.plus(head.scaled(-1.0)), head
            known.append((place, *found))
        is_last = stage == len(setting.places) - 1
        yield StagePass(*found, 0.0 if is_last else _hop(own, ledger, work, place, stage))


def alone(setting: Setting, place: StagePlace) -> Setting:
    """Return the devices of a stage as if they ran all layers by themselves."""
    layout = replace(setting.layout, pipeline=1)
    own = replace(setting, device=place.device, cluster=place.cluster, layout=layout)
    return replace(own, places=(), split=())


def _with_beside(setting: Setting, ledger: Ledger, work: Pass, beside: Pass | None) -> PassCost:
    whole = whole_pass(setting, ledger, work)
    if beside is None:
        return whole
    run = Operation(setting, setting.rates, ledger, beside)
    return whole.plus(_of_part(attention(run)))


def _head(setting: Setting, work: Pass) -> PassCost:
    """Return the product with the vocabulary, which only the last stage computes."""
    return _of_part(output_head(Operation(setting, setting.rates, Unrecorded(), work)))


def _of_part(part: Part) -> PassCost:
    computing = where(part.is_compute, part.seconds, 0.0)
    return PassCost(computing, part.seconds - computing, 0.0, 0.0, part.seconds, part.flops)


def _on_links(seconds: float) -> PassCost:
    return PassCost(0.0, 0.0, seconds, 0.0, seconds, 0.0)


def _hop(setting: Setting, ledger: Ledger, work: Pass, place: StagePlace, stage: int) -> float:
    """Return the seconds in which a stage's output reaches the next one."""
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
    """Return a pass with what it waits for the slowest stage, others of it in between."""
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
