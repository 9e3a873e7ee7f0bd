"""What runs: the case line, its words and limits, the profiles, and pure facts of the two API generations."""
