"""What goes in: expert ids and tensors as pure functions of a case."""
