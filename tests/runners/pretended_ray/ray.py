"""A stand-in for Ray's library: what ``ray_driver`` asks of it, with all nodes on this machine.

The nodes lie in the JSON file that PRETENDED_RAY names, in the form of ``ray.nodes()``; a test
takes one away by setting its Alive, or sets out_of_reach or low_on_memory. An actor lives in this
process; its methods are called at once, and fail when its node is gone, which also kills what it
has started.
"""

import json
import os
import sys
import time
import types
from pathlib import Path

_running = [""]  # the node of the actor whose method is running


class RayActorError(Exception):
    """Ray's name."""


class ActorUnavailableError(RayActorError):
    """Ray's name."""


class OutOfMemoryError(Exception):
    """Ray's name: no RayActorError, also of an actor."""


def nodes():
    return json.loads(Path(os.environ["PRETENDED_RAY"]).read_text())


class Reference:
    def __init__(self, find):
        self.find = find


class Group:
    def __init__(self, bundles, strategy, name):
        Path(os.environ["PRETENDED_RAY"]).with_name("groups.jsonl").open("a").write(
            json.dumps({"bundles": bundles, "strategy": strategy, "name": name}) + "\n"
        )
        self.bundles, self.nodes = bundles, []

    def wait(self, timeout):
        is_placed = self._place()
        if not is_placed:
            time.sleep(timeout)
        return is_placed

    def _place(self):
        fitting = [
            each["NodeID"]
            for each in nodes()
            if each["Alive"]
            and not each.get("busy")
            and all(each["Resources"].get(k, 0) >= v for k, v in self.bundles[0].items())
        ]
        self.nodes = fitting[: len(self.bundles)]
        return len(self.nodes) == len(self.bundles)


class Handle:
    def __init__(self, actor, node):
        self._actor, self._node = actor, node

    def _call(self, name, args):
        node = next((each for each in nodes() if each["NodeID"] == self._node), {})
        if not node.get("Alive"):
            self.end()
            raise RayActorError("The actor died unexpectedly before finishing this task.")
        if node.get("out_of_reach"):
            raise ActorUnavailableError("The actor is temporarily unavailable: reset by peer.")
        if node.get("low_on_memory"):
            self.end()
            raise OutOfMemoryError("Task was killed due to the node running low on memory.\n.")
        _running[0] = self._node
        return getattr(self._actor, name)(*args)

    def end(self):
        if self._actor._process:
            self._actor._process.kill()
            self._actor._process.wait()

    def __getattr__(self, name):
        def remote(*args):
            try:
                value = self._call(name, args)
            except (RayActorError, OutOfMemoryError) as error:
                caught = error

                def find():
                    raise caught
            else:

                def find():
                    return value

            return Reference(find)

        return types.SimpleNamespace(remote=remote)


class Actors:
    def __init__(self, cls):
        self._cls = cls

    def options(self, scheduling_strategy, **_resources):
        node = scheduling_strategy.group.nodes[scheduling_strategy.index]
        return types.SimpleNamespace(remote=lambda: Handle(self._cls(), node))


class Strategy:
    def __init__(self, group, placement_group_bundle_index):
        self.group, self.index = group, placement_group_bundle_index


def init(**_options):
    pass


def remote(cls):
    return Actors(cls)


def get(wanted):
    return [each.find() for each in wanted] if isinstance(wanted, list) else wanted.find()


def kill(handle):
    handle.end()


def get_runtime_context():
    return types.SimpleNamespace(get_node_id=lambda: _running[0])


util = types.SimpleNamespace(get_node_ip_address=lambda: "127.0.0.1")
for _name, _members in {
    "ray.exceptions": (RayActorError, ActorUnavailableError, OutOfMemoryError),
    "ray.util.placement_group": {
        "placement_group": Group,
        "remove_placement_group": lambda _: None,
    },
    "ray.util.scheduling_strategies": {"PlacementGroupSchedulingStrategy": Strategy},
}.items():
    _module = types.ModuleType(_name)
    _named = _members if isinstance(_members, dict) else {each.__name__: each for each in _members}
    _module.__dict__.update(_named)
    sys.modules[_name] = _module
