"""How GPUs reach each other, on machines whose tables are published."""

from runners.devices import topology
from tests.runners.nvml import Machine, dgx_h100, refuse, two_bridged_pairs, workstation


def test_every_pair_behind_switches_has_all_links():
    rows = topology.matrix(dgx_h100())

    assert len(rows) == 8
    assert rows[0] == ("X", *["NV18"] * 7)


def test_a_bridge_joins_its_pair_alone():
    rows = topology.matrix(two_bridged_pairs())

    assert rows[0] == ("X", "NV4", "SYS", "SYS")
    assert rows[3] == ("SYS", "SYS", "NV4", "X")


def test_boards_without_nvlink_are_told_by_their_way_over_pcie():
    assert topology.matrix(workstation()) == (("X", "PHB"), ("PHB", "X"))


def test_the_matrix_is_the_same_from_both_ends():
    for machine in (dgx_h100(), two_bridged_pairs(), workstation()):
        rows = topology.matrix(machine)
        assert rows == tuple(zip(*rows, strict=True))


def test_a_single_gpu_has_nobody_to_reach():
    assert topology.matrix(Machine(1)) == ()


def test_a_driver_that_does_not_tell_is_no_error():
    machine = workstation()
    machine.nvmlDeviceGetTopologyCommonAncestor = refuse

    assert topology.matrix(machine) == (("X", "?"), ("?", "X"))


def test_a_binding_that_lacks_a_question_is_no_error():
    assert topology.query_nvml(workstation(), 0, "nvmlDeviceGetSomethingNew") is None
