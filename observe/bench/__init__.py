"""`keras-ddl bench` and `keras-ddl bench train`: measure how fast all_reduce and training are here."""
