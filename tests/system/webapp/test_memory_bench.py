"""What real ranks hold is what the kept rows of the bench say."""

import pytest

from runners.host.bench import RankMemory
from tests.plugins.extent import first
from webapp.bench import memory
from webapp.bench.memory import stored_memory

FOUND = stored_memory()[1]
UNLIKE = ("AdamW 8-bit", "ZeRO-3 on 2 ranks")  # counted in the suite; bf16 is slow on CPUs


@pytest.mark.slow
def test_real_ranks_hold_what_was_kept():
    """Counted anew, to the byte but for what a count of updates takes."""
    rest = [name for name in FOUND if name not in UNLIKE]
    names = first([*UNLIKE, *rest], len(UNLIKE))

    found = {each.case: each for each in memory.measure_memory(*names)}

    assert list(found) == [name for name in FOUND if name in names]
    for name in names:
        for term in RankMemory.TERMS:
            assert getattr(found[name], term) == pytest.approx(
                getattr(FOUND[name], term), rel=0.02
            )
