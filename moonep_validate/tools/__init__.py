"""What needs no run: checkpoints, memory, routings that users hand in."""
