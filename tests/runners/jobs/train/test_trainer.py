"""The training loop: pace, learning rate, batches, and steps that would spoil the weights."""

import math
import time

import pytest
import torch
from pydantic import ValidationError
from torch.utils._python_dispatch import TorchDispatchMode

from planner.catalog.engines import get_engine
from runners.jobs import ranks
from runners.jobs.events import read_events
from runners.jobs.loading import fresh_model
from runners.jobs.memory import PeakMeter
from runners.jobs.ranks import Ranks
from runners.jobs.train import layout
from runners.jobs.train.checkpoint import TrainState, checkpoints
from runners.jobs.train.optimizers import build_optimizer
from runners.jobs.train.rows import IGNORED, Batch, TextBatches
from runners.jobs.train.run_progress import (
    FINAL_LEARNING_RATE_RATIO,
    FIRST_SCALE,
    GROWTH_STEPS,
    MAX_SKIPPED,
    DivergedError,
    LossScale,
    RunProgress,
    SpikeGuard,
    learning_rate_ratio,
)
from runners.jobs.train.trainer import steady, step_line
from tests.runners.jobs.cases import refused
from tests.runners.jobs.tiny import TINY_CONFIG, tiny_training
from tests.runners.jobs.train.training import IDS, tiny_trainer


@pytest.fixture
def make_trainer(make_job):
    def make(**changes):
        return tiny_trainer(make_job(tiny_training(**{"max_steps": 20, **changes})))

    return make


def test_the_ranks_have_started_once_the_first_step_is_made(make_trainer, monkeypatch):
    seen = []
    trainer = make_trainer(max_steps=3)
    monkeypatch.setattr(
        Ranks, "settle", lambda _self, policy: seen.append((policy, trainer.state.step))
    )
    trainer.run()
    assert seen == [(trainer.spec.parallel, 0)]  # step 1 is computed and not yet counted
    assert trainer.state.step == 3


def test_a_training_tells_its_falling_loss_what_it_holds_and_its_peak(make_trainer, events_path):
    trainer = make_trainer(early_stop_validations=1)
    trainer.meter = PeakMeter(torch.device("cpu"))
    size = 4 * sum(each.numel() for each in trainer.model.parameters())

    assert trainer.run()
    trainer.job.emitter.close()

    events = read_events(events_path)
    shown = [
        each["body"].get("name") or each["body"].get("eta_seconds")
        for each in events
        if each["kind"] in {"phase", "progress"}
    ]
    evaluations = [at for at, each in enumerate(shown) if each == "Evaluating between steps"]
    assert len(evaluations) >= 5
    for at in evaluations:  # the time left stands on: of earlier evaluations it has their share
        assert isinstance(shown[at + 1], float)
        assert shown[at + 2] == "Training"
    assert trainer.evaluator.final_seconds > 0
    first = next(each["body"] for each in events if each["kind"] == "progress")
    assert (first["done"], first["eta_seconds"] > 0) == (1, True)  # 19 steps at its pace
    told = [each["body"] for each in events if each["kind"] == "metric"]
    values = [each["values"] for each in told]
    losses = [each["loss"] for each in values if "loss" in each]
    assert losses[-1] < 0.7 * losses[0]
    assert sum("validation_loss" in line for line in events_path.read_text().splitlines()) >= 5
    peaks = [each["peak_memory_bytes"] for each in values if "loss" in each]
    assert peaks == sorted(peaks)
    assert peaks[-1] <= trainer.meter.read().bytes
    first, second = (each for each in values if any(key.startswith("held_") for key in each))
    assert set(first) == {"held_gradients_bytes", "held_activations_bytes"}
    assert first["held_gradients_bytes"] == size
    assert second["held_optimizer_states_bytes"] == pytest.approx(2 * size, rel=0.01)
    assert (trainer.state.step, trainer.evaluator.is_over) == (20, False)  # it learns on
    assert trainer.state.validations_without_gain == 0
    assert trainer.state.best_validation_loss > 0


def test_it_ends_after_the_asked_steps(make_trainer):
    trainer = make_trainer(max_steps=7)
    assert trainer.run()
    assert trainer.state.step == 7
    assert trainer.state.tokens == 7 * 4 * 64


def test_it_ends_when_the_time_is_up(make_trainer):
    trainer = make_trainer(max_steps=None, time_budget_seconds=0.5)
    trainer.run()
    assert trainer.state.elapsed_seconds >= 0.5


def test_validations_without_a_gain_end_it_and_a_restart_remembers_them(make_trainer, capfd):
    learns_nothing = {"learning_rate": 1e-12, "max_steps": 80}
    trainer = make_trainer(early_stop_validations=2, **learns_nothing)
    trainer.evaluator.patience.take(trainer.state, 1.0)  # no loss of this model is as low
    trainer.evaluator.patience.take(trainer.state, 2.0)
    trainer.checkpoint()
    resumed = make_trainer(early_stop_validations=2, **learns_nothing)
    resumed.resume()

    assert resumed.run()
    assert (resumed.state.step, resumed.evaluator.is_over) == (10, True)  # the first of eight
    said = "ended after step 10: 2 validations in a row brought no loss below 1.0000 nats"
    assert said in "".join(capfd.readouterr())


def test_as_many_checkpoints_stay_as_are_asked_for(make_trainer):
    asked = {"keep_checkpoints": 2, "checkpoint_every_seconds": 1e-6, "max_steps": 6}
    trainer = make_trainer(checkpoint_writing="in_step", **asked)
    trainer.run()
    kept = sorted(each.name for each in trainer.job.checkpoint_dir.glob("step-*"))
    assert kept == ["step-00000005", "step-00000006"]


def test_the_share_of_waiting_for_data_is_told(make_trainer, events_path, monkeypatch):
    trainer = make_trainer(max_steps=3)
    micro_batch = trainer.batches.micro_batch

    def late(*where):
        time.sleep(0.2)
        return micro_batch(*where)

    monkeypatch.setattr(trainer.batches, "micro_batch", late)
    trainer.run()
    trainer.job.emitter.close()

    bodies = [each["body"] for each in read_events(events_path) if each["kind"] == "metric"]
    told = [each["values"] for each in bodies if "data_wait_ratio" in each["values"]]
    assert told
    for each in told:
        assert 0.2 <= each["data_wait_ratio"] * each["step_seconds"] <= each["step_seconds"]


def test_a_stop_leaves_a_checkpoint_where_the_model_is_kept_and_says_so(make_trainer):
    for keeps, left in ((False, []), (True, ["step-00000000"])):
        trainer = make_trainer(keeps_model=keeps)
        trainer.job.stop_requested.set()
        assert not trainer.run()
        assert [each.name for each in trainer.job.checkpoint_dir.glob("step-*")] == left


def gradients(model):
    return torch.cat([each.grad.flatten() for each in model.parameters()])


def test_accumulated_micro_batches_are_one_large_batch(make_trainer):
    trainer = make_trainer(gradient_accumulation_steps=2)
    parts = [trainer.batches.micro_batch(0, index) for index in range(2)]
    whole = Batch(*(torch.cat(each) for each in zip(*(part[:2] for part in parts), strict=True)))

    in_parts = trainer.layout.gradients(parts)
    accumulated = gradients(trainer.model)
    trainer.optimizer.zero_grad()
    at_once = trainer.layout.gradients([whole])

    assert float(in_parts.loss) == pytest.approx(float(at_once.loss), rel=1e-5)
    assert torch.allclose(accumulated, gradients(trainer.model), rtol=1e-3, atol=1e-6)


def test_a_micro_batch_with_few_labels_counts_for_few(make_trainer):
    trainer = make_trainer(gradient_accumulation_steps=2)
    full, sparse = (trainer.batches.micro_batch(0, index) for index in range(2))
    labels = sparse.labels.clone()
    labels[:, 1:] = IGNORED
    sparse = sparse._replace(labels=labels)

    both, first, second = (
        float(trainer.layout.gradients(each).loss) for each in ([full, sparse], [full], [sparse])
    )

    assert sparse.num_labels == 4
    assert both == pytest.approx((first * 256 + second * 4) / 260, rel=1e-5)


def test_a_loss_that_is_no_number_ends_the_run_with_advice(make_trainer):
    trainer = make_trainer()
    torch.nn.init.constant_(trainer.model.lm_head.weight, float("nan"))
    with pytest.raises(DivergedError, match=r"learning rate below 0\.01"):
        trainer.run()


def test_a_loss_in_chunks_of_rows_is_that_of_all_rows_with_the_same_gradients(monkeypatch):
    generator = torch.Generator().manual_seed(0)
    labels = torch.randint(0, 501, (2, 37), generator=generator)
    labels[0, :5] = IGNORED
    whole = layout.LOSS_CHUNK_LOGITS
    for dtype in (torch.float32, torch.bfloat16):
        logits = torch.randn(2, 37, 501, generator=generator).to(dtype)
        found = []
        for size in (whole, 501 * 7, 1):  # all rows, seven, one
            monkeypatch.setattr(layout, "LOSS_CHUNK_LOGITS", size)
            asked = logits.clone().requires_grad_()
            loss = layout.summed_loss(asked, labels)
            (loss * 0.37).backward()
            found.append((loss.detach(), asked.grad))
        for loss, gradient in found[1:]:
            torch.testing.assert_close(loss, found[0][0], rtol=1e-6, atol=0)
            assert gradient.equal(found[0][1]), dtype
    assert get_engine("torch", "gpu").loss_chunk_logits == whole  # as the planner counts it


def test_ranks_on_a_processor_are_wrapped_without_a_gpu_that_the_host_has(monkeypatch):
    wrapped = []
    monkeypatch.setattr(
        ranks, "DistributedDataParallel", lambda _model, **options: wrapped.append(options)
    )
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    Ranks(1, 2, local_rank=1).join(torch.nn.Linear(2, 2))
    with torch.device("meta"):
        on_gpu = torch.nn.Linear(2, 2)
    monkeypatch.setattr(
        type(on_gpu.weight),
        "device",
        property(lambda _self: torch.device("cuda:1")),
        raising=False,
    )
    Ranks(1, 2, local_rank=1).join(on_gpu)
    assert [each["device_ids"] for each in wrapped] == [None, [1]]


def test_the_learning_rate_warms_up_peaks_and_decays():
    ratios = [learning_rate_ratio(fraction / 100) for fraction in range(101)]
    assert 0.0 < ratios[0] < 0.05
    assert max(ratios) == pytest.approx(1.0, abs=0.02)
    assert ratios[-1] == pytest.approx(FINAL_LEARNING_RATE_RATIO)
    assert ratios.index(max(ratios)) < 10


def test_a_batch_depends_on_seed_and_step_alone_and_each_token_is_followed_by_the_next():
    batches, again = (TextBatches(IDS, tiny_training()) for _ in range(2))
    first, later, second = (batches.micro_batch(*at) for at in ((3, 0), (4, 0), (3, 1)))
    assert torch.equal(first.input_ids, again.micro_batch(3, 0).input_ids)
    assert not torch.equal(first.input_ids, later.input_ids)
    assert not torch.equal(first.input_ids, second.input_ids)

    batch = TextBatches(IDS, tiny_training()).micro_batch(0, 0)
    assert batch.input_ids.shape == batch.labels.shape == (4, 64)
    assert torch.equal(batch.input_ids[:, 1:], batch.labels[:, :-1])
    assert batch.num_labels == 4 * 64


def test_pace_and_progress_follow_the_nearer_limit_in_its_unit():
    pace = RunProgress(max_steps=100, budget_seconds=10.0)
    assert pace.fraction(TrainState(step=50, elapsed_seconds=1.0)) == 0.5
    assert pace.fraction(TrainState(step=5, elapsed_seconds=9.0)) == 0.9

    pace = RunProgress(max_steps=100, budget_seconds=None)
    for limits, state, step_seconds, between, left in [
        ((100, None), TrainState(step=25, elapsed_seconds=10.0), [], 0.0, 30.0),  # resumed
        ((100, None), TrainState(step=1), [3.0], 0.0, 297.0),  # nothing is known but this step
        ((100, None), TrainState(step=4, elapsed_seconds=9.0), [9.0, 2.0, 0.5, 0.5], 0.0, 48.0),
        ((100, None), TrainState(step=50), [1.0] * 25 + [3.0] * 25, 0.0, 150.0),  # busy since
        ((100, None), TrainState(step=50), [1.0] * 50, 8.0, 54.0),  # half of the validations
        ((100, None), TrainState(step=100, elapsed_seconds=40.0), [0.4] * 100, 8.0, 0.0),
        ((None, 120.0), TrainState(), [], 0.0, 120.0),
        ((None, 120.0), TrainState(step=3, elapsed_seconds=130.0), [43.0] * 3, 0.0, 0.0),
        ((100, 30.0), TrainState(step=50, elapsed_seconds=10.0), [0.2] * 50, 0.0, 10.0),
        ((100, None), TrainState(), [], 0.0, None),
    ]:
        found = RunProgress(*limits).seconds_left(state, step_seconds, between)
        assert found == (None if left is None else pytest.approx(left)), (limits, state)

    state = TrainState(step=5, elapsed_seconds=2.0)
    assert RunProgress(10, None).progress(state) == (5.0, 10.0, "steps")
    assert RunProgress(None, 10.0).progress(state) == (2.0, 10.0, "seconds")


def test_norms_are_not_decayed():
    optimizer = build_optimizer(fresh_model(TINY_CONFIG, torch.float32), 1e-3)
    decayed, plain = optimizer.param_groups
    assert {each.ndim for each in decayed["params"]} == {2}
    assert plain["weight_decay"] == 0.0


def test_a_line_of_log_says_what_a_person_watches_without_the_first_steps():
    assert steady([9.0, 8.0, 1.0, 1.0]) == [1.0, 1.0]
    assert steady([9.0]) == [9.0]
    values = {"loss": 1.18731, "learning_rate": 1.42e-4, "grad_norm": 0.612}
    line = step_line(752, values | {"tokens_per_second": 3124.4})
    assert line == "step 752  loss 1.1873  lr 1.42e-04  grad_norm 0.61  3,124 tok/s"


# Steps that would spoil the weights do not change them; 16-bit gradients keep small numbers.

NOTHING_KNOWN = math.log(512)


def guard(*, skips=False):
    return SpikeGuard(512, 1.5, 3e-3, skips=skips)


def test_a_fault_ends_the_training_with_a_way_out():
    for loss, norm, words in (
        (math.nan, 1.0, "the loss became nan at step 3"),
        (2.0, math.inf, "the norm of the gradients became inf"),
        (7.0, 1.0, r"the loss leapt to 7, above 6\.24"),
    ):
        judge = guard()
        assert judge.allows(1, 2.0, 1.0), (loss, norm, words)
        with refused(DivergedError, words + ".*learning rate below 0.003", (loss, norm, words)):
            judge.allows(3, loss, norm)

    with pytest.raises(ValidationError, match=r"on_spike skip: lomo has changed .* choose stop"):
        tiny_training(optimizer="lomo", on_spike="skip")


def test_a_leap_is_above_recent_losses_and_steps_are_skipped_until_there_are_too_many():
    judge = guard()
    assert judge.limit == pytest.approx(1.5 * NOTHING_KNOWN)
    judge.allows(1, 2.0, 1.0)
    assert judge.limit == NOTHING_KNOWN

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


def reads_of(trainer):
    """Return what will hold how often each step of a trainer waits for the device."""
    make_step, counts = trainer.make_step, []

    def counted():
        with _Reads() as reads:
            values = make_step()
        counts.append(reads.count)
        return values

    trainer.make_step = counted
    return counts


@pytest.mark.equality
def test_a_step_that_is_checked_late_reads_nothing_and_is_the_same(make_job):
    for optimizer in ("adamw", "sgd", "lion", "lomo", "adalomo"):
        micro_steps = 1 if optimizer in {"lomo", "adalomo"} else 3
        spec = {"optimizer": optimizer, "gradient_accumulation_steps": micro_steps, "max_steps": 4}
        at_once, late = (tiny_trainer(make_job(tiny_training(**spec))) for _ in range(2))
        late.checks_late, counts = True, reads_of(late)
        at_once.run()
        late.run()

        assert counts[1:] == [0, 0, 0], optimizer  # the first step also measures
        assert late.last_loss == at_once.last_loss, optimizer
        pairs = zip(late.model.parameters(), at_once.model.parameters(), strict=True)
        assert all(torch.equal(*pair) for pair in pairs), optimizer


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
    first.pace = RunProgress(4, None)
    first.run()
    first.checkpoint()

    resumed.resume()

    assert first.scale.num_overflows > 0
    assert (resumed.scale.value, resumed.scale.good_steps) == (
        first.scale.value,
        first.scale.good_steps,
    )
    assert resumed.scale.value not in {FIRST_SCALE, 2.0**30}
