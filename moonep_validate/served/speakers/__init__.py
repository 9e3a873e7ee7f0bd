"""Engines in a process of their own: each answers prompts, and knows nothing of what is judged."""
