"""Marks who creates a variable: the program or Keras, which aggregates its own variables; and all ranks or only one."""

from __future__ import annotations

from keras_ddl.compat.context import Setting

created_by_keras = Setting("variable_of_keras", False)
# Whether a rank may make variables alone, as in callbacks. Otherwise making one in a scope is COLLECTIVE, because the
# ranks agree on its first value.
of_one_rank = Setting("variable_of_one_rank", False)
