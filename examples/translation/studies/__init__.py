"""Studies: each is a command that prints a table and draws a picture, and each row says where its numbers come from.

scaling.py         words per second against the number of ranks: here, in the emulated cluster, and on the original's
                   machines (original.py); trainings.py starts what is measured, _step_time.py is a rank of it
strong_scaling.py  one batch on ever more nodes, with dense and with assumed-sparse gradients
divergence.py      learning rates and batches at which training diverges, with warm-up, without, and with the guard;
                   diverging.py is a rank of it
table_bytes.py     bytes of the gradient of a shared table, gathered and as one table, by the number of ranks;
                   tied_table.py is a rank of it
rows.py            what all of them do with their rows
"""
