"""What happened: calls of all ranks in one byte format, and how much of each tensor is kept."""
