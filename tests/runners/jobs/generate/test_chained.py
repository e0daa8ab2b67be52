"""A chain of stage servers writes what one process writes, whichever of them is lost."""

import threading

import pytest
import torch

from runners.jobs.generate.chained import (
    Counts,
    RemoteStage,
    ServerChain,
    StageListener,
    StageUnavailableError,
    key_of,
)
from runners.jobs.generate.link import Link, LinkClosedError
from runners.jobs.generate.stage_model import Ends, Layers, divided
from runners.jobs.generate.stage_server import Server
from runners.jobs.loading import fresh_model
from runners.jobs.runtime import BadInputError
from runners.jobspec import DemoModel, GenerateSpec
from runners.jobspec.generate import StageChain
from runners.messages import Gang
from tests.runners.jobs.generate.test_stage_model import written
from tests.runners.jobs.tiny import TINY_CONFIG

CPU = torch.device("cpu")
KEY = "5a" * 32
SHORT = StageChain(patience_seconds=1.0, silence_seconds=120.0)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    torch.manual_seed(5)
    path = tmp_path_factory.mktemp("five-layers") / "model"
    fresh_model({**TINY_CONFIG, "num_hidden_layers": 5}, torch.float32).save_pretrained(str(path))
    return path


def layers(folder) -> Layers:
    return Layers(folder, range(5), CPU, torch.float32)


class Threads:
    """A desk, and servers in threads that can be cut off."""

    def __init__(self, folder):
        self.folder, self.links, self.made = folder, [], []
        self.desk = StageListener("127.0.0.1", 0, bytes.fromhex(KEY))
        self.counts = Counts()

    def start(self):
        link = Link.dialled(*self.desk.place)
        self.links.append(link)
        server = Server(self.folder, torch.float32)
        threading.Thread(target=self._serve, args=(server, link), daemon=True).start()

    @staticmethod
    def _serve(server, link):
        try:
            server.serve(link)
        except LinkClosedError:
            link.close()

    def find(self):
        if link := self.desk.next_server(60.0):
            return link
        raise StageUnavailableError("none")

    def stages(self, count):
        runs = enumerate(divided(5, count))
        self.made = [RemoteStage(at, which, self.find, SHORT, self.counts) for at, which in runs]
        return self.made


@pytest.fixture
def threads(folder):
    made = Threads(folder)
    yield made
    made.desk.close()
    for link in [*made.links, *(each.link for each in made.made if each.link)]:
        link.close()


class Cutting:
    """Ends of a model that cut a server off before some pass."""

    def __init__(self, ends, at, cut):
        self._ends, self._left, self._cut = ends, at, cut
        self.choose = ends.choose

    def embed(self, ids):
        self._left -= 1
        if self._left == 0:
            self._cut()
        return self._ends.embed(ids)


@pytest.mark.equality
@pytest.mark.parametrize("lost", [0, 1])
@pytest.mark.parametrize("at", [1, 2, 5])
def test_a_spare_takes_over_at_any_token_and_the_text_goes_on(folder, threads, lost, at):
    ends = Ends(folder, CPU, torch.float32)
    for _ in range(3):
        threads.start()
    stages = threads.stages(2)
    for stage in stages:
        stage.attach()
    cutting = Cutting(ends, at, stages[lost].link.close)

    found = written(cutting, stages)

    assert found.tolist() == written(ends, [layers(folder)]).tolist()
    assert threads.counts.lost == 1
    assert bool(threads.counts.replayed_positions) == (at > 1)


@pytest.mark.equality
def test_what_was_lost_twice_is_replayed_twice(folder, threads):
    ends = Ends(folder, CPU, torch.float32)
    for _ in range(3):
        threads.start()
    (stage,) = threads.stages(1)

    def cut_off():
        stage.link.close()

    cut = Cutting(Cutting(ends, 3, cut_off), 5, cut_off)

    found = written(cut, [stage])

    assert found.tolist() == written(ends, [layers(folder)]).tolist()
    assert threads.counts.lost == 2


def test_a_forgotten_session_is_not_replayed(folder, threads):
    threads.start()
    threads.start()
    (stage,) = threads.stages(1)
    written(Ends(folder, CPU, torch.float32), [stage])

    stage.forget(1)
    stage.lose()
    stage.attach()

    assert threads.counts.replayed_positions == 0


def test_what_a_server_refuses_is_told_and_not_tried_elsewhere(threads, tmp_path):
    torch.manual_seed(1)
    model = fresh_model({**TINY_CONFIG, "num_hidden_layers": 5}, torch.float32)
    model.model.layers[4].mlp.up_proj.weight.data[0, 0] = float("nan")
    model.save_pretrained(str(tmp_path))
    threads.folder = tmp_path
    threads.start()

    with pytest.raises(BadInputError, match=r"layers\.4\.mlp\.up_proj\.weight holds NaN"):
        threads.stages(1)[0].attach()


def test_a_model_without_a_folder_has_no_stages(make_job):
    spec = spec_of(DemoModel())

    with pytest.raises(BadInputError, match="from a model folder; source demo has none"):
        ServerChain(make_job(spec), spec, spec.split)


def test_a_chain_over_hosts_without_a_key_is_refused():
    with pytest.raises(BadInputError, match="sent no key"):
        key_of(gang_of(0, key=""))


def gang_of(rank: int, port: int = 29400, key: str = KEY) -> Gang:
    return Gang(
        node_rank=rank, num_nodes=2, master_address="127.0.0.1", master_port=port,
        own_address="127.0.0.1", rendezvous_id="chain", key=key,
    )  # fmt: skip


def spec_of(model, **asked) -> GenerateSpec:
    chain = StageChain(stages=2, **asked)
    return GenerateSpec(model=model, weight_dtype="fp32", split=chain)
