"""Pipeline schedules executed pass by pass: a slow second opinion on bubbles and memory.

Each stage has an ordered list of passes; a pass starts when its stage is free and what it needs
is there. Nothing here knows a formula.
"""

from dataclasses import dataclass

FORWARD, BACKWARD, INPUT_GRADIENT, WEIGHT_GRADIENT = "F", "B", "I", "W"


@dataclass(frozen=True)
class Pass:
    """One pass of one micro-batch over one chunk of layers of one stage."""

    kind: str
    micro_batch: int
    chunk: int = 0


@dataclass(frozen=True)
class Run:
    """What an execution came to: its length, and the chunks that each stage held at most."""

    seconds: float
    most_held: tuple[int, ...]


def gpipe(stage, stages, micro_batches):
    """Return all forward passes, then all backward passes."""
    batches = range(micro_batches)
    return [Pass(FORWARD, m) for m in batches] + [Pass(BACKWARD, m) for m in batches]


def one_f_one_b(stage, stages, micro_batches):
    """Return as many forward passes as stages follow, then one of each in turn."""
    ahead = min(stages - stage - 1, micro_batches)
    order = [Pass(FORWARD, m) for m in range(ahead)]
    for m in range(micro_batches - ahead):
        order += [Pass(FORWARD, m + ahead), Pass(BACKWARD, m)]
    return order + [Pass(BACKWARD, m) for m in range(micro_batches - ahead, micro_batches)]


def interleaved(chunks):
    """Return a schedule of ``chunks`` chunks a stage, in groups of as many as there are stages."""

    def order_of(stage, stages, micro_batches):
        slots = [
            (group + within, chunk)
            for group in range(0, micro_batches, stages)
            for chunk in range(chunks)
            for within in range(stages)
        ]
        forward = [Pass(FORWARD, m, c) for m, c in slots]
        backward = [Pass(BACKWARD, m, chunks - 1 - c) for m, c in slots]
        ahead = min(2 * (stages - stage - 1) + (chunks - 1) * stages, len(slots))
        order = forward[:ahead]
        for number in range(len(slots) - ahead):
            order += [forward[ahead + number], backward[number]]
        return order + backward[len(slots) - ahead :]

    return order_of


def needs(done, stage, stages, chunks):
    """Return the passes, with their stage, that must have ended before this one may start."""
    if done.kind == WEIGHT_GRADIENT:
        return [(stage, Pass(INPUT_GRADIENT, done.micro_batch, done.chunk))]
    if done.kind == FORWARD:
        if stage > 0:
            return [(stage - 1, done)]
        return [(stages - 1, Pass(FORWARD, done.micro_batch, done.chunk - 1))] * (done.chunk > 0)
    own = [(stage, Pass(FORWARD, done.micro_batch, done.chunk))]
    if stage < stages - 1:
        return [*own, (stage + 1, done)]
    if done.chunk < chunks - 1:
        return [*own, (0, Pass(done.kind, done.micro_batch, done.chunk + 1))]
    return own


def execute(order_of, stages, micro_batches, seconds, chunks=1):
    """Run a schedule; ``seconds`` gives each kind of pass its length over a whole stage."""
    queues = [list(order_of(stage, stages, micro_batches)) for stage in range(stages)]
    ended, free = {}, [0.0] * stages
    held, most = [0] * stages, [0] * stages
    while any(queues):
        moved = False
        for stage, queue in enumerate(queues):
            while queue and all(each in ended for each in needs(queue[0], stage, stages, chunks)):
                one = queue.pop(0)
                waited = [ended[each] for each in needs(one, stage, stages, chunks)]
                start = max([free[stage], *waited])
                free[stage] = ended[stage, one] = start + seconds[one.kind] / chunks
                held[stage] += {FORWARD: 1, BACKWARD: -1, INPUT_GRADIENT: 0, WEIGHT_GRADIENT: -1}[
                    one.kind
                ]
                most[stage] = max(most[stage], held[stage])
                moved = True
        assert moved, "the schedule waits for itself"
    return Run(max(free), tuple(most))
