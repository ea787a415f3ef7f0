"""The module that IBM's scripts import as `ddl`; the code is in keras_ddl.ddl."""

import sys

import keras_ddl.ddl

sys.modules[__name__] = keras_ddl.ddl
