"""The problem, without any framework: graph, profile, schedule, and what follows from them."""
