"""What should have come out? Independent answers: plan, dense layer, combine, bounds."""
