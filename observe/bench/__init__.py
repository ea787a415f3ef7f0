"""`keras-ddl bench` and `keras-ddl bench train`: how fast all_reduce and training are here."""
