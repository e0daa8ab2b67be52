"""Steps that would spoil the weights do not change them; 16-bit gradients keep small numbers."""

import math

import pytest
import torch
from pydantic import ValidationError
from torch.utils._python_dispatch import TorchDispatchMode

from runners.jobs.train.checkpoint import checkpoints
from runners.jobs.train.guard import (
    FIRST_SCALE,
    GROWTH_STEPS,
    MAX_SKIPPED,
    DivergedError,
    LossScale,
    Pace,
    SpikeGuard,
)
from tests.runners.jobs.tiny import tiny_training
from tests.runners.jobs.train.training import tiny_trainer

NOTHING_KNOWN = math.log(512)


def guard(*, skips=False):
    return SpikeGuard(512, 1.5, 3e-3, skips=skips)


@pytest.mark.parametrize(
    ("loss", "norm", "words"),
    [
        (math.nan, 1.0, "the loss became nan at step 3"),
        (2.0, math.inf, "the norm of the gradients became inf"),
        (7.0, 1.0, r"the loss leapt to 7, above 6\.24"),
    ],
)
def test_a_fault_ends_the_training_with_a_way_out(loss, norm, words):
    judge = guard()
    assert judge.allows(1, 2.0, 1.0)

    with pytest.raises(DivergedError, match=words + ".*learning rate below 0.003"):
        judge.allows(3, loss, norm)


def test_a_leap_is_above_the_recent_losses_and_above_knowing_nothing():
    judge = guard()
    assert judge.limit == pytest.approx(1.5 * NOTHING_KNOWN)

    judge.allows(1, 2.0, 1.0)

    assert judge.limit == NOTHING_KNOWN


def test_steps_are_skipped_until_there_are_too_many():
    judge = guard(skips=True)

    allowed = [judge.allows(step, math.nan, 1.0) for step in range(MAX_SKIPPED)]

    assert not any(allowed)
    with pytest.raises(DivergedError, match="after 8 steps that were skipped"):
        judge.allows(9, math.nan, 1.0)


def test_a_learning_rate_that_explodes_ends_and_the_last_checkpoint_stays(make_job):
    trainer = tiny_trainer(make_job(tiny_training(learning_rate=30.0)))
    trainer.checkpoint()

    with pytest.raises(DivergedError, match=r"the loss leapt to .* below 30"):
        trainer.run()
    [kept] = checkpoints(trainer.job.checkpoint_dir)
    assert kept.name == "step-00000000"
    assert all(each.isfinite().all() for each in trainer.model.parameters())


class _Reads(TorchDispatchMode):
    """Counts what waits for the device: values that the host takes, but for counts of labels."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        is_read = func is torch.ops.aten._local_scalar_dense.default
        self.count += is_read and args[0].dtype != torch.int64
        return func(*args, **(kwargs or {}))


@pytest.mark.equality
@pytest.mark.parametrize("optimizer", ["adamw", "sgd", "lion", "lomo", "adalomo"])
def test_a_step_that_is_checked_late_reads_nothing_and_is_the_same(make_job, optimizer):
    micro_steps = 1 if optimizer in {"lomo", "adalomo"} else 3
    spec = {"optimizer": optimizer, "gradient_accumulation_steps": micro_steps, "max_steps": 4}
    at_once, late = (tiny_trainer(make_job(tiny_training(**spec))) for _ in range(2))
    late.checks_late, make_step, counts = True, late.make_step, []

    def counted():
        with _Reads() as reads:
            values = make_step()
        counts.append(reads.count)
        return values

    late.make_step = counted
    at_once.run()
    late.run()

    assert counts[1:] == [0, 0, 0]  # the first step also measures
    assert late.last_loss == at_once.last_loss
    assert all(map(torch.equal, late.model.parameters(), at_once.model.parameters()))


def test_a_spike_that_is_checked_late_ends_at_its_own_step_and_is_not_kept(make_job):
    ends = []
    for is_late in (False, True):
        trainer = tiny_trainer(make_job(tiny_training(learning_rate=30.0)))
        trainer.checks_late = is_late
        trainer.checkpoint()
        with pytest.raises(DivergedError) as end:
            trainer.run()
        ends.append(str(end.value))
        [kept] = checkpoints(trainer.job.checkpoint_dir)
        assert kept.name == "step-00000000"
    assert ends[0] == ends[1]


def test_a_skipped_step_leaves_the_weights_as_they_were(make_job):
    trainer = tiny_trainer(make_job(tiny_training(max_steps=3, on_spike="skip")))
    before = [each.clone() for each in trainer.model.parameters()]
    trainer.guard.allows = lambda _step, _loss, _norm: False

    trainer.run()

    pairs = zip(before, trainer.model.parameters(), strict=True)
    assert all(torch.equal(*pair) for pair in pairs)


def test_what_has_happened_already_cannot_be_skipped():
    with pytest.raises(ValidationError, match=r"on_spike skip: lomo has changed .* choose stop"):
        tiny_training(optimizer="lomo", on_spike="skip")


def scaled(value):
    weight = torch.nn.Parameter(torch.zeros(2))
    weight.grad = torch.tensor([value, 1.0])
    return weight


def test_an_overflow_halves_the_scale_and_long_peace_doubles_it():
    scale = LossScale()

    assert not scale.unscale([scaled(math.inf)])
    assert scale.value == FIRST_SCALE / 2
    assert not scale.unscale([scaled(math.nan)])
    assert all(scale.unscale([scaled(1.0)]) for _ in range(GROWTH_STEPS))
    assert (scale.value, scale.num_overflows) == (FIRST_SCALE / 2, 2)
    assert not scale.unscale([scaled(1.0), scaled(math.nan)])  # wherever it stands


def test_a_training_in_fp16_learns_and_ends_with_unscaled_gradients(make_job):
    trainers = [
        tiny_trainer(make_job(tiny_training(max_steps=20, compute_dtype=dtype)))
        for dtype in ("fp16", "fp32")
    ]
    for trainer in trainers:
        trainer.run()

    narrow, wide = (each.last_loss for each in trainers)
    assert narrow == pytest.approx(wide, rel=0.05)


def test_a_resumed_training_in_fp16_goes_on_with_its_scale(make_job):
    spec = tiny_training(max_steps=8, compute_dtype="fp16")
    first, resumed = (tiny_trainer(make_job(spec)) for _ in range(2))
    first.scale.value = 2.0**30  # overflows, so that the first steps halve it
    first.pace = Pace(4, None)
    first.run()
    first.checkpoint()

    resumed.resume()

    assert first.scale.num_overflows > 0
    assert (resumed.scale.value, resumed.scale.good_steps) == (
        first.scale.value,
        first.scale.good_steps,
    )
    assert resumed.scale.value not in {FIRST_SCALE, 2.0**30}
