"""The bench of the tunnel runs, with its processes."""

from webapp.bench import gateway


def test_the_bench_gives_its_figures_and_every_chunk_arrives(tmp_path, monkeypatch):
    small = {"REQUESTS": 20, "STREAMS": 40, "HELD_STREAMS": 20, "SETTLE_SECONDS": 0.2}
    for name, value in {**small, "MEASURED_SECONDS": 1.0}.items():
        monkeypatch.setattr(gateway, name, value)
    rows = {name: value for name, value, *_ in gateway.gateway_metrics(tmp_path)}
    assert 400 < rows["chunks that arrived"] <= 880  # forty streams of twenty a second
    for words in ("chunks for each second", "tunnel / direct", "memory with"):
        found = [value for name, value in rows.items() if name.startswith(words)]
        assert found, words
        assert all(value > 0 for value in found), words
