"""Connects Keras and one framework each: traces a train step, profiles it, and runs it in an
order."""
