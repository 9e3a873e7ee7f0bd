"""How users come in: command line, pytest, torchrun, reports, standalone scripts."""
