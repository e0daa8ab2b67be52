"""A technique is proven by ratios that were kept, as long as they are clear of their floor."""

import datetime as dt

import pytest

from runners.abilities import ABILITIES
from runners.bench_cases import KeptRatio, Ratio
from runners.jobs import offload_bench
from webapp.core.benches.ratios import PROOFS, evidence, holds, keep, level_of, stored
from webapp.core.management.commands.bench import Figure

BOTH = [proof.ratio for proof in PROOFS["turbotransformers"]]


def kept(name, low=1.2, command="manage.py bench generate --keep"):
    return KeptRatio(
        name=name,
        value=low + 0.1,
        low=low,
        high=low + 0.2,
        n=7,
        of="processor seconds",
        date=dt.date(2026, 1, 2),
        versions={},
        machine="2 cores",
        command=command,
    )


def test_each_of_its_ratios_must_have_been_kept():
    assert level_of("turbotransformers", {BOTH[0]: kept(BOTH[0])}) == "runs"
    assert level_of("turbotransformers", {name: kept(name) for name in BOTH}) == "proven"


def test_a_ratio_whose_interval_holds_one_proves_nothing():
    rows = {BOTH[0]: kept(BOTH[0]), BOTH[1]: kept(BOTH[1], low=0.98)}

    assert level_of("turbotransformers", rows) == "runs"


def test_what_no_job_runs_is_planned_whatever_was_measured():
    assert level_of("dfx", {"anything": kept("anything")}) == "planned"


def test_a_technique_without_ratios_of_its_own_runs():
    assert "moe_offload" in ABILITIES
    assert level_of("moe_offload", {}) == "runs"


def test_a_floor_below_one_says_how_much_worse_it_may_be():
    proof = next(each for each in PROOFS["fp16_bf16"] if each.floor < 1)

    assert holds(proof, kept(proof.ratio, low=0.995))
    assert not holds(proof, kept(proof.ratio, low=0.98))


def test_evidence_is_of_ratios_that_were_kept():
    rows = {BOTH[0]: kept(BOTH[0])}

    assert [ratio.name for _proof, ratio in evidence("turbotransformers", rows)] == [BOTH[0]]


def test_a_command_replaces_what_it_kept_before_and_nothing_else(tmp_path):
    path = tmp_path / "ratios.jsonl"
    keep([kept("a"), kept("b", command="other")], path)

    keep([kept("c")], path)

    assert set(stored(path)) == {"b", "c"}


def test_without_a_file_nothing_was_kept(tmp_path):
    assert stored(tmp_path / "none.jsonl") == {}


def test_a_ratio_taken_now_says_with_what():
    found = KeptRatio.taken_now(Ratio.exact("a / b", 6.0, 3.0, "bytes"), "manage.py bench x")

    assert (found.value, found.low, found.high, found.n) == (2.0, 2.0, 2.0, 1)
    assert found.versions["torch"]
    assert "cores" in found.machine


@pytest.mark.parametrize(("load", "said"), [(0.2, False), (3.14, True)])
def test_a_ratio_that_was_taken_beside_other_work_says_so(load, said):
    found = KeptRatio.taken_now(Ratio.exact("a / b", 6.0, 3.0, "bytes"), "bench x", load)

    assert found.machine.endswith("shared (load 3.1 before)") is said


def test_a_figure_of_a_ratio_is_printed_with_its_interval():
    assert Figure.of(Ratio("a / b", 2.0, 1.5, 2.5, 7, "bytes")).remark == "   1.5 to 2.5, n = 7"


def test_flexgen_is_held_to_both_ratios_of_its_bench():
    names = {proof.ratio for proof in PROOFS["flexgen"]}

    assert names == {offload_bench.NAME, offload_bench.READ_NAME}


@pytest.mark.parametrize("key", sorted(PROOFS))
def test_every_proof_is_of_something_that_runs(key):
    assert key in ABILITIES
