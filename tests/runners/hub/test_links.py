"""How fast files came to a host, what that says of the next ones, and the bandwidth it allows."""

import errno
import heapq
import json
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from planner.specs.units import MIB
from runners.hub import links
from runners.hub.download import download
from runners.hub.errors import DownloadStoppedError
from runners.hub.links import Bandwidth, LinkRate, measured_rates, note_transfer, of_host
from runners.hub.selection import needed_files
from runners.hub.settings import HubSettings
from runners.shared.config import HostConfigError

MB = 10**6


def noted(host_dir: Path, rates: list[float], address: str = "https://huggingface.co") -> LinkRate:
    for rate in rates:
        note_transfer(HubSettings(endpoint=address, host_dir=host_dir), 100 * MB, 100 * MB / rate)
    return measured_rates(host_dir)["hub"]


def test_the_newest_transfers_of_a_source_say_a_median_and_their_middle(tmp_path):
    few = noted(tmp_path, [40e6, 60e6, 20e6])
    assert [few.median, few.low, few.high] == pytest.approx([40e6, 20e6, 60e6], rel=1e-3)
    assert few.words(24e9) == (
        "about 10 min (7 to 20 min) at the 40 MB/s of this host's last 3 transfers from "
        "huggingface.co"
    )
    many = noted(tmp_path, [each * 1e6 for each in range(10, 31)])  # the eldest is forgotten
    assert many.num_transfers == links.KEPT
    assert [many.median, many.low, many.high] == pytest.approx([20.5e6, 12e6, 29e6], rel=1e-3)

    moved = noted(tmp_path, [5e6], "https://mirror.lan")  # another source says nothing of this
    assert (moved.num_transfers, moved.address) == (1, "mirror.lan")
    assert moved.words(1e9).endswith("this host's last transfer from mirror.lan")


def test_what_says_nothing_of_the_link_is_not_kept_and_a_damaged_file_is_none(tmp_path):
    settings = HubSettings(host_dir=tmp_path)
    for num_bytes, seconds in ((links.LEAST_BYTES - 1, 1.0), (100 * MB, 0.0)):
        note_transfer(settings, num_bytes, seconds)
    note_transfer(replace(settings, host_dir=None), 100 * MB, 1.0)
    note_transfer(replace(settings, host_dir=tmp_path / "none"), 100 * MB, 1.0)
    assert measured_rates(tmp_path) == {}
    transfer = {"num_bytes": 10**8, "seconds": 1.0}
    for text in (
        "{", "[]", '{"hub": 1}', '{"hub": {"address": "a"}}',
        *(
            json.dumps({"hub": {"address": "huggingface.co", "transfers": transfers}})
            for transfers in (
                5, None, [], [5], [[1e400, 1]], [transfer | {"num_bytes": 1e400}],
                [transfer | {"seconds": 0}], [transfer | {"seconds": "nan"}],
                [transfer] * (links.KEPT + 1),
            )
        ),
    ):  # fmt: skip
        (tmp_path / links.LINKS_FILE).write_text(text)
        assert measured_rates(tmp_path) == {}, text
        assert noted(tmp_path, [1e6]).num_transfers == 1, text


def test_a_download_notes_its_rate_also_if_it_is_stopped(
    hub, settings, looked_up, tmp_path, monkeypatch, quick
):
    monkeypatch.setattr(links, "LEAST_BYTES", 2**19)
    monkeypatch.setattr("runners.hub.download.REPORT_SECONDS", 0.01)
    hub.bytes_per_second, hub.hold_at = 8e6, 2 * 2**20  # it cannot end before it is stopped
    listing = looked_up()
    files = needed_files(listing, "safetensors")
    noting = replace(settings, host_dir=tmp_path)
    done = [0]
    with pytest.raises(DownloadStoppedError):
        download(
            listing, files, noting,
            on_progress=lambda arrived, *_: done.append(arrived),
            should_stop=lambda: done[-1] > 1.5 * 2**20,
        )  # fmt: skip
    first = json.loads((tmp_path / links.LINKS_FILE).read_text())["hub"]["transfers"]
    assert [1.4 * 2**20 < each["num_bytes"] < 2.2 * 2**20 for each in first] == [True]
    hub.hold_at = -1
    hub.go_on.set()
    download(listing, files, noting)
    rate = measured_rates(tmp_path)["hub"]
    assert (rate.num_transfers, rate.address) == (2, f"127.0.0.1:{hub.port}")
    assert 0 < rate.low <= rate.median <= rate.high < 100e6


@pytest.fixture
def clock(monkeypatch):
    now = [1000.0]
    monkeypatch.setattr(links.time, "time", lambda: now[0])
    return now


def test_all_processes_of_a_host_share_what_it_allows(tmp_path, clock):
    (tmp_path / "config.json").write_text(json.dumps({"max_transfer_bytes_per_second": MB}))
    settings = of_host(HubSettings(), tmp_path)
    ones, others = Bandwidth(settings), Bandwidth(settings)  # as two processes have them
    taken = [list(each.delays(size)) for each, size in ((ones, MB), (others, 2 * MB), (ones, MB))]
    assert taken == [[1.0], [2.0, 3.0], [4.0]]
    clock[0] += 10.0
    assert list(others.delays(MB // 2)) == [0.5]  # time that nobody used is lost
    clock[0] -= 5000.0  # somebody set the clock back
    assert list(ones.delays(MB)) == [1.0]
    with ThreadPoolExecutor(4) as pool:
        delays = sorted(pool.map(lambda _: next(Bandwidth(settings).delays(MB)), range(8)))
    assert delays == [float(each) for each in range(2, 10)]
    assert list(Bandwidth(replace(settings, max_bytes_per_second=0.0)).delays(MB)) == []


def test_large_parts_at_a_low_limit_keep_it_and_let_others_pass_between(tmp_path, clock):
    settings = HubSettings(host_dir=tmp_path, max_bytes_per_second=64 * 1024)
    sizes = [8 * MIB] * 6 + [64 * 1024]
    waiters = [Bandwidth(settings).delays(size) for size in sizes]
    due, ended = [(clock[0], number) for number in range(len(sizes))], {}
    while due:
        clock[0], number = heapq.heappop(due)
        seconds = next(waiters[number], None)
        if seconds is None:
            ended[number] = clock[0] - 1000.0
        else:
            heapq.heappush(due, (clock[0] + seconds, number))
    assert ended[6] == pytest.approx(7.0)
    assert max(ended.values()) == pytest.approx(sum(sizes) / (64 * 1024))


def test_a_limit_that_cannot_be_shared_holds_for_the_process_and_is_logged_once(
    tmp_path, clock, monkeypatch, caplog
):
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    no_lock = OSError(errno.ENOLCK, "No locks available")
    for host_dir, patched in (
        (tmp_path / "none", {}),
        (tmp_path, {"os.pwrite": full}),
        (tmp_path, {"fcntl.flock": lambda *_: (_ for _ in ()).throw(no_lock)}),
    ):
        caplog.clear()
        with monkeypatch.context() as patch:
            for name, function in patched.items():
                patch.setattr(name, function)
            limit = Bandwidth(HubSettings(host_dir=host_dir, max_bytes_per_second=float(MB)))
            assert list(limit.delays(2 * MB)) == [1.0, 2.0], host_dir
        assert [each.levelname for each in caplog.records] == ["WARNING"]
        assert str(host_dir / links.LIMIT_FILE) in caplog.text


def test_what_the_host_held_back_says_nothing_of_the_link(tmp_path):
    def stated(limit: int | None) -> LinkRate | None:
        config = {"max_transfer_bytes_per_second": limit} if limit else {}
        (tmp_path / "config.json").write_text(json.dumps(config))
        return measured_rates(tmp_path).get("hub")

    stated(10 * MB)
    settings = of_host(HubSettings(), tmp_path)
    for rate in (9.7e6, 9.8e6):  # a little below the limit, as real transfers are
        note_transfer(settings, 100 * MB, 100 * MB / rate)
    assert stated(10 * MB).words(3e9) == "about 5 min at the 10 MB/s that this host allows"
    assert stated(5 * MB).median == 5e6
    assert stated(20 * MB) is None
    assert stated(None) is None
    noted(tmp_path, [40e6])
    assert (stated(None).median, stated(None).num_transfers) == (40e6, 1)
    assert stated(10 * MB).num_transfers == 3


def test_no_stated_rate_is_higher_than_what_the_host_allows(tmp_path):
    noted(tmp_path, [40e6, 60e6])
    config = tmp_path / "config.json"
    config.write_text(json.dumps({"max_transfer_bytes_per_second": 10 * MB}))
    assert measured_rates(tmp_path)["hub"].words(3e9) == (
        "about 5 min at the 10 MB/s that this host allows"
    )
    config.write_text(json.dumps({"max_transfer_bytes_per_second": 100}))
    with pytest.raises(HostConfigError, match="max_transfer_bytes_per_second"):
        of_host(HubSettings(), tmp_path)
