"""Lower bounds that no schedule beats."""
