"""What both frameworks share when XLA compiles a whole step: what will exist in memory, what
protects a recomputation, what it costs. No framework."""
