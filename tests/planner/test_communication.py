"""Collectives: free for one rank, and as large as the ring algorithm makes them."""

import numpy as np
import pytest

from planner.cost.communication import (
    all_gather_seconds,
    all_reduce_seconds,
    all_to_all_seconds,
    point_to_point_seconds,
)

LINK = {"link_bytes_per_s": 100e9, "latency_s": 1e-5}


@pytest.mark.parametrize(
    "collective",
    [all_reduce_seconds, all_gather_seconds, all_to_all_seconds, point_to_point_seconds],
)
def test_one_rank_talks_to_nobody(collective):
    assert float(collective(payload_bytes=1e9, ranks=1, **LINK)) == 0.0


def test_an_all_reduce_moves_the_payload_twice_less_the_own_share():
    seconds = all_reduce_seconds(payload_bytes=1e9, ranks=8, **LINK)

    assert float(seconds) == pytest.approx(2 * 7 / 8 * 1e9 / 100e9 + 1e-5)


def test_an_all_reduce_is_two_all_gathers():
    whole = all_reduce_seconds(payload_bytes=1e9, ranks=4, link_bytes_per_s=1e11, latency_s=0)
    half = all_gather_seconds(payload_bytes=1e9, ranks=4, link_bytes_per_s=1e11, latency_s=0)

    assert float(whole) == pytest.approx(2 * float(half))


def test_small_payloads_cost_the_latency():
    seconds = all_reduce_seconds(payload_bytes=1, ranks=8, **LINK)

    assert float(seconds) == pytest.approx(1e-5, rel=1e-3)


def test_a_hand_over_passes_every_border_between_stages():
    two = point_to_point_seconds(payload_bytes=1e6, ranks=2, **LINK)
    five = point_to_point_seconds(payload_bytes=1e6, ranks=5, **LINK)

    assert float(five) == pytest.approx(4 * float(two))


def test_a_column_of_ranks_gives_the_same_as_each_rank_alone():
    ranks = np.array([1.0, 2.0, 4.0, 8.0])

    together = all_reduce_seconds(payload_bytes=1e8, ranks=ranks, **LINK)

    alone = [float(all_reduce_seconds(payload_bytes=1e8, ranks=n, **LINK)) for n in ranks]
    assert np.allclose(together, alone)
