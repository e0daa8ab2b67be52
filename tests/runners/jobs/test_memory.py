"""Bytes that tensors hold, the peak of a process, and pinned memory."""

import gc

import pytest
import torch
from torchao.quantization import Int8WeightOnlyConfig, quantize_
from transformers import DynamicCache

from runners.jobs import weights
from runners.jobs.loading import fresh_model
from runners.jobs.memory import (
    LiveBytes,
    PeakMeter,
    activations_counted,
    cache_bytes,
    model_bytes,
    tensor_bytes,
)
from runners.jobs.weights import HostBuffers, activations_in_host, host_empty
from tests.runners.jobs.tiny import TINY_CONFIG


def test_tensors_hold_their_elements_and_scales_at_their_width():
    assert tensor_bytes(torch.zeros(3, 5, dtype=torch.bfloat16)) == 30

    linear = torch.nn.Linear(64, 32, bias=False, dtype=torch.bfloat16)
    quantize_(linear, Int8WeightOnlyConfig())
    held = tensor_bytes(linear.weight)
    assert 64 * 32 < held <= 64 * 32 + 32 * 4 + 32

    import bitsandbytes

    linear = bitsandbytes.nn.Linear4bit(
        64, 64, bias=False, quant_type="nf4", compress_statistics=False
    )
    linear = linear.to("cpu")
    state = linear.weight.quant_state
    held = tensor_bytes(linear.weight)
    assert linear.weight.dtype == torch.uint8
    assert held == 64 * 64 // 2 + tensor_bytes(state.absmax) + tensor_bytes(state.code)


def test_models_and_caches_hold_what_they_store_at_its_width_and_tied_weights_once():
    model = fresh_model(TINY_CONFIG, torch.float32)
    parameters = sum(each.numel() for each in model.parameters())
    buffers = sum(each.numel() * each.element_size() for each in model.buffers())
    assert model_bytes(model) == 4 * parameters + buffers
    tied = fresh_model({**TINY_CONFIG, "tie_word_embeddings": True}, torch.float32)
    untied = fresh_model(TINY_CONFIG, torch.float32)
    assert model_bytes(untied) - model_bytes(tied) == 4 * 512 * 64

    cache = DynamicCache(config=model.config)
    model(input_ids=torch.zeros(3, 10, dtype=torch.long), past_key_values=cache, use_cache=True)
    layers, batch, kv_heads, tokens, head_dim = 2, 3, 2, 10, 16
    assert cache_bytes(cache) == 2 * layers * batch * kv_heads * tokens * head_dim * 4


def test_the_peak_remembers_what_was_freed_again_and_says_how_it_was_taken():
    meter = PeakMeter(torch.device("cpu"))
    big = torch.ones(64 * 2**20 // 4)
    del big
    peak = meter.read()
    assert peak.bytes - peak.start_bytes >= 60 * 2**20
    assert PeakMeter(torch.device("cpu")).read().how.startswith("peak resident memory since")


# Counting the bytes of living tensors: exact, whatever the allocator does.

KILO = 1024


def test_what_goes_is_taken_off_and_the_peak_stays_and_views_make_nothing():
    with LiveBytes() as live:
        first = torch.zeros(KILO, dtype=torch.uint8)
        second = torch.zeros(2 * KILO, dtype=torch.uint8)
        del first
        third = torch.zeros(KILO // 2, dtype=torch.uint8)
    assert (live.now, live.peak) == (2.5 * KILO, 3 * KILO)
    assert len(second) + len(third) == 2.5 * KILO

    before = torch.zeros(KILO, dtype=torch.uint8)
    with LiveBytes([before]) as live:
        before.add_(1)
        view = before.reshape(2, -1)[0]
    assert live.peak == 0
    assert view[0] == 1


def test_of_two_passes_gradients_are_no_activations():
    layer = torch.nn.Linear(64, 32, bias=False)
    inputs = torch.ones(8, 64)
    with activations_counted(layer) as live:
        layer(inputs).sum().backward()
    assert layer.weight.grad is not None
    assert live.now == 0
    assert live.peak >= 8 * 32 * 4


# Pinned memory has the size that was asked for, and comes back with its last tensor.


@pytest.fixture
def driver(monkeypatch):
    """A driver that notes what is registered: address to bytes."""
    held: dict[int, int] = {}

    def register(address: int, size: int) -> bool:
        assert not any(at < address + size and address < at + n for at, n in held.items())
        held[address] = size
        return True

    monkeypatch.setattr(weights, "_register", register)
    monkeypatch.setattr(weights, "_unregister", held.pop)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    return held


def test_pinned_memory_is_exact_and_is_given_back_with_its_last_view(driver):
    gc.collect()
    gc.freeze()  # so that each collection looks at what this test made
    for shape in ((3, 1000), (), (0, 4), (1,)):
        for dtype in (torch.float32, torch.bfloat16, torch.uint8):
            source = torch.arange(torch.Size(shape).numel()).to(dtype).view(shape)

            made = host_empty(shape, dtype, is_pinned=True).copy_(source)

            assert torch.equal(made, source), (shape, dtype)
            assert sum(driver.values()) == source.nbytes, (shape, dtype)
            part = made.flatten()[:1]
            del made
            gc.collect()
            assert sum(driver.values()) == source.nbytes, (shape, dtype)
            del part
            gc.collect()
            assert not driver, (shape, dtype)


def test_memory_that_the_driver_does_not_pin_is_plain(monkeypatch):
    monkeypatch.setattr(weights, "_register", lambda _address, _size: False)
    made = host_empty((4,), torch.float32, is_pinned=True).fill_(2.0)
    assert made.tolist() == [2.0] * 4
    assert host_empty((4,), torch.float32, is_pinned=False).shape == (4,)


@pytest.mark.equality
def test_activations_in_host_memory_give_the_same_gradients_in_buffers_used_again(driver):
    torch.manual_seed(0)
    model = fresh_model({**TINY_CONFIG}, torch.float32)
    ids = torch.randint(0, 512, (2, 32))
    kept = frozenset(each.untyped_storage().data_ptr() for each in model.parameters())
    buffers, sizes, gradients = HostBuffers(is_pinned=True), [], []

    def step() -> None:
        model.zero_grad()
        model(input_ids=ids, use_cache=False).logits.float().square().mean().backward()
        gradients.append([each.grad.clone() for each in model.parameters()])

    step()
    for _ in range(2):
        with activations_in_host(buffers, kept, 4096):
            step()
        sizes.append(buffers.nbytes)

    assert sizes[0] == sizes[1] == sum(driver.values()) > 0
    for found in gradients[1:]:
        assert all(map(torch.equal, gradients[0], found))
