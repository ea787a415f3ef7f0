"""Provides keras_ddl as Horovod; see integrations/horovod/installation.py."""

from keras_ddl.horovod.installation import install
from keras_ddl.horovod.running import run as run

# Scripts compare the version. This is the release whose names keras_ddl provides.
__version__ = "0.28.1+keras.ddl"

install()
