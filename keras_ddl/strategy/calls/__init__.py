"""The running calls of fit, evaluate and predict, and what a thread traces in them."""
