"""Do two ways to serve one model say the same: what was asked, what came, how far apart they are."""
