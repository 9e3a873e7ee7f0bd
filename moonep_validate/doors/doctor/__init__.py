"""Can this machine run it, and if not, why? Readings of the machine, and lines made from them."""
