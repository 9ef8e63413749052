"""Keras's bar shows two of the four keys; everyone else gets all."""

import numpy as np
import pytest

import keras_remat

keras = pytest.importorskip("keras")
from keras_remat.training.progress_bar import HIDDEN_KEYS, shorten_bars  # noqa: E402


def test_the_bar_leaves_two_keys_out_until_it_is_undone():
    bar, seen = keras.callbacks.ProgbarLogger(), []
    bar._finalize_progbar = lambda logs: seen.append(dict(logs))
    logs = dict.fromkeys(["loss", "remat_speedup", "remat_peak_gib", *HIDDEN_KEYS], 1.0)
    undo = shorten_bars([keras.callbacks.History(), bar])
    bar.on_epoch_end(0, logs)
    assert set(seen[0]) == {"loss", "remat_speedup", "remat_peak_gib"}
    undo()
    undo()
    bar.on_epoch_end(1, logs)
    assert set(seen[1]) == set(logs)


def test_fit_prints_two_keys_and_history_has_four(models, capsys):
    model, batch = models.mlp(8, width=8, blocks=1)
    remat = keras_remat.RematAutotune(batch_size="keep", verbose=0)
    history = model.fit(*map(np.asarray, batch), batch_size=8, verbose=2, callbacks=[remat]).history
    printed = capsys.readouterr().out
    assert "remat_speedup" in printed
    assert "remat_peak_gib" in printed
    assert not any(key in printed for key in HIDDEN_KEYS)
    assert set(history) >= {"remat_speedup", "remat_peak_gib", *HIDDEN_KEYS}
