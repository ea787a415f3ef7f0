"""Studies: commands that print a table and draw a picture. Each row says where its numbers come from.

scaling.py         words per second against the number of ranks: here, in the emulated cluster, and on the original's
                   machines (original.py); trainings.py starts the measured trainings, _step_time.py runs one rank
strong_scaling.py  one batch on an increasing number of nodes, with dense and with assumed-sparse gradients
divergence.py      learning rates and batch sizes at which training diverges, with and without warm-up, and with the
                   guard; diverging.py runs one rank
table_bytes.py     bytes of a shared table's gradient, gathered or as one table, by number of ranks;
                   tied_table.py runs one rank
rows.py            prints, saves and draws the rows of all studies
"""
