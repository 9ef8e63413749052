"""The benchmark of cards demands what it says."""

MIB = 2**20


ROW = {
    "name": "unet", "card": "T4", "framework": "jax", "at": 0.5, "status": "kept",
    "limit_bytes": 90 * MIB, "floor_bytes": 40 * MIB, "predicted_bytes": 88 * MIB,
    "compiled_bytes": 89 * MIB, "compilations": 1, "overhead": 0.04,
}  # fmt: skip
PEER = {
    "name": "unet", "card": "T4", "batch_size": 4, "peer": "XLA's own pass", "status": "compiled",
    "plain_flops": 4.0, "plain_moved": 4, "plain_s": 1.0, "peer_bytes": MIB, "peer_flops": 6.0,
    "peer_moved": 6, "peer_s": 1.5, "ours": "kept", "ours_bytes": MIB, "ours_flops": 5.0,
    "ours_moved": 5, "ours_s": 1.25,
}  # fmt: skip


def test_what_falls_short_is_told(benchmark_of):
    cards = benchmark_of("cards")
    assert cards.failures([ROW]) == []
    assert cards.failures([]) == cards.peer_failures([]) == ["no rows"]
    (late,) = cards.failures([ROW | {"compilations": 4}])
    assert "4 compilations" in late
    told = cards.failures([ROW, ROW | {"at": 0.35, "status": "not found"}])
    assert told == ["unet on T4 at 0.35: not found"]
    below = {"at": 0.35, "status": "below the floor", "floor_bytes": 99 * MIB}
    assert cards.failures([ROW, ROW | below]) == []


def test_rows_of_a_file_are_summed_up(benchmark_of, monkeypatch, tmp_path, capsys):
    cards = benchmark_of("cards")
    monkeypatch.setattr(cards, "measured", None)  # nothing is compiled
    over = ROW | {"at": 0.35, "status": "not found", "compiled_bytes": 110 * MIB}
    below = ROW | {"at": 0.7, "status": "below the floor", "floor_bytes": 99 * MIB}
    timed = ROW | {"card": "H100", "overhead": 0.08, "time": 1.25, "compiled_bytes": 88 * MIB}
    rows = tmp_path / "rows.jsonl"
    for row in (ROW | {"status": "not found"}, ROW, over, below, timed):  # the newest counts
        benchmark_of("rows").keep(row | {"policy": "float32"}, rows)
    monkeypatch.setattr("sys.argv", ["cards.py", "--json", str(rows), "--known", "--check"])
    assert cards.main() == 1
    *_, told, not_found, worst = capsys.readouterr().out.splitlines()
    assert told == (
        "2 of 3 limits kept (1 are below the step's floor); predictions off by 1.1% (median), "
        "25.0% (worst); overhead at half 6.0% (median of 2); time at half 1.25 of plain, counted "
        "from the modules (median of 1)"
    )
    assert not_found == "BOUND: unet on T4 at 0.35: not found"
    assert worst == "BOUND: the worst is off by +25.0%: unet on T4 at 0.35"


def test_peers_at_equal_bytes(benchmark_of):
    cards = benchmark_of("cards")
    assert cards.peer_failures([PEER, PEER | {"ours": "not found"}]) == []
    (more,) = cards.peer_failures([PEER | {"ours_moved": 9}])
    assert more == "unet on T4: 50% more bytes moved than XLA's own pass"
    assert "| 1.50 | 1.50 | 1.50 | 1.0 | 1.25 | 1.25 | 1.25 |" in cards.peer_line(PEER)
