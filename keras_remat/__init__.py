"""keras_remat: train Keras models that do not fit in device memory."""
