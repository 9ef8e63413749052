"""Models and protects whole steps that XLA compiles, for both frameworks: which values exist in
memory, how recomputations are protected, what they cost. It imports no framework."""
