"""Places one attempt in a Ray cluster and watches its nodes: ``python ray_driver.py FOLDER``.

A copy of this file in the attempt's folder is the entrypoint of the attempt's Ray job. Ray runs it
on the head node in the cluster's own Python, which has nothing of ours: it imports Ray and the
standard library alone. It reserves a placement group, starts our Python on each bundle's node, and
writes what it does into the folder, where the agent reads it. If Ray loses a node, an attempt over
several nodes is placed again in the same folder; any other ends, for the server to retry.

The bundles: https://docs.ray.io/en/latest/ray-core/scheduling/placement-group.html
"""

import json
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

ORDER, STATE = "ray_order.json", "ray_state.json"
ASK, ANSWER = "ray_ask.json", "ray_answer.json"
WAITING, RUNNING, NODE_LOST, WORKER_LOST, OUT_OF_MEMORY = (
    "waiting", "running", "node_lost", "worker_lost", "out_of_memory",
)  # fmt: skip
INDEX, ADDRESS, RUN, WORDS = (
    "SLIPWAY_NODE_INDEX", "SLIPWAY_NODE_IP", "SLIPWAY_RAY_RUN", "SLIPWAY_RAY_WORDS",
)  # fmt: skip
POLL_SECONDS = 0.5
STATE_SECONDS = 10.0  # between two looks at why nothing is placed
NODE_SECONDS = 60.0  # in which Ray says whether a process or its whole node was lost
END_SECONDS = 30.0  # for the other nodes to end after the first
LOCK_SECONDS = 60.0  # for the supervisor of the previous placement to be gone
MOST_RESTARTS = 10  # of an attempt over several nodes; then it ends, for the server to retry
SUPERVISED = 75  # runners.supervision.supervisor.EXIT_ALREADY_SUPERVISED


def write_json(path: Path, document: object) -> None:
    """Write a document so that a reader sees all of it or none."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.write_text(json.dumps(document))
    temporary.replace(path)


class Node:
    """The actor of one bundle: starts a process on its node and tells how it fares."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._folder = Path()

    def place(self) -> dict[str, str]:
        """Return where Ray placed this bundle."""
        import ray

        context = ray.get_runtime_context()
        address = ray.util.get_node_ip_address()
        return {"node_id": context.get_node_id(), "address": address}

    def start(self, argv: list[str], folder: str, told: dict[str, str]) -> None:
        """Start the process in the attempt's folder, with this bundle's devices.

        Asked again because the reply was lost, it starts no second one.
        """
        if self._process:
            return
        self._folder = Path(folder)
        kept = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith(("RAY_", "PYTHON"))
        }
        self._process = subprocess.Popen(
            argv,
            cwd=folder,
            env=kept | told,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )

    def poll(self) -> tuple[int | None, int | None]:
        """Return the process's exit status, and the run in which the first rank's end is asked."""
        try:
            asks = json.loads((self._folder / ASK).read_text())["run"]
        except (OSError, ValueError, KeyError):
            asks = None
        return (self._process.poll() if self._process else None), asks

    def answer(self, document: dict[str, Any]) -> None:
        """Tell the process that runs the first node's ranks what became of the others."""
        write_json(self._folder / ANSWER, document)

    def signal(self, number: int) -> None:
        """Send a signal to the process, if it runs."""
        if self._process and self._process.poll() is None:
            self._process.send_signal(number)


class LostBundle(NamedTuple):
    """A bundle whose actor is gone: with its node, or its process alone."""

    bundle: int
    words: str
    phase: str  # NODE_LOST, WORKER_LOST or OUT_OF_MEMORY


class PollResult(NamedTuple):
    """What all actors of a placement said at once."""

    asks: "int | None"  # the run in which the first node asks what became of the others
    lost: "LostBundle | None"
    is_whole: bool  # each replied, or is known to be gone


class Placement:
    """One placement group with a process on each of its bundles."""

    def __init__(self, driver: "Driver", run: int) -> None:
        import ray
        from ray.util.placement_group import placement_group

        self._ray, self._driver, self._order, self.run = ray, driver, driver.order, run
        number = self._order["nodes"]
        self._group = placement_group(
            [dict(self._order["bundle"])] * number,
            strategy="STRICT_SPREAD" if number > 1 else "STRICT_PACK",
            name=self._order["name"],
        )
        self._actors: list[Any] = []
        self._places: list[dict[str, str]] = []
        self._codes: dict[int, int] = {}
        self._answered = False
        self._failed_at: float | None = None
        self._ended_at: float | None = None

    # Placing

    def wait(self) -> bool:
        """Wait until the cluster has room; return False if the job was stopped before."""
        said_at = 0.0
        while not self._group.wait(POLL_SECONDS):
            if self._driver.is_stopping:
                return False
            if time.monotonic() - said_at > STATE_SECONDS:
                said_at = time.monotonic()
                self._driver.report(WAITING, self._why_waiting())
        return not self._driver.is_stopping

    def _why_waiting(self) -> str:
        """Return what is missing: nodes that could ever take a bundle, or their free share."""
        number, bundle = self._order["nodes"], self._order["bundle"]
        fitting = [
            each
            for each in self._ray.nodes()
            if each["Alive"]
            and all(each["Resources"].get(name, 0) >= size for name, size in bundle.items())
        ]
        asked = ", ".join(f"{name} {size:g}" for name, size in sorted(bundle.items()))
        nodes = f"{number} node{'s' if number > 1 else ''}"
        has = f"{len(fitting)} alive" if len(fitting) < number else "they are in use"
        lost = f" ({self._driver.lost} was lost)" if self._driver.lost else ""
        return f"{nodes} with {asked}: {has}{lost}"

    def start(self) -> None:
        """Start the actors and their processes, and say where they run.

        Raises:
            RayActorError: a node was lost meanwhile.
            OutOfMemoryError: Ray ended an actor for its node's memory.
        """
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        bundle = dict(self._order["bundle"])
        options = {
            "num_cpus": bundle.pop("CPU", 0),
            "num_gpus": bundle.pop("GPU", 0),
            "memory": bundle.pop("memory", None),
            "resources": bundle or None,
        }
        actor = self._ray.remote(Node)
        for index in range(self._order["nodes"]):
            place = PlacementGroupSchedulingStrategy(
                self._group, placement_group_bundle_index=index
            )
            self._actors.append(actor.options(**options, scheduling_strategy=place).remote())
        self._places = [self._call_until_known(each.place) for each in self._actors]
        self._driver.report(RUNNING, nodes=self.names())
        told = {RUN: str(self.run), WORDS: self._words()}
        commands = [self._order["first"], *[self._order["others"]] * (len(self._actors) - 1)]
        for index, (each, place, argv) in enumerate(
            zip(self._actors, self._places, commands, strict=True)
        ):
            own = {INDEX: str(index), ADDRESS: place["address"]}
            self._call_until_known(each.start, argv, self._order["folder"], told | own)

    def _call_until_known(self, method: Any, *arguments: object) -> Any:  # noqa: ANN401 - as Ray's own
        """Return what an actor replies; one that is out of reach is asked until Ray knows of it.

        Raises:
            RayActorError: it is gone.
            OutOfMemoryError: Ray ended it for its node's memory.
        """
        from ray.exceptions import ActorUnavailableError

        while True:
            try:
                return self._ray.get(method.remote(*arguments))
            except ActorUnavailableError:
                time.sleep(POLL_SECONDS)

    def names(self) -> list[str]:
        """Return the nodes' names in the order of the bundles."""
        return [self._driver.node_name(each["node_id"]) for each in self._places]

    def _words(self) -> str:
        again = f", restart {self.run}," if self.run else ""
        after = f" after {self._driver.lost} was lost" if self._driver.lost else ""
        return f"Ray job {self._order['name']}{again} runs on {', '.join(self.names())}{after}"

    # Watching

    def watch(self) -> LostBundle | int:
        """Return the first node's exit status, or what was lost before it had one."""
        last_number = 0
        while True:
            number = self._driver.stop_number
            if number > last_number and self._is_stop_sent():
                last_number = number
            polled = self._poll_all()
            if self._ended_at is not None:
                return self._wait_for_others(polled.lost)
            if polled.lost:
                return self._replace_or_end(polled.lost)
            if polled.asks == self.run and polled.is_whole and not self._answered:
                self._report_to_first_node("")
            self._pass_on_failure()
            time.sleep(POLL_SECONDS)

    def _is_stop_sent(self) -> bool:
        """Pass SIGTERM on to the first node; return False if it is out of reach."""
        from ray.exceptions import ActorUnavailableError, OutOfMemoryError, RayActorError

        try:
            self._ray.get(self._actors[0].signal.remote(signal.SIGTERM))
        except ActorUnavailableError:
            return False
        except (RayActorError, OutOfMemoryError):
            pass  # the next poll says so
        return True

    def _poll_all(self) -> PollResult:
        """Ask every actor for its process, and note the exit statuses."""
        from ray.exceptions import ActorUnavailableError, OutOfMemoryError, RayActorError

        asks, lost, is_whole = None, None, True
        for index, actor in enumerate(self._actors):
            try:
                code, said = self._ray.get(actor.poll.remote())
            except ActorUnavailableError:
                is_whole = False  # the connection failed: Ray will say whether the actor died
                continue
            except (RayActorError, OutOfMemoryError) as error:
                lost = lost or self._lost(index, error)
                continue
            if code is not None and index not in self._codes:
                self._codes[index] = code
            if index == 0:
                asks = said
                if code is not None:
                    self._ended_at = self._ended_at or time.monotonic()
        return PollResult(asks, lost, is_whole)

    def _lost(self, index: int, error: Exception) -> LostBundle:
        """Return what a dead actor means: its node is gone, or its process alone."""
        from ray.exceptions import OutOfMemoryError

        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        words = f"the process on {self.names()[index]} ({lines[0] if lines else type(error)})"
        if isinstance(error, OutOfMemoryError):
            return LostBundle(index, words, OUT_OF_MEMORY)
        node_id = self._places[index]["node_id"]
        until = time.monotonic() + NODE_SECONDS
        while time.monotonic() < until:
            if not self._driver.is_alive(node_id):
                return LostBundle(index, f"node {self._driver.node_name(node_id)}", NODE_LOST)
            time.sleep(POLL_SECONDS)
        return LostBundle(index, words, WORKER_LOST)

    def _pass_on_failure(self) -> None:
        """Tell the first node of another whose ranks failed, unless it fails by itself at once."""
        failed = [index for index, code in self._codes.items() if index and code]
        if failed and self._failed_at is None:
            self._failed_at = time.monotonic()
        waited = self._failed_at is not None and time.monotonic() - self._failed_at > END_SECONDS
        if failed and waited and not self._answered:
            name, code = self.names()[failed[0]], self._codes[failed[0]]
            self._report_to_first_node(f"the ranks on {name} ended with exit status {code}")

    def _report_to_first_node(self, failed: str, lost: str = "") -> None:
        from ray.exceptions import OutOfMemoryError, RayActorError

        self._answered = True
        document = {"run": self.run, "failed": failed, "lost": lost}
        with suppress(RayActorError, OutOfMemoryError):  # the next poll says so
            self._call_until_known(self._actors[0].answer, document)

    def _replace_or_end(self, lost: LostBundle) -> LostBundle | int:
        """End the first node's ranks, if it is another node that was lost."""
        if lost.bundle == 0:
            return lost
        goes_on = self._driver.is_placed_again(lost, self.run)
        self._report_to_first_node(
            "" if goes_on else f"{lost.words} was lost", lost.words if goes_on else ""
        )
        until = time.monotonic() + self._order["grace_seconds"]
        while self._ended_at is None and time.monotonic() < until:
            time.sleep(POLL_SECONDS)
            self._poll_first()
        return lost if goes_on else self._codes.get(0, 1)

    def _poll_first(self) -> None:
        from ray.exceptions import ActorUnavailableError, OutOfMemoryError, RayActorError

        try:
            code, _ = self._ray.get(self._actors[0].poll.remote())
        except ActorUnavailableError:
            return
        except (RayActorError, OutOfMemoryError):
            code = 1
        if code is not None:
            self._codes[0] = code
            self._ended_at = time.monotonic()

    def _wait_for_others(self, lost: LostBundle | None) -> int:
        """Let the other nodes end after the first, which has."""
        until = time.monotonic() + END_SECONDS
        told = False
        while len(self._codes) < len(self._actors) and lost is None and time.monotonic() < until:
            if self._codes[0] and not told:
                told = True
                for each in self._actors[1:]:
                    each.signal.remote(signal.SIGTERM)
            time.sleep(POLL_SECONDS)
            lost = self._poll_all().lost
        return self._codes[0]

    def remove(self) -> None:
        """Give the bundles back; the actors and their processes end."""
        from ray.util.placement_group import remove_placement_group

        for each in self._actors:
            self._ray.kill(each)
        remove_placement_group(self._group)


class Driver:
    """One attempt's Ray job, from its first placement to its end."""

    def __init__(self, folder: Path) -> None:
        self.order = json.loads((folder / ORDER).read_text())
        self.folder = folder
        self.lost = ""
        self.stop_number = 0
        self.report(WAITING, "its driver starts")

    @property
    def is_stopping(self) -> bool:
        """Return whether Ray was told to stop this job."""
        return self.stop_number > 0

    def is_placed_again(self, lost: LostBundle, run: int) -> bool:
        """Return whether an attempt goes on elsewhere after a loss in its run of this number."""
        may_go_on = self.order["restarts"] and run < MOST_RESTARTS and not self.is_stopping
        return bool(may_go_on and lost.phase == NODE_LOST)

    def on_sigterm(self, *_: object) -> None:
        """Note that Ray stops this job."""
        self.stop_number += 1

    def report(self, phase: str, detail: str = "", nodes: "list[str] | None" = None) -> None:
        """Write for the agent what this job does; Ray itself calls all of it RUNNING."""
        document = {"phase": phase, "detail": detail, "nodes": nodes or []}
        write_json(self.folder / STATE, document)

    @staticmethod
    def _nodes() -> dict[str, dict[str, Any]]:
        import ray

        return {each["NodeID"]: each for each in ray.nodes()}

    def is_alive(self, node_id: str) -> bool:
        """Return whether Ray still has a node."""
        found = self._nodes().get(node_id)
        return bool(found and found["Alive"])

    def node_name(self, node_id: str) -> str:
        """Return a node's name, which is its address unless ``ray start`` was told one."""
        found = self._nodes().get(node_id) or {}
        return str(found.get("NodeName") or found.get("NodeManagerAddress") or node_id)

    def run(self) -> int:
        """Place the attempt until it ends; return the job's exit status."""
        from ray.exceptions import OutOfMemoryError, RayActorError

        run, since = 0, time.monotonic()
        while True:
            placement = Placement(self, run)
            try:
                if not placement.wait():
                    return 1
                placement.start()
                found = placement.watch()
            # Between the placement and the start of all its processes:
            except RayActorError:
                found = LostBundle(0, "a node of the placement group", NODE_LOST)
            except OutOfMemoryError as error:
                found = LostBundle(
                    0, f"a process ({str(error).partition(chr(10))[0]})", OUT_OF_MEMORY
                )
            finally:
                placement.remove()
            if found == SUPERVISED and run and time.monotonic() - since < LOCK_SECONDS:
                time.sleep(POLL_SECONDS)
                continue
            if not isinstance(found, LostBundle):
                return int(found)
            if not self.is_placed_again(found, run):
                self.report(found.phase, f"{found.words} was lost", placement.names())
                sys.stderr.write(f"{found.words} was lost\n")
                return 1
            run, since, self.lost = run + 1, time.monotonic(), found.words


def main(arguments: "list[str]") -> int:
    """Run the attempt of a folder."""
    import ray

    driver = Driver(Path(arguments[0]))
    ray.init(log_to_driver=False)
    signal.signal(signal.SIGTERM, driver.on_sigterm)  # after Ray, which sets its own
    return driver.run()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
