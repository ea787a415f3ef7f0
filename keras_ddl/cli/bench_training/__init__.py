"""How long training steps take on 1, 2, ... ranks, measured: what `keras-ddl bench train` and benchmarks/ share.

networks.py    the built-in networks and their rows
subject.py     what is trained: one of them, or what the user's function returns
step_times.py  seconds of the steps of a fit
overlap.py     communication of a step and how much of it is exposed, from a timeline
rank.py        what each rank measures
rounds.py      jobs of 1, 2, ... ranks that take turns, and the medians
prediction.py  steps on other hosts and links, by the cost model
report.py      table, JSON and plot; what each figure is
"""
