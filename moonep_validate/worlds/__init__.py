"""Where do ranks run? Each world runs one function on every rank and gives it a ``Comm``."""
