"""The first step of a process is traced as often as later ones: Python runs as often as in one process.

Run by test_strategy.py, before all other checks of a launch.
"""

from strategy.common import STRATEGY, X, Y
from strategy.trace_checks import EVENTS, compiled, notes_of, without_input


@notes_of
def check_calls_of_the_first_step(scope):
    """Of arrays in order, which nothing has numbered before; the last batch is shorter."""
    assert int(STRATEGY.keras_steps.rows_trained) == 0, "the first check of a launch must be this one"
    with scope:
        model = compiled(without_input())
    model.fit(X[:10], Y[:10], batch_size=4, shuffle=False, verbose=0)
    EVENTS.append("evaluate")
    model.evaluate(X[:10], Y[:10], batch_size=4, verbose=0)
