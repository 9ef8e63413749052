"""Fits in order whose limit is below what the plain step takes, and that have its bits."""

import keras_models
from tight_limit import tight_limit

import keras_remat
from keras_remat.backends.tensorflow import backend


def plan_with_plain_bits(make, share, batch_size, epochs=3, in_form=None):
    """Trains two new models, one of them under a tight limit; both have to have the same losses and
    the same state. Returns the plan and the model that it trained.

    Args:
        make: returns a model, and inputs and targets.
        share: of what the plain step adds to what is resident, by which the limit is above that.
        in_form: inputs and targets → what ``fit`` is given of them; ``None`` for themselves.
    """

    def trained(share=None):
        model, data = make()
        limit = share and tight_limit(backend(), model, data, batch_size, share)
        remat = keras_remat.RematAutotune(
            limit, "keep", solver="greedy", profile_steps=1, verbose=0, compilation="ordered"
        )
        given = [in_form(*data)] if in_form else data
        options = {} if in_form else {"batch_size": batch_size, "shuffle": False}
        callbacks = [remat] if limit else []
        history = model.fit(*given, epochs=epochs, verbose=0, callbacks=callbacks, **options)
        return history.history["loss"], keras_models.state_of(model), remat.plan, model

    losses, state, *_ = trained()
    ours, our_state, plan, model = trained(share)
    assert ours == losses
    keras_models.assert_same_bits(our_state, state)
    assert plan.recomputes
    return plan, model
