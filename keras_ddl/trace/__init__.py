"""From timelines to words, tables and a page: where the time of a job's steps goes, and who is late.

`steps.py` reads the ranks' timelines and puts them on one clock; `waits.py` says which part of a collective a rank can
do nothing but wait for; `summary.py` and `words.py` are `keras-ddl trace summary`, `page.py` is `keras-ddl trace view`.
"""
