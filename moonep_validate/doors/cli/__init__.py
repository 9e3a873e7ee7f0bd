"""The command ``moonep-validate``."""
