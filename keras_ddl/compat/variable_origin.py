"""Is the variable being created the user's? Or is it of Keras or keras_ddl, which aggregate their own?"""

from __future__ import annotations

from contextlib import AbstractContextManager

from keras_ddl.compat.thread_value import ThreadValue

_not_of_the_program = ThreadValue(False)


def not_of_the_program() -> AbstractContextManager[None]:
    """Returns a context in which variables are made for Keras or keras_ddl."""
    return _not_of_the_program.set_to(True)


def is_of_the_program() -> bool:
    """Whether a variable that is made now is the program's."""
    return not _not_of_the_program.get()
