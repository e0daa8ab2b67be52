"""Starts torchrun when the rendezvous on another host is reachable.

``python -m runners.jobs.meeting ADDRESS PORT SECONDS OPTION...``, where the options are
torchrun's. torchrun alone would give up after the rank timeout (``read_timeout``), while the
rendezvous host may still be loading its libraries.
"""

import socket
import sys
import time

from torch.distributed.run import main as torchrun

PAUSE_SECONDS = 0.5
ANSWER_SECONDS = 5.0  # connection timeout, for networks that drop packets


def wait_until_open(address: str, port: int, seconds: float) -> bool:
    """Wait until a port accepts connections; return whether it did in time."""
    deadline = time.monotonic() + seconds
    while True:
        try:
            socket.create_connection((address, port), ANSWER_SECONDS).close()
        except OSError:
            if time.monotonic() >= deadline:
                return False
            time.sleep(PAUSE_SECONDS)
        else:
            return True


def main(arguments: list[str]) -> None:
    """Wait for the rendezvous and exec torchrun."""
    address, port, seconds, *options = arguments
    if not wait_until_open(address, int(port), float(seconds)):
        sys.exit(
            f"RANK_LOST: the first host did not open its port {port} at {address} within "
            f"{seconds} s; see why on its page, and whether this host can reach it there"
        )
    torchrun(options)


if __name__ == "__main__":
    main(sys.argv[1:])
