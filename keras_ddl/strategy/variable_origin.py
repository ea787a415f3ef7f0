"""Marks who creates a variable: the program or Keras (which aggregates its own), and all ranks or one alone."""

from __future__ import annotations

from keras_ddl.compat.context import Setting

of_keras = Setting("variable_of_keras", False)
# Whether a rank may make variables alone, as in callbacks. Otherwise making one in a scope is COLLECTIVE, because the
# ranks agree on its first value.
of_one_rank = Setting("variable_of_one_rank", False)
