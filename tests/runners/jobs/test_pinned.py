"""Pinned memory has the size that was asked for, and comes back with its last tensor."""

import gc

import pytest
import torch

from runners.jobs import pinned
from runners.jobs.loading import fresh_model
from runners.jobs.pinned import HostBuffers, activations_in_host, host_empty
from tests.runners.jobs.tiny import TINY_CONFIG


@pytest.fixture
def driver(monkeypatch):
    """A driver that notes what is registered: address to bytes."""
    held: dict[int, int] = {}

    def register(address: int, size: int) -> bool:
        assert not any(at < address + size and address < at + n for at, n in held.items())
        held[address] = size
        return True

    monkeypatch.setattr(pinned, "_register", register)
    monkeypatch.setattr(pinned, "_unregister", held.pop)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    return held


@pytest.mark.parametrize("shape", [(3, 1000), (), (0, 4), (1,)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8])
def test_pinned_memory_is_exact_and_is_given_back_with_its_last_view(driver, shape, dtype):
    source = torch.arange(torch.Size(shape).numel()).to(dtype).view(shape)

    made = host_empty(shape, dtype, is_pinned=True).copy_(source)

    assert torch.equal(made, source)
    assert sum(driver.values()) == source.nbytes
    part = made.flatten()[:1]
    del made
    gc.collect()
    assert sum(driver.values()) == source.nbytes
    del part
    gc.collect()
    assert not driver


def test_memory_that_the_driver_does_not_pin_is_plain(monkeypatch):
    monkeypatch.setattr(pinned, "_register", lambda _address, _size: False)

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
