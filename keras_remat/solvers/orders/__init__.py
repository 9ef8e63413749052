"""What solvers do with orders: rate, repair, shorten and coarsen them."""
