"""A job of a few ranks in one process, whose every message is a choice: who goes on, who is killed, who gets an error.

Each rank is a thread that runs the code of a rank: `Survival`, `keras_ddl.regroup` and `Communicator` as they are. Only
what lies below is simulated: the collectives of the engine, and the connection to the launcher, whose part is played by
the real `Regrouping`. One thread runs at a time, from one message to the next. So a schedule is a list of choices, and
all of them can be tried.

A collective ends on a rank when all ranks have entered it. If one of them is lost, each of the others may still get the
result, or an error: both are tried.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any
from unittest import mock

from simulated_engine import Engine, Killed, Variable, World

from keras_ddl import communicator
from keras_ddl.communicator import Communicator
from keras_ddl.communicator.native import binding
from keras_ddl.communicator.newcomers import history
from keras_ddl.communicator.transports.membership import Membership
from keras_ddl.errors import DeadlineError, RankLostError
from keras_ddl.launch.regroup import regrouping
from keras_ddl.link.kinds import Kind
from keras_ddl.resilience import survival
from keras_ddl.state import replicate
from keras_ddl.strategy.step.failing_together import Caller
from keras_ddl.topology import make_topology

PATIENCE = 10.0
Choice = tuple[str, int]
_MOVES = ("go", "result", "error", "answer", "over")  # of a rank


class Rank:
    """One rank: what the simulation has of its process."""

    def __init__(self, job: Job, number: int, program: Callable[[Rank], None]) -> None:
        self.job, self.number = job, number
        self.state, self.iterations = Variable(1), Variable(0)
        self.log: list[Any] = []
        self.has_failed = False
        self.calls = 0  # of collectives
        self.history = 0  # a hash of all that it has learned, of which its state is a function
        self.at: tuple[Any, ...] | None = ("begin",)  # where it waits; None: its program has ended
        self.ended: str | None = None  # "well", "killed" or the name of its error
        self.stopped = False
        self.answer: list[Any] = []  # of the launcher
        self.variable: Any = None  # of which it has slices (simulated_mesh.py)
        self.record: Any = None  # what `history.current` returns
        self.first_batch = 0  # in a newcomer: where it joins the others
        self._next: Any = None
        self._go, self._program = threading.Semaphore(0), program
        self.cut_step = SimpleNamespace(
            traces=0,
            forget_traces=self._forget_traces,
            repeat_obstacle=lambda: None,
            begin=lambda: None,
            complete=lambda: None,
        )
        self.caller = Caller(self.cut_step)
        self.has_trace = False
        self.strategy: Any = None
        self.survival: survival.Survival | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    @property
    def lives(self) -> bool:
        return self.ended is None

    def _forget_traces(self) -> None:
        self.has_trace = False

    def learn(self, value: Any) -> Any:
        """Returns `value`, on which this rank's further course depends."""
        self.history = hash((self.history, repr(value)))
        return value

    def pause(self, at: tuple[Any, ...]) -> Any:
        """Waits until the job lets this rank go on; returns or raises what it is given then."""
        if self.ended is not None:
            raise Killed
        self.at = at
        self.job.back.release()
        self._go.acquire()
        given, self._next = self._next, None
        if isinstance(given, BaseException):
            self.has_failed = True
            raise given
        return given

    def go(self, given: Any = None) -> None:
        """Runs this rank up to its next message."""
        self.learn(given)
        self._next = given
        self._go.release()
        self.job.back.acquire()

    def kill(self) -> None:
        self.die()
        self.go(Killed())

    def die(self) -> None:
        """The others notice that this rank was killed."""
        self.ended = "killed"
        for world in self.job.worlds.values():
            if self.number in world.members:
                world.gone[self.number] = "died"

    def _run(self) -> None:
        self._go.acquire()
        _here.rank = self
        try:
            if self._next is None:
                self._program(self)
                self.ended = "well"
        except Killed:
            pass
        except SystemExit:  # others go on without it
            self.ended = "left"
        except BaseException as error:
            self.ended = self.ended or type(error).__name__
            self.job.errors[self.number] = error
        if self.ended != "killed":
            communicator.world._close_world()
        self.at = None
        self.job.back.release()

    def join(self) -> None:
        self._thread.join()


_here = threading.local()


def this_rank() -> Rank:
    return _here.rank


class _State(threading.local):
    """`communicator.world._state`, of each rank."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.world: Communicator | None = None
        self.exit_registered, self.forked = True, False
        self.membership: Membership | None = None


class Job:
    """A job of `size` ranks, which run `program`. See `options` and `do`.

    Args:
        newcomers: further ranks, that the launcher has started in the place of earlier ones. spares: further ones, that
            it starts when a rank is lost.
    """

    def __init__(
        self, size: int, least: int, program: Callable[[Rank], None], newcomers: int = 0, spares: int = 0
    ) -> None:
        self.back = threading.Semaphore(0)
        self.worlds: dict[tuple[int, tuple[int, ...]], World] = {}
        self.errors: dict[int, BaseException] = {}
        self.is_stopping = False
        self.now = 0.0
        self._last_moved: int | None = None  # the rank; None: any
        self.unseen: list[int] = []  # ranks that have ended, which the launcher does not know
        self.size = size
        self.board: Any = None  # of newcomers (simulated_newcomers.py)
        self.ranks = [Rank(self, number, program) for number in range(size + newcomers + spares)]
        self.links = [self._link(rank) for rank in self.ranks]
        self.regrouping = regrouping.Regrouping(self.links, size, least, PATIENCE, lambda _: None)
        del self.regrouping.spares[:newcomers]

    def _link(self, rank: Rank) -> Any:
        outcome = SimpleNamespace(
            rank=rank.number,
            is_lost=False,
            done=True,
            survived=False,
            gives_up=False,
            has_vanished=False,
            describe=lambda: "killed",
        )
        return SimpleNamespace(
            outcome=outcome,
            channel=None,
            is_missing=False,
            over=False,
            output=SimpleNamespace(renumber=lambda _: None),
            signal=lambda _: self.end(rank),
            stop=lambda signum, _: self.end(rank) if rank.lives and signum else None,
            send=lambda kind, message: self._answer(rank, message) if kind is Kind.ANSWER else None,
        )

    def _answer(self, rank: Rank, message: dict[str, Any]) -> None:
        if not rank.lives:  # which the launcher has not seen
            return
        assert rank.at is not None
        if rank.number >= self.size and rank.at[0] not in ("answer", "join"):
            return  # a newcomer that has just given up joining
        assert rank.at[0] in ("answer", "join") and not rank.answer, (rank.number, message)
        if message.get("left"):
            if self.board is not None:
                self.board.forget_leaving(rank.number)
            rank.answer.append(SystemExit(0))
        else:
            ended, least = tuple(message.get("ended", ())), message.get("min_ranks", 1)
            rank.answer.append(Membership(message["epoch"], tuple(message["members"]), ended, least))

    def world(self, epoch: int, members: tuple[int, ...]) -> World:
        if (epoch, members) not in self.worlds:
            world = self.worlds[epoch, members] = World(members)
            world.gone |= {number: "died" for number in members if self.ranks[number].ended == "killed"}
        return self.worlds[epoch, members]

    # ---- what can happen

    def options(self, victims: Sequence[int]) -> list[Choice]:
        """Returns what can happen next; a choice whose order cannot matter is none.

        victims: who may be killed. Each is killed at once after it has done something, or not before it does something
        again: what the others do meanwhile is the same whether it lives or not, and they can do it later as well.
        """
        awake = [rank for rank in self.ranks if rank.lives and not rank.stopped]
        for rank in awake:
            if rank.at is not None and rank.at[0] in ("begin", "enter", "ask"):
                kill = [("kill", rank.number)] if rank.number in victims and rank.at[0] != "begin" else []
                return [("go", rank.number), *kill]
        actual: list[Choice] = []
        for rank in awake:
            assert rank.at is not None
            ends = self._ends(rank)
            if len(ends) == 1 and not victims and rank.at[0] in ("answer", "wait"):
                return ends
            actual += ends
        actual += [("see", number) for number in self.unseen]
        if actual:
            recent = [rank for rank in awake if self._last_moved in (rank.number, None)]
            actual += [("kill", rank.number) for rank in recent if rank.number in victims]
        return actual

    def _ends(self, rank: Rank) -> list[Choice]:
        """Returns how the wait of a rank may end now."""
        assert rank.at is not None
        if rank.at[0] == "board":
            return [("go", rank.number)]
        if rank.at[0] == "look":
            return [("go", rank.number)] if rank.at[1]() else []
        if rank.at[0] in ("answer", "join"):
            ends = [("answer", rank.number)] if rank.answer or self.is_stopping else []
            return ends + ([("over", rank.number)] if rank.at[0] == "join" and rank.at[1]() else [])
        _, world, key = rank.at
        entered = world.entered[key]
        ends = []
        if len(entered) == len(world.members):
            ends.append(("result", rank.number))
        missing = [number for number in world.gone if number not in entered]
        if missing or world.is_late or any(how != "left" for how in world.gone.values()):
            ends.append(("error", rank.number))
        return ends

    def do(self, choice: Choice) -> None:
        """Lets it happen."""
        what, number = choice
        rank = self.ranks[number]
        if what in _MOVES:
            self._last_moved = number
        elif what in ("time", "stop", "resume"):
            self._last_moved = None
        if what == "go":
            self._go(rank)
        elif what == "result":
            assert rank.at is not None
            entered = rank.at[1].entered[rank.at[2]]
            rank.go([entered[member] for member in rank.at[1].members])
        elif what == "error":
            assert rank.at is not None
            rank.go(self._error(rank.at[1]))
        elif what == "answer":
            rank.go(rank.answer.pop() if rank.answer else RankLostError("the launcher ends the job"))
        elif what == "over":
            rank.answer.clear()
            rank.go(None)
        elif what in ("kill", "end"):
            self.end(rank)
        elif what == "leave":
            self.regrouping.ask_to_leave([number], "no room")
            self.board.let_leave(number)
        elif what == "see":
            self.unseen.remove(number)
            link = self.links[number]
            link.outcome.is_lost = rank.ended == "killed"
            link.outcome.done = rank.ended in ("well", "left")
            link.over = True
            if not self.regrouping.continues_without(link, is_stopping=self.is_stopping) and not link.outcome.done:
                self.is_stopping = True
        elif what == "stop":
            rank.stopped = True
        elif what == "resume":
            rank.stopped = False
        elif what == "time":
            for world in self._waiting():
                world.is_late = True
            self.now += PATIENCE
        if what in _MOVES and rank.at is None:
            self.unseen.append(number)
        self.regrouping.answer()

    def end(self, rank: Rank) -> None:
        """Kills a rank."""
        rank.kill()
        self.unseen.append(rank.number)

    def can_wait(self) -> bool:
        """Whether anything happens when time passes: a deadline, or the launcher's patience."""
        return bool(self._waiting()) or bool(self.regrouping.membership.missing())

    def _waiting(self) -> list[World]:
        awake = [rank for rank in self.ranks if rank.lives and not rank.stopped]
        worlds = [rank.at[1] for rank in awake if rank.at is not None and rank.at[0] == "wait"]
        return [world for world in worlds if not world.is_late]

    def _go(self, rank: Rank) -> None:
        assert rank.at is not None
        if rank.at[0] == "enter":
            _, world, key, mine = rank.at
            world.entered.setdefault(key, {})[rank.number] = mine
        elif rank.at[0] == "ask":
            question = rank.at[1]
            rank.go()
            self.regrouping.ask(rank.number, question)
            return
        rank.go()

    @staticmethod
    def _error(world: World) -> Exception:
        if "died" in world.gone.values() or "left" in world.gone.values():
            error = RankLostError(f"{world.gone}")
            error.has_left = "died" not in world.gone.values()
            return error
        return DeadlineError(f"{world.gone}")

    def key(self) -> tuple[Any, ...]:
        """Returns what the further course depends on."""
        ranks = tuple((r.history, r.at is not None and r.at[0], r.ended, r.stopped, len(r.answer)) for r in self.ranks)
        members = self.regrouping.membership
        asking = tuple(members.is_awaited(rank.number) for rank in self.ranks)
        launcher = members.epoch, members.members, asking, tuple(sorted(self.unseen)), self.is_stopping, self.now
        board = self.board and self.board.key()
        return ranks, launcher, tuple(sorted(members._joining)), board

    def give_up(self) -> None:
        """Ends all threads."""
        for rank in self.ranks:
            if rank.at is not None:
                rank.ended = rank.ended or "killed"
                rank.go(Killed())
            rank.join()


def open_world(rank: Rank, topology: Any, world: World) -> None:
    native: Any = Engine(rank, world)
    everybody = tuple(range(topology.size))
    communicator.world._state.world = Communicator(native, topology, "world", everybody, binding.WORLD)


def broadcast(variables: Sequence[Variable], root: int) -> None:
    """Gives all ranks the values of rank `root`. COLLECTIVE."""
    comm = communicator.communicator_of(None)
    for number, variable in enumerate(variables):  # each by itself: a rank may be lost between two of them
        values = comm.native().all_gather_bytes(variable.value, f"variable {number}")
        variable.assign(values[root])


@contextmanager
def simulated() -> Iterator[None]:
    """In it, ranks are threads of this process."""

    def after(_: Any, epoch: int, admits: Sequence[int] | None = None, leaves: str | None = None) -> Any:
        rank = this_rank()
        rank.pause(("ask", {"epoch": epoch, "admits": admits, "leaves": leaves}))
        return rank.pause(("answer",))

    def meet(_: Any, mode: str, membership: Membership) -> tuple[Any, Any]:
        rank = this_rank()
        world = rank.job.world(membership.epoch, membership.members)
        Engine(rank, world).all_gather_bytes(b"", "meeting")
        place = make_topology(membership.members.index(rank.number), ["host"] * len(membership.members), mode)
        rank.has_failed = False
        return place, world

    def clock() -> float:
        return _jobs[-1].now

    here = threading.main_thread()
    of_main = SimpleNamespace(current_thread=lambda: here, main_thread=lambda: here)
    patches = [
        mock.patch.object(communicator.world, "_state", _State()),
        mock.patch.object(communicator.world, "find_launcher", lambda: SimpleNamespace(rank=this_rank().number)),
        mock.patch.object(communicator.meeting, "next_membership", after),
        mock.patch.object(communicator.meeting, "without_mpi", meet),
        mock.patch.object(
            communicator.world, "_open_world", lambda place, world, note: open_world(this_rank(), place, world)
        ),
        mock.patch.object(replicate.ops, "broadcast_variables", broadcast),
        mock.patch.object(survival.one_per_job, "alive", lambda: [this_rank().strategy]),
        mock.patch.object(survival, "threading", of_main),
        mock.patch.object(history, "_recover", None),
        mock.patch.object(regrouping, "time", SimpleNamespace(monotonic=clock)),
    ]
    for patch in patches:
        patch.start()
    try:
        yield
    finally:
        for patch in patches:
            patch.stop()
        _jobs.clear()


_jobs: list[Job] = []


def started(size: int, least: int, program: Callable[[Rank], None], newcomers: int = 0, spares: int = 0) -> Job:
    """Returns a new job, the only one that runs."""
    _jobs[:] = [job := Job.__new__(Job)]
    job.__init__(size, least, program, newcomers, spares)  # its clock is read meanwhile
    return job
