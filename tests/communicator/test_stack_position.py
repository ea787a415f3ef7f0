"""The position of the main thread: the innermost line of the user's own code, whatever library it is inside."""

import ast
import json
import subprocess
import sys
import threading
import traceback
import warnings
from collections.abc import Callable

import pytest

from keras_ddl.communicator.reporting import stack_position


def test_position_of_the_users_line_behind_a_callback_from_a_library():
    found = []

    def wait_in_a_callback():
        looking = threading.Thread(target=lambda: found.append(stack_position.main_thread()))

        def hook(pairs):
            looking.start()
            looking.join()

        json.loads('{"a": 1}', object_pairs_hook=hook)

    wait_in_a_callback()
    users, _, inside = found[0].partition(" (inside ")
    assert "test_stack_position.py:" in users and users.endswith("wait_in_a_callback.hook"), found
    assert inside.startswith("python3") or "threading.py:" in inside, found


def generated(source: str) -> Callable:
    """Returns the function `f` of code without a file, as TensorFlow generates it for ops."""
    names = {"stack_position": stack_position, "traceback": traceback}
    exec(compile(source, "<string>", "exec"), names)
    return names["f"]


def test_position_is_not_in_generated_code():
    text = generated("def f(): return stack_position.main_thread()")()
    assert "test_stack_position.py:" in text.partition(" (inside ")[0], text
    frames = generated("def f(): return traceback.extract_stack()")()
    assert "test_stack_position.py:" in stack_position.user_line(frames)


def test_position_is_in_generated_code_as_a_last_resort():
    source = (
        "from keras_ddl.communicator.reporting import stack_position as s\ndef f():\n  print(s.main_thread())\n\nf()"
    )
    done = subprocess.run([sys.executable, "-P", "-c", source], capture_output=True, text=True, check=True)
    assert done.stdout.startswith("<string>:5 (inside "), done.stdout
    library = traceback.FrameSummary(ast.__file__, 50, "parse")
    assert stack_position.user_line([library]) is None
    assert stack_position.user_line([traceback.FrameSummary("<string>", 717, "f"), library]) == "<string>:717"
    assert stack_position.user_line([traceback.FrameSummary("<frozen runpy>", 88, "f"), library]) is None


def test_warning_names_the_line_that_called_libraries():
    def warn_in_libraries():
        class Visitor(ast.NodeVisitor):
            visit_Name = staticmethod(generated("def f(_): stack_position.warn('look', RuntimeWarning)"))

        Visitor().visit(ast.parse("x"))

    with pytest.warns(RuntimeWarning, match="look") as caught:
        warn_in_libraries()
        line = sys._getframe().f_lineno
    assert (caught[0].filename, caught[0].lineno) == (__file__, line - 4)
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("default")
        for _ in range(2):
            warn_in_libraries()
    assert len(found) == 1  # once per line, like any warning


def test_replies_until_closed():
    queries = iter([True, True, False])
    replies = []
    stack_position.reply_to_queries(lambda: next(queries), replies.append)
    assert len(replies) == 2
    assert all("test_stack_position.py:" in reply or "stack_position.py" in reply for reply in replies)
