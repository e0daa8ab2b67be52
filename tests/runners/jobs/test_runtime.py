"""A job: what its spec allows, how its process begins and ends, and several ranks as one."""

import contextlib
import errno
import os
import sys

import pytest
import torch
from pydantic import TypeAdapter, ValidationError

from runners.jobs import ranks, runtime
from runners.jobs.events import Emitter, read_events
from runners.jobs.ranks import ALONE, RankFailedError, Ranks, joined_ranks, naming_rank_failures
from runners.jobs.runtime import BadInputError, MissingModelError, num_threads, open_job, run_job
from runners.jobs.train.job import _check_same_text, _check_share
from runners.jobs.train.run_progress import DivergedError
from runners.jobspec import (
    ArtefactModel,
    BenchmarkSpec,
    CompressSpec,
    DataParallel,
    JobSpec,
    ServeSpec,
    TrainSpec,
)
from runners.shared.reasons import Reason
from runners.supervision.classification import Ending, classify
from tests.runners.jobs.cases import refused
from tests.runners.jobs.tiny import TINY, tiny_training


def test_the_spec_and_the_host_folder_come_from_where_the_attempt_is(host, monkeypatch, tmp_path):
    folder = host.attempt("read", tiny_training(max_steps=3))
    assert open_job(folder, "train").spec == tiny_training(max_steps=3)
    monkeypatch.setenv("SLIPWAY_HOST_DIR", str(tmp_path))
    assert open_job(host.attempt("env", tiny_training()), "train").host_dir == tmp_path
    monkeypatch.delenv("SLIPWAY_HOST_DIR", raising=False)
    assert (
        open_job(host.attempt("above", tiny_training()), "train").host_dir == host.path.resolve()
    )


def test_an_absent_or_damaged_spec_or_one_of_another_kind_is_refused(tmp_path, host):
    with pytest.raises(BadInputError, match=r"cannot read .*spec\.json"):
        open_job(tmp_path, "train")
    (tmp_path / "spec.json").write_text('{"attempt_id": "a"}')
    with pytest.raises(BadInputError, match="job_id: Field required"):
        open_job(tmp_path, "train")
    folder = host.attempt("other", BenchmarkSpec(model=TINY))
    with pytest.raises(BadInputError, match="kind 'benchmark', this is 'train'"):
        open_job(folder, "train")


def test_threads_follow_the_environment_or_else_the_cores(monkeypatch):
    for configured, expected in (("3", 3), ("", None), ("many", None), ("0", None)):
        monkeypatch.setenv("OMP_NUM_THREADS", configured)
        assert num_threads() == (expected or len(os.sched_getaffinity(0))), (configured, expected)


def test_a_missing_argument_ends_with_usage_and_exit_3(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["benchmark"])
    with pytest.raises(SystemExit) as ended:
        run_job("benchmark", lambda _job: None)
    assert ended.value.code == 3
    assert capsys.readouterr().err == (
        "BAD_INPUT: a job of kind benchmark is started with one argument, ATTEMPT_DIR, not 0\n"
    )


def test_importing_the_package_puts_the_libraries_offline():
    import runners.jobs  # noqa: F401 - its import is what is tested

    assert os.environ["HF_HUB_OFFLINE"] == "1"


def test_a_full_disk_and_a_full_quota_end_a_job_as_disk_full(tmp_path):
    for number, way_out in ((errno.ENOSPC, "free some space"), (errno.EDQUOT, "quota raised")):
        full = runtime.disk_full(OSError(number, os.strerror(number), "model"), tmp_path)
        assert way_out in str(full)
        assert classify(Ending(3, None, f"{full.prefix}: {full}")) is Reason.DISK_FULL
    assert runtime.disk_full(OSError(errno.EIO, os.strerror(errno.EIO)), tmp_path) is None


# A rank that torchrun starts again repeats the words of an end that would come again.


def test_what_would_end_every_rank_is_said_again_and_not_done_again(tmp_path, monkeypatch, capsys):
    for at, (error, said) in enumerate(
        (
            (BadInputError("4 ranks, 2 started"), "BAD_INPUT: 4 ranks, 2 started"),
            (MissingModelError("no /m"), "MODEL_OR_DATA_MISSING: no /m"),
            (DivergedError("loss nan"), "runners.jobs.train.run_progress.DivergedError: loss nan"),
            (
                torch.OutOfMemoryError("CUDA out of memory"),
                "torch.OutOfMemoryError: CUDA out of memory",
            ),
            (
                RuntimeError("DefaultCPUAllocator: can't allocate memory"),
                "builtins.RuntimeError: Def",
            ),
        )
    ):
        (folder := tmp_path / str(at)).mkdir()
        monkeypatch.setenv(runtime.COUNT_VARIABLE, "0")
        runtime.note_end(folder, error)
        runtime.end_as_before(folder, 3)  # a first start looks at no note

        monkeypatch.setenv(runtime.COUNT_VARIABLE, "1")
        with pytest.raises(SystemExit) as ended:
            runtime.end_as_before(folder, 3)

        assert ended.value.code == 3, said
        assert capsys.readouterr().err.startswith(said), said


def test_what_may_go_well_the_next_time_leaves_no_note(tmp_path, monkeypatch):
    monkeypatch.setenv(runtime.COUNT_VARIABLE, "0")
    runtime.note_end(tmp_path, RuntimeError("Connection closed by peer"))
    monkeypatch.setenv(runtime.COUNT_VARIABLE, "1")
    runtime.end_as_before(tmp_path, 3)
    assert list(tmp_path.iterdir()) == []

    monkeypatch.delenv(runtime.COUNT_VARIABLE, raising=False)
    runtime.note_end(tmp_path, BadInputError("4 ranks, 2 started"))
    runtime.end_as_before(tmp_path, 3)
    assert list(tmp_path.iterdir()) == []


def test_a_job_that_cannot_run_as_asked_does_its_work_once(host, monkeypatch, capsys):
    folder, done = host.attempt("asked-wrongly", tiny_training()), []
    monkeypatch.setattr("sys.argv", ["train", str(folder)])

    def work(_job: object) -> None:
        done.append(1)
        raise BadInputError("ask otherwise")

    for count in ("0", "1", "2"):
        monkeypatch.setenv(runtime.COUNT_VARIABLE, count)
        with pytest.raises(SystemExit):
            run_job("train", work)

    assert done == [1]
    assert capsys.readouterr().err == "BAD_INPUT: ask otherwise\n" * 3


# Several ranks as one training: who leads, who computes what, and what a lost one looks like.

GLOO = "[/src/gloo/transport/tcp/pair.cc:537] Read error [10.0.0.1]:65: Connection reset by peer."


def test_alone_a_process_leads_and_exchanges_nothing(make_job):
    assert ALONE.is_lead
    assert ALONE.is_alone
    assert ALONE.total([1.0, 2.5]) == [1.0, 2.5]
    assert ALONE.name == ""
    with joined_ranks(make_job(tiny_training()), DataParallel()) as ranks:
        assert ranks is ALONE


def test_every_micro_batch_is_computed_once_and_ranks_with_too_few_are_refused(monkeypatch):
    for size, count in ((1, 3), (2, 4), (2, 5), (3, 3), (3, 8)):
        shares = [list(Ranks(rank, size).share(count)) for rank in range(size)]
        assert sorted(index for share in shares for index in share) == list(range(count)), size
    with pytest.raises(BadInputError, match="3 ranks share 2 micro-batches"):
        _check_share(Ranks(0, 3), tiny_training(gradient_accumulation_steps=2))
    monkeypatch.setattr(Ranks, "total", lambda _self, _values: [1.0])
    with pytest.raises(BadInputError, match="same Python version"):
        _check_same_text(Ranks(1, 2), "f" * 64)


def test_an_error_of_the_network_alone_is_put_down_to_a_lost_rank():
    for words in (GLOO, "Timed out waiting 5000ms for recv operation"):
        with (
            refused(RankFailedError, r"^rank 1 of 2: ", words),
            naming_rank_failures(Ranks(1, 2)),
        ):
            raise RuntimeError(words)

    with pytest.raises(RankFailedError) as lost, naming_rank_failures(Ranks(0, 2)):
        raise RuntimeError(f"{GLOO} This is typically caused by a hanging worker.")
    assert str(lost.value).endswith("Read error [10.0.0.1]:65: Connection reset by peer")
    with pytest.raises(RuntimeError, match="shape"), naming_rank_failures(Ranks(0, 2)):
        raise RuntimeError("shape mismatch")
    with pytest.raises(RuntimeError, match="Connection reset"), naming_rank_failures(ALONE):
        raise RuntimeError(GLOO)


def test_the_first_rank_of_a_host_speaks_through_the_pipe_that_its_parent_holds(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(os, "getppid", os.getpid)
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "a1")
    for local_rank, is_heard in (("0", True), ("1", False)):
        path = tmp_path / f"events-{local_rank}.jsonl"
        with path.open("ab") as held:
            monkeypatch.setenv("LOCAL_RANK", local_rank)
            monkeypatch.setenv("SLIPWAY_EVENT_FD", str(held.fileno()))

            emitter = Emitter.from_environment()
            emitter.phase("Training")
            emitter.close()

        assert bool(read_events(path)) is is_heard, local_rank


# What a spec allows, in words that name the field and the limit.

MODEL = ArtefactModel(attempt_id="a1")
SPECS = [
    TrainSpec(),
    CompressSpec(model=MODEL),
    BenchmarkSpec(model=MODEL),
    ServeSpec(model=MODEL),
]


def test_every_spec_survives_its_json_and_others_are_refused():
    for spec in SPECS:
        adapter = TypeAdapter(JobSpec)
        assert adapter.validate_json(adapter.dump_json(spec)) == spec, spec
    with pytest.raises(ValidationError, match="commandd"):
        TrainSpec(commandd="rm -rf /")
    with pytest.raises(ValidationError, match="give max_steps or time_budget_seconds"):
        TrainSpec(max_steps=None, time_budget_seconds=None)


def test_an_endpoint_that_is_open_or_cannot_be_is_refused():
    for fields, message in (
        ({"host": "0.0.0.0"}, "which others reach, but key_hashes is empty; give a key's hash"),
        ({"port": 80}, "port is 80; choose 1024 to 65535, or 0"),
        ({"kv_cache_tokens": 8, "max_length": 16}, "kv_cache_tokens is 8, less than max_length"),
        ({"host": "localhost; id"}, "host"),
        ({"key_hashes": ("sk-plain",)}, "key_hashes"),
        ({"served_name": "a\nb"}, "served_name"),
        ({"idle_stop_seconds": 0}, "idle_stop_seconds"),
        (
            {"engine": "vllm", "enforce_eager": True},
            "enforce_eager is not supported by the engine vllm",
        ),
    ):
        with refused(ValidationError, message, (fields, message)):
            ServeSpec(model=MODEL, **fields)


def test_the_demo_model_is_small_enough_for_two_minutes():
    demo = TrainSpec().model
    attention = demo.hidden_size**2 * (2 + 2 * demo.num_key_value_heads / demo.num_attention_heads)
    layer = attention + 3 * demo.hidden_size * demo.intermediate_size
    total = demo.num_hidden_layers * layer + 2 * demo.vocab_size * demo.hidden_size
    assert 2_000_000 < total < 15_000_000


def test_a_quantisation_that_was_stored_before_reads_as_a_compression():
    for dtype, method in (("int8", "int8"), ("int4", "nf4"), ("bf16", "bf16")):
        stored = {
            "kind": "quantize",
            "model": MODEL.model_dump(),
            "weight_dtype": dtype,
            "seed": 3,
        }

        spec = TypeAdapter(JobSpec).validate_python(stored)

        assert spec == CompressSpec(model=MODEL, method=method, seed=3), (dtype, method)
        assert spec.weight_dtype == dtype, (dtype, method)


def test_a_compression_says_as_what_its_outcome_is_loaded():
    for fields, loaded_as, title in (
        ({"method": "gptq", "bits": 3}, "int4", "gptq 3 bit"),
        ({"method": "rtn", "bits": 8}, "int8", "rtn 8 bit"),
        ({"method": "quantease", "bits": 3, "outlier_share": 0.01}, "bf16", "quantease 3 bit"),
        ({"method": "sparsegpt", "sparsity": 0.6}, "bf16", "sparsegpt 60%"),
        ({"method": "wanda", "pattern": "2:4"}, "bf16", "wanda 2:4"),
        ({"method": "int8"}, "int8", "int8"),
        ({"method": "smoothquant"}, "int8", "smoothquant 8 bit, 8 bit activations"),
        ({"method": "fptq"}, "int4", "fptq 4 bit, 8 bit activations"),
        ({"method": "norm_tweaking", "bits": 2}, "int4", "norm_tweaking 2 bit"),
        ({"method": "fp8"}, "fp8", "fp8"),
        ({"method": "sheared_llama", "sparsity": 0.2}, "bf16", "sheared_llama 20%"),
        ({"method": "qmoe"}, "int4", "QMoE, ternary experts"),
        ({"method": "int8_dynamic"}, "int8", "int8, 8 bit activations"),
        ({"method": "gguf", "gguf_type": "Q4_0"}, "bf16", "GGUF Q4_0"),
        ({"method": "llm_pruner", "sparsity": 0.2}, "bf16", "llm_pruner 20%"),
    ):
        spec = CompressSpec(model=MODEL, **fields)

        assert (spec.weight_dtype, spec.title) == (loaded_as, title), (fields, loaded_as, title)


def test_a_card_shows_no_setting_that_the_method_does_not_read():
    pruned = CompressSpec(model=MODEL, method="wanda", pattern="2:4").settings
    rounded = CompressSpec(model=MODEL, method="gptq", bits=3).settings
    smoothed = CompressSpec(model=MODEL, method="smoothquant").settings
    assert pruned == {"calibration_tokens": "16384", "pattern": "2:4"}
    assert smoothed == {"calibration_tokens": "16384", "bits": "8", "smoothing": "0.5"}
    assert rounded.keys() == {"calibration_tokens", "bits", "group_size", "act_order", "damping"}


def test_a_planner_is_asked_about_no_model_of_another_shape():
    for method, phases in (
        ("gptq", [("original_", "bf16"), ("", "bf16")]),
        ("fp8", [("original_", "bf16"), ("", "fp8")]),
        ("llm_pruner", [("original_", "bf16")]),
        ("smoothquant", [("original_", "bf16")]),
        ("int8_dynamic", [("original_", "bf16")]),
    ):
        assert list(CompressSpec(model=MODEL, method=method).predictable_phases) == phases, method


def test_rows_need_divide_only_into_what_the_method_makes_of_them():
    for fields, divisor in (
        ({"method": "gptq", "group_size": 32}, 32),
        ({"method": "finequant", "group_size": 32}, 1),
        ({"method": "smoothquant"}, 1),
        ({"method": "sparsegpt", "pattern": "2:4"}, 4),
    ):
        assert CompressSpec(model=MODEL, **fields).row_divisor == divisor, (fields, divisor)


def test_ranks_of_hosts_that_listed_different_objects_do_not_train_together(monkeypatch):
    at = {c: f'{{"path": "/c/models--s3.lab--tiny/snapshots/{c * 40}"}}' for c in "ab"}
    for lead, differs in (("a", False), ("b", True)):
        sent = at[lead].encode()
        monkeypatch.setattr(ranks.Ranks, "broadcast_from_lead", lambda *_, sent=sent: sent)
        said = pytest.raises(BadInputError, match="aaaaaaaaaaaa on this host, and at bbbbbbbbbbbb")
        with said if differs else contextlib.nullcontext():
            ranks.refuse_other_commits(at["a"], ranks.Ranks(1, 2))
