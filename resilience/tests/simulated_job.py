"""A job of a few ranks in one process in which every message is a choice: who continues, is killed, or gets an error.

Each rank is a thread that runs a rank's real code: `Survival`, `keras_ddl.regroup` and `Communicator`. Only the layers
below are simulated: the engine's collectives, and the connection to the launcher, for which the real `Regrouping` acts.
One thread runs at a time, from one message to the next. So a schedule is a list of choices, and all schedules can be
tried.

A collective ends on a rank when all ranks have entered it. If one of them is lost, each of the others may either get
the result or an error; both are tried.
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
_MOVES = ("go", "result", "error", "answer", "over")  # choices that let a rank run


class Rank:
    """One rank and the simulated part of its process."""

    def __init__(self, job: Job, number: int, program: Callable[[Rank], None]) -> None:
        self.job, self.number = job, number
        self.state, self.iterations = Variable(1), Variable(0)
        self.log: list[Any] = []
        self.has_failed = False
        self.calls = 0  # number of collectives
        self.history = 0  # a hash of everything it has learned, which determines its state
        self.at: tuple[Any, ...] | None = ("begin",)  # where it waits, or None if its program has ended
        self.ended: str | None = None  # "well", "killed" or the name of its error
        self.stopped = False
        self.answer: list[Any] = []  # the launcher's answers
        self.variable: Any = None  # a sliced variable (simulated_mesh.py)
        self.record: Any = None  # what `history.current` returns
        self.first_batch = 0  # where a newcomer joins the others
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
        """Returns `value` and records that this rank's future depends on it."""
        self.history = hash((self.history, repr(value)))
        return value

    def pause(self, at: tuple[Any, ...]) -> Any:
        """Waits until the job lets this rank continue; returns or raises what the job passes to it."""
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
        """Marks this rank as killed for the others."""
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
        except SystemExit:  # the others continue without it
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
    """Gives each rank its own `communicator.world._state`."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.world: Communicator | None = None
        self.exit_registered, self.forked = True, False
        self.membership: Membership | None = None


class Job:
    """A job of `size` ranks that run `program`. See `options` and `do`.

    Args:
        newcomers: additional ranks that the launcher has started in place of earlier ones.
        spares: additional ranks that it starts when a rank is lost.
    """

    def __init__(
        self, size: int, least: int, program: Callable[[Rank], None], newcomers: int = 0, spares: int = 0
    ) -> None:
        self.back = threading.Semaphore(0)
        self.worlds: dict[tuple[int, tuple[int, ...]], World] = {}
        self.errors: dict[int, BaseException] = {}
        self.is_stopping = False
        self.now = 0.0
        self._last_moved: int | None = None  # a rank, or None for any
        self.unseen: list[int] = []  # ended ranks that the launcher has not noticed
        self.size = size
        self.board: Any = None  # the newcomers' board (simulated_newcomers.py)
        self.ranks = [Rank(self, number, program) for number in range(size + newcomers + spares)]
        self.links = [self._link(rank) for rank in self.ranks]
        self.regrouping = regrouping.Regrouping(self.links, size, least, PATIENCE, lambda _: None)
        del self.regrouping.spares[:newcomers]

    def _link(self, rank: Rank) -> Any:
        outcome = SimpleNamespace(
            rank=rank.number,
            is_lost=False,
            done=True,
            job_continues=False,
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
        if not rank.lives:  # the launcher has not noticed its end
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

    # ---- possible events

    def options(self, victims: Sequence[int]) -> list[Choice]:
        """Returns the possible next choices, without those whose order cannot matter.

        victims: ranks that may be killed. Each is killed right after it has acted, or not before it acts again. What
        the others do meanwhile does not depend on its death, and they can do it later as well.
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
        """Returns the ways in which a rank's wait may end now."""
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
        """Carries out a choice."""
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
        """Whether time passing changes anything: a deadline, or the launcher's patience."""
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
        """Returns everything that the future of the job depends on."""
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
    for number, variable in enumerate(variables):  # one by one, because a rank may be lost between two
        values = comm.native().all_gather_bytes(variable.value, f"variable {number}")
        variable.assign(values[root])


@contextmanager
def simulated() -> Iterator[None]:
    """Runs ranks as threads of this process inside the context."""

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
    main_thread_only = SimpleNamespace(current_thread=lambda: here, main_thread=lambda: here)
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
        mock.patch.object(survival, "threading", main_thread_only),
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
    """Returns a new job, the only one that is running."""
    _jobs[:] = [job := Job.__new__(Job)]
    job.__init__(size, least, program, newcomers, spares)  # reads the job's clock
    return job
