"""Say what a process holds of large blocks, and what when they are freed: ``-m MODULE WAY``."""

import sys

import torch

from runners.jobs.memory import map_large_blocks, resident_bytes


def main(way: str) -> None:
    """Make large blocks with small ones between, and free the large ones."""
    if way == "apart":
        map_large_blocks()
    torch.ones(7 * 2**20)  # 28 MiB: freed, it raises the size from which malloc maps
    blocks, between, before = [], [], resident_bytes()
    for _ in range(16):
        blocks.append(torch.ones(4 * 2**20))
        between.append([bytearray(200_000)])  # what stays makes holes of what goes
    held = resident_bytes() - before
    blocks.clear()
    print(held, resident_bytes() - before)  # noqa: T201


if __name__ == "__main__":
    main(sys.argv[1])
