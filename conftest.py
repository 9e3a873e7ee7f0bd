"""Settings of this project's own test session; users get everything from the plugin."""

pytest_plugins = ["pytester"]
