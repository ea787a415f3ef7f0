"""Studies. Each is a command that prints a table and draws a picture, and each row says where its numbers come from.

scaling.py         words per second against the number of ranks: here, in the emulated cluster, and on the original's
                   machines (original.py); trainings.py starts the measured trainings, _step_time.py runs one rank
strong_scaling.py  one batch on more and more nodes, with dense and with assumed-sparse gradients
divergence.py      learning rates and batch sizes at which training diverges, with and without warm-up, and with the
                   guard; diverging.py runs one rank
table_bytes.py     bytes of the gradient of a shared table, gathered and as one table, by the number of ranks;
                   tied_table.py runs one rank
rows.py            prints, saves and draws the rows of all studies
"""
