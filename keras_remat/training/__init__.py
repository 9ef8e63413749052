"""Decides which step runs for which batch of a running ``fit``."""
