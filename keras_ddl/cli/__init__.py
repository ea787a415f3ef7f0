"""The command line: `keras-ddl run`, `keras-ddl info` and the commands of parts. No module of the core imports it.

`main` is the entry point. Subcommands are imported when they are called, and import TensorFlow as late as possible, so
that --help and error messages appear at once.
"""

from keras_ddl.cli.main import main

__all__ = ["main"]
