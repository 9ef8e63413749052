"""Answers for GPUs that need not be there: whether a train step fits, and where its memory goes."""
