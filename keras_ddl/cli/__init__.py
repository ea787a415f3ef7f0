"""The command line: keras-ddl run | export | info. Nothing imports it.

`main` is the entry point. Subcommands are imported when they are called, and none of them imports TensorFlow before it
must, so that --help and mistakes are answered at once.
"""

from keras_ddl.cli.main import main

__all__ = ["main"]
