"""Studies: each is a command that prints a table and draws a picture, and each row says where its numbers come from.

rows.py          what all of them do with their rows
"""
