"""A model in stages or ranks: signed messages, and text as one process writes it."""

import functools
import pickle
import socket
import threading

import pytest
import torch
from pydantic import ValidationError
from transformers import AutoConfig

from runners.jobs.generate.chained import (
    MAC_BYTES,
    MAGIC,
    MAX_HEADER_BYTES,
    NONCE_BYTES,
    SIZES,
    ChainStatistics,
    Link,
    LinkClosedError,
    RemoteStage,
    ServerChain,
    StageListener,
    StageServer,
    StageUnavailableError,
    _signature,
    key_of,
)
from runners.jobs.generate.stage_model import (
    DIVISIBLE,
    EmbeddingAndHead,
    Layers,
    PassArguments,
    check_divides,
    even_layer_ranges,
    load_rank_part,
    run_stages,
)
from runners.jobs.loading import fresh_model, load_folder
from runners.jobs.ranks import Ranks
from runners.jobs.runtime import BadInputError
from runners.jobspec import DemoModel, DemoPrompts, GenerateSpec, PromptLookup
from runners.jobspec.generate import ExpertCache, StageChain, TensorSplit
from runners.shared.messages import Gang
from tests.runners.jobs.cases import refused
from tests.runners.jobs.tiny import TINY_CONFIG

KEY = b"k" * 32


def pair(first, second, one: bytes = KEY, other: bytes = KEY):
    """Return both ends of a connection, each a link or why it is none."""
    met = {}

    def greet(name, connection, key, is_dialler):
        try:
            met[name] = Link._handshake(connection, key, is_dialler=is_dialler)
        except LinkClosedError as error:
            met[name] = error

    thread = threading.Thread(target=greet, args=("other", second, other, False))
    thread.start()
    greet("one", first, one, True)
    thread.join(120)
    return met["one"], met["other"]


@pytest.fixture
def sockets(monkeypatch):
    """Two ends that are no TCP: the options of TCP do not apply."""
    monkeypatch.setattr("runners.jobs.generate.chained.SOCKET_OPTIONS", ())
    first, second = socket.socketpair()
    with first, second:
        yield first, second


@pytest.fixture
def ends(sockets):
    return functools.partial(pair, *sockets)


def test_a_message_arrives_as_it_was_sent(ends):
    one, other = ends()
    for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.long):
        wanted = torch.arange(6).reshape(2, 3).to(dtype)
        one.send({"order": "run", "session": 7}, {"hidden": wanted})
        said = other.receive()
        assert said.order == {"order": "run", "session": 7}
        assert torch.equal(said.tensors["hidden"], wanted), dtype
        assert said.tensors["hidden"].dtype == dtype


def test_whoever_does_not_know_the_key_gets_no_link(ends):
    one, other = ends(other=b"x" * 32)
    assert isinstance(one, LinkClosedError)
    assert isinstance(other, LinkClosedError)
    assert "not signed with the chain's key" in str(other)


def test_what_speaks_another_language_gets_no_link(sockets):
    first, second = sockets
    second.sendall(b"GET / HTTP/1.1\r\n" + b"x" * 64)
    with pytest.raises(LinkClosedError, match="not a stage server of this version"):
        Link._handshake(first, KEY, is_dialler=False)


def test_a_stranger_cannot_fill_the_memory_before_it_proved_the_key(sockets):
    first, second = sockets
    first.sendall(MAGIC + b"n" * NONCE_BYTES + SIZES.pack(2, 1) + b"{}" + b"x")
    with pytest.raises(LinkClosedError, match=r"2 \+ 1 bytes is too long"):
        Link.accept(second, KEY)


def forged(link: Link, header: bytes, payload: bytes, number: int) -> None:
    """Send what a program that knows the key, but not our rules, might."""
    signature = _signature(link._own, number, header, payload)
    link._send_all(SIZES.pack(len(header), len(payload)) + header + payload + signature)


def test_a_message_that_was_changed_on_its_way_ends_the_link(ends):
    one, other = ends()
    one._send_all(SIZES.pack(2, 0) + b"{}" + bytes(MAC_BYTES))
    with pytest.raises(LinkClosedError, match="not signed"):
        other.receive()


def test_a_message_that_comes_again_ends_the_link(ends):
    one, other = ends()
    for _ in range(2):
        forged(one, b"{}", b"", number=1)
    other.receive()
    with pytest.raises(LinkClosedError, match="not signed"):
        other.receive()


def test_a_pickle_is_never_opened(ends, tmp_path):
    class Opened:
        def __reduce__(self):
            return (open, (str(tmp_path / "opened"), "w"))

    one, other = ends()
    forged(one, b"{}", pickle.dumps(Opened()), number=1)

    with pytest.raises(LinkClosedError, match="not valid JSON with tensors"):
        other.receive()
    assert not (tmp_path / "opened").exists()


def test_a_message_beyond_every_size_is_not_read(ends):
    one, other = ends()
    one._send_all(SIZES.pack(MAX_HEADER_BYTES + 1, 0))
    with pytest.raises(LinkClosedError, match="is too long"):
        other.receive()


def test_an_end_that_is_silent_for_too_long_counts_as_lost(ends):
    _one, other = ends()
    other.wait_at_most(0.05)
    with pytest.raises(LinkClosedError, match="no data"):
        other.receive()


def test_an_end_that_closes_is_noticed_at_once(ends):
    one, other = ends()
    one.close()
    with pytest.raises(LinkClosedError, match="closed the connection"):
        other.receive()


def test_a_port_where_nobody_listens_is_told():
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    with pytest.raises(LinkClosedError, match=f"127.0.0.1 port {port}"):
        Link.connect("127.0.0.1", port, KEY)


# Layers of a model that run in stages make what the whole model makes.

CPU = torch.device("cpu")
SPARSE = {"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2}
IDS = torch.tensor([[3, 5, 7, 11, 13, 17], [0, 0, 19, 23, 29, 31]])
MASK = torch.tensor([[1, 1, 1, 1, 1, 1], [0, 0, 1, 1, 1, 1]])


def folder_of(path, **changes):
    torch.manual_seed(5)
    config = {**TINY_CONFIG, "num_hidden_layers": 5, **changes}
    fresh_model(config, torch.float32).save_pretrained(str(path))
    return path


def staged(folder, count):
    stages = [Layers(folder, which, CPU, torch.float32) for which in even_layer_ranges(5, count)]
    return EmbeddingAndHead(folder, CPU, torch.float32), stages


def written(ends, stages, steps=6):
    """Greedy tokens of two rows, one of them padded on the left."""
    ids, mask = IDS, MASK
    positions = (mask.cumsum(dim=1) - 1).clamp(min=0)
    found = []
    for _ in range(steps):
        hidden = run_stages(stages, PassArguments(1, positions, mask), ends.embed(ids))
        found.append(ends.choose(hidden))
        ids, mask = found[-1][:, None], torch.cat([mask, mask.new_ones(2, 1)], dim=1)
        positions = positions[:, -1:] + 1
    return torch.stack(found, dim=1)


@pytest.mark.equality
def test_stages_of_every_kind_that_is_divided_choose_the_same_tokens(tmp_path):
    for model_type in DIVISIBLE:
        more = SPARSE if "mo" in model_type or model_type == "mixtral" else {}
        if model_type == "mistral":
            more = {"sliding_window": 4}
        folder = folder_of(tmp_path / model_type, model_type=model_type, head_dim=16, **more)
        whole = load_folder(folder, "fp32", CPU)
        options = {"max_new_tokens": 6, "do_sample": False, "eos_token_id": None}
        wanted = whole.generate(input_ids=IDS, attention_mask=MASK, pad_token_id=0, **options)
        assert written(*staged(folder, 3)).tolist() == wanted[:, 6:].tolist(), model_type

    folder = folder_of(tmp_path / "model", tie_word_embeddings=True)
    assert written(*staged(folder, 2)).tolist() == written(*staged(folder, 5)).tolist()


def test_each_weight_is_in_one_stage_and_a_forgotten_session_takes_no_memory(tmp_path):
    folder = folder_of(tmp_path / "model")
    ends, stages = staged(folder, 2)
    around = sum(each.numel() for each in ends.model.parameters()) * 4
    whole = sum(each.numel() for each in load_folder(folder, "fp32", CPU).parameters()) * 4
    assert around + sum(each.weight_bytes for each in stages) == whole

    ends, stages = staged(folder_of(tmp_path / "model"), 2)
    written(ends, stages, steps=2)
    before = [each.cache_bytes for each in stages]
    for each in stages:
        each.forget(1)
    assert all(before)
    assert [each.cache_bytes for each in stages] == [0, 0]


def test_layers_are_divided_evenly_and_each_is_in_one_run(tmp_path):
    for count, sizes in ((1, [5]), (2, [3, 2]), (3, [2, 2, 1]), (5, [1] * 5)):
        runs = even_layer_ranges(5, count)
        assert [len(each) for each in runs] == sizes, (count, sizes)
        assert [at for each in runs for at in each] == list(range(5)), (count, sizes)
    with pytest.raises(BadInputError, match="6 stages are requested, and the model has 5 layers"):
        even_layer_ranges(5, 6)

    folder = folder_of(tmp_path / "model", model_type="gpt_neox")
    with pytest.raises(BadInputError, match=r"a 'gpt_neox' model is not divided.*llama, mistral"):
        EmbeddingAndHead(folder, CPU, torch.float32)


# A chain of stage servers writes what one process writes, whichever of them is lost.

CHAIN_KEY = "5a" * 32
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
        self.desk = StageListener("127.0.0.1", 0, bytes.fromhex(CHAIN_KEY))
        self.counts = ChainStatistics()

    def start(self):
        link = Link.connect(*self.desk.place)
        self.links.append(link)
        server = StageServer(self.folder, torch.float32)
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
        runs = enumerate(even_layer_ranges(5, count))
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
    """EmbeddingAndHead of a model that cut a server off before some pass."""

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
    ends = EmbeddingAndHead(folder, CPU, torch.float32)
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
    ends = EmbeddingAndHead(folder, CPU, torch.float32)
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
    written(EmbeddingAndHead(folder, CPU, torch.float32), [stage])
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


def test_stages_and_ranks_need_a_folder_and_hosts_a_key(make_job):
    spec = chain_spec(DemoModel())
    with pytest.raises(BadInputError, match="from a model folder; source demo has none"):
        ServerChain(make_job(spec), spec, spec.split)
    job = make_job(ranked_spec(DemoModel(), split=TensorSplit()))
    with pytest.raises(BadInputError, match="from a model folder; source demo has none"):
        load_rank_part(job, job.spec, Ranks(0, 2))
    with pytest.raises(BadInputError, match="sent no key"):
        key_of(gang_of(0, key=""))


def gang_of(rank: int, port: int = 29400, key: str = CHAIN_KEY) -> Gang:
    return Gang(
        node_rank=rank, num_nodes=2, master_address="127.0.0.1", master_port=port,
        own_address="127.0.0.1", rendezvous_id="chain", key=key,
    )  # fmt: skip


def chain_spec(model, **asked) -> GenerateSpec:
    chain = StageChain(stages=2, **asked)
    return GenerateSpec(model=model, weight_dtype="fp32", split=chain)


# Ranks that share a model write what one process writes.

DEFAULTS = {
    "prompts": DemoPrompts(count=5, input_tokens=24, shortest=4),
    "batch_size": 4,
    "output_tokens": 12,
}


def ranked_spec(model, **fields) -> GenerateSpec:
    return GenerateSpec(model=model, weight_dtype="fp32", **DEFAULTS, **fields)


def test_ranks_that_do_not_divide_the_heads_or_experts_are_refused_by_name():
    for size, field in ((3, "num_attention_heads"), (4, "num_key_value")):
        config = AutoConfig.for_model("llama", num_attention_heads=4, num_key_value_heads=2)
        with refused(
            BadInputError, f"{field}.*which is not divisible by {size} ranks", (size, field)
        ):
            check_divides(config, size)

    config = AutoConfig.for_model("mixtral", num_local_experts=6)
    with pytest.raises(BadInputError, match="num_experts is 6, which is not divisible by 4 ranks"):
        check_divides(config, 4, by_experts=True)

    config = AutoConfig.for_model("llama")
    with pytest.raises(BadInputError, match="a 'llama' model has no experts to divide"):
        check_divides(config, 2, by_experts=True)


def test_what_no_split_runs_is_refused_by_name():
    for changes in (
        {"batching": "continuous"},
        {"batching": "packed"},
        {"kv_cache": "int4"},
        {"weight_dtype": "int8"},
        {"speculation": PromptLookup()},
        {"offload": ExpertCache()},
    ):
        fields = {"model": DemoModel(), "weight_dtype": "fp32", "split": TensorSplit(), **changes}
        (name,) = changes

        with refused(ValidationError, f"split tensor runs with .*not with {name} ", changes):
            GenerateSpec.model_validate(fields)
