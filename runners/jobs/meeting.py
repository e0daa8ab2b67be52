"""torchrun where another host holds the meeting point: it starts once that is there.

``python -m runners.jobs.meeting ADDRESS PORT SECONDS OPTION...``, where the options are
torchrun's. It would give up when the meeting point does not answer within one silence that a
job allows (``read_timeout``); but the host that opens it may still load its libraries.
"""

import socket
import sys
import time

from torch.distributed.run import main as torchrun

PAUSE_SECONDS = 0.5
ANSWER_SECONDS = 5.0  # a network that drops packets answers never


def wait_until_open(address: str, port: int, seconds: float) -> bool:
    """Wait until somebody listens there; return whether that was so in time."""
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
    """Wait for the meeting point and go on as torchrun."""
    address, port, seconds, *options = arguments
    if not wait_until_open(address, int(port), float(seconds)):
        sys.exit(
            f"RANK_LOST: the first host did not open its port {port} at {address} within "
            f"{seconds} s; see why on its page, and whether this host can reach it there"
        )
    torchrun(options)


if __name__ == "__main__":
    main(sys.argv[1:])
