"""The benchmark of the zoo shows rows of the settings that it was asked for, and no others."""


def test_a_case_is_measured_again_with_other_settings(benchmark_of, monkeypatch, tmp_path):
    zoo, ran = benchmark_of("zoo"), []

    def run(name, share, timeout_s, backend, **asked):
        ran.append((share, asked["batch"]))
        return {"name": name, "status": "planned"}

    monkeypatch.setattr(zoo, "run", run)
    for words in ([], ["--batch", "64"], [], ["--share", "0.5"], ["--batch", "64"]):
        file = ["--only", "VAE", "--json", str(tmp_path / "rows.jsonl")]
        monkeypatch.setattr("sys.argv", ["zoo.py", *file, *words])
        assert zoo.main() == 0
    assert ran == [(0.6, 16), (0.6, 64), (0.5, 16)]
