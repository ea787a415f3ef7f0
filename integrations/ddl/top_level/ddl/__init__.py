"""`import ddl` as IBM's scripts have it. Everything is in keras_ddl.ddl."""

import sys

import keras_ddl.ddl

sys.modules[__name__] = keras_ddl.ddl
