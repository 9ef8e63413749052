"""``keras-remat will-it-fit``: statuses, JSON, a page, and what it asks."""

import json

import keras
import pytest

from keras_remat.cards import command
from keras_remat.cards.report import DOES_NOT_FIT, FITS, WITH_A_PLAN, CardReport, CardRow
from keras_remat.cli import main


def row(card, verdict):
    return CardRow(card=card, usable_bytes=2**30, plain_bytes=2**29, verdict=verdict)


@pytest.fixture
def answers(monkeypatch):
    """Sets the verdicts that come; holds what was asked."""
    asked = []

    def set_to(*verdicts):
        rows = tuple(row(f"card {at}", verdict) for at, verdict in enumerate(verdicts))

        def will_it_fit(model, *, progress, **options):
            asked.append((model, options))
            for each in rows:
                progress(each)
            return CardReport(batch_size=8, rows=rows, name="a <model>")

        monkeypatch.setattr(command, "will_it_fit", will_it_fit)
        return asked

    return set_to


@pytest.mark.parametrize(
    ("verdicts", "status"),
    [((FITS, FITS), 0), ((FITS, WITH_A_PLAN), 5), ((DOES_NOT_FIT, WITH_A_PLAN), 3), ((None,), 4)],
)
def test_the_worst_row_is_the_status(answers, capsys, verdicts, status):
    answers(*verdicts)
    assert main(["will-it-fit", "model.keras", "--json"]) == status
    told = capsys.readouterr()
    document = json.loads(told.out)
    assert [each["verdict"] for each in document["rows"]] == list(verdicts)
    assert document["batch_size"] == 8
    assert "card 0: " in told.err


def test_what_is_asked_and_written(answers, capsys, tmp_path):
    asked = answers(FITS)
    page = tmp_path / "fit.html"
    words = ["--batch-size", "8", "--card", "T4", "--card", "H100", "--shape", "x=3", "--html"]
    assert main(["will-it-fit", "my.module:function", *words, str(page)]) == 0
    ((model, options),) = asked
    assert model == "my.module:function"
    assert options == {
        "cards": ["T4", "H100"], "batch_size": 8, "shapes": ["x=3"], "dtypes": [],
    }  # fmt: skip
    assert "card 0" in capsys.readouterr().out
    assert "a &lt;model&gt;" in page.read_text()


def test_an_unknown_card_is_wrong_use(capsys):
    assert main(["will-it-fit", "model.keras", "--card", "H10"]) == 2
    assert "did you mean H100" in capsys.readouterr().err


@pytest.mark.card
def test_end_to_end(tmp_path, capsys):
    inputs = keras.Input((64,))
    model = keras.Model(inputs, keras.layers.Dense(10)(inputs))
    model.compile("sgd", "mse")
    model.save(tmp_path / "model.keras")
    words = ["--batch-size", "32", "--card", "T4", "--json"]
    assert main(["will-it-fit", str(tmp_path / "model.keras"), *words]) == 0
    (only,) = json.loads(capsys.readouterr().out)["rows"]
    assert (only["card"], only["verdict"]) == ("T4", FITS)
    assert only["plain_bytes"] > 32 * 64 * 4
