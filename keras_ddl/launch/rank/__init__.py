"""A rank on its host: the wrapper process and the program that it runs."""
