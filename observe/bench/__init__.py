"""Measures the speed of all_reduce and of training: `keras-ddl bench` and `keras-ddl bench train`."""
