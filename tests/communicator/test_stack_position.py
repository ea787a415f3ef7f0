"""Where the main thread is: the innermost line of the user's own code, whatever library it is inside."""

import json
import threading

from keras_ddl.communicator import stack_position


def seen_from_another_thread(during) -> str:
    found = []
    looked = threading.Event()

    def look():
        found.append(stack_position.main_thread())
        looked.set()

    during(threading.Thread(target=look), looked)
    return found[0]


def test_position_of_the_users_line_inside_a_library():
    def wait_here(thread, looked):
        thread.start()
        looked.wait(10)

    text = seen_from_another_thread(wait_here)
    users, _, inside = text.partition(" (inside ")
    assert "test_stack_position.py:" in users
    assert users.endswith(" in test_position_of_the_users_line_inside_a_library.wait_here")
    assert inside.startswith("python3") or "threading.py:" in inside, text


def test_position_behind_a_callback_from_a_library():
    def wait_in_a_callback(thread, looked):
        def hook(pairs):
            thread.start()
            while not looked.is_set():
                pass

        json.loads('{"a": 1}', object_pairs_hook=hook)

    text = seen_from_another_thread(wait_in_a_callback)
    assert "wait_in_a_callback.hook" in text
    assert "json" not in text.partition(" (inside ")[0]


def test_answers_until_closed():
    questions = iter([True, True, False])
    answers = []
    stack_position.answer_questions(lambda: next(questions), answers.append)
    assert len(answers) == 2
    assert all("test_stack_position.py:" in answer or "stack_position.py" in answer for answer in answers)
