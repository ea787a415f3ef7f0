"""Studies: each is a command that prints a table and draws a picture, and each row says where its numbers come from.

table_bytes.py   bytes of the gradient of a shared table, gathered and as one table, by the number of ranks
rows.py          what all of them do with their rows
"""
