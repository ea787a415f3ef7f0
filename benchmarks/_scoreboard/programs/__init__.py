"""The programs of the scoreboard: ordinary Keras 3, which differs by peer only where its documentation asks for it."""

from _scoreboard.programs import batches, layers, losses, metrics, optimizers, steps
from _scoreboard.programs.common import REGISTERED, Program

GROUPS = (losses, batches, layers, optimizers, metrics, steps)
PROGRAMS: dict[str, Program] = {
    name: each for group in GROUPS for name, each in REGISTERED.items() if each.run.__module__ == group.__name__
}
