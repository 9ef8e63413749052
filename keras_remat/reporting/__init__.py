"""Shows a person what was planned and what was measured."""
