"""Measures training steps on 1, 2, ... ranks, for `keras-ddl bench train` and benchmarks/.

networks.py    the built-in networks and their rows
subject.py     the model and data to train: a built-in network, or the result of the user's function
step_times.py  seconds of the steps of a fit
overlap.py     communication of a step and how much of it is exposed, from a timeline
rank.py        measures on each rank
rounds.py      runs jobs of 1, 2, ... ranks in turn, and takes medians
prediction.py  steps on other hosts and links, by the cost model
report.py      table, JSON and plot, with a legend
"""
