"""Runs one job: starts its ranks, serves the connection of every rank, and ends everything when necessary.

The rules:
- The job succeeds if every rank reports that its program ended by itself with status 0.
- When a rank fails, the others get a moment to fail by themselves (their reports help to tell cause from effect), then
  SIGTERM, then SIGKILL.
- However the job ends, no process is left: the wrappers kill their programs, mpirun is killed if it does not end,
  and remaining processes on this host are found by their environment.
"""

from __future__ import annotations

import json
import shutil
import signal
import time
from collections.abc import Callable
from functools import partial
from typing import Any

from keras_ddl import config
from keras_ddl.config import Seconds
from keras_ddl.errors import LaunchError
from keras_ddl.launch import address
from keras_ddl.launch.checks import host_facts
from keras_ddl.launch.hosts.host_plan import HostPlan
from keras_ddl.launch.interrupts import Interrupts
from keras_ddl.launch.job import JobResult, JobSpec
from keras_ddl.launch.output import masking
from keras_ddl.launch.output.screen import RankOutput, Screen
from keras_ddl.launch.preflight import Preflight
from keras_ddl.launch.rank import job_folder, processes, terminal
from keras_ddl.launch.rank_link import RankLink
from keras_ddl.launch.regroup.changing_hosts import ChangingHosts
from keras_ddl.launch.regroup.regrouping import Regrouping
from keras_ddl.launch.starters.starter_process import StarterProcess
from keras_ddl.launch.stdin import StdinForwarder
from keras_ddl.launch.watchers import Watchers
from keras_ddl.link.channel import Channel
from keras_ddl.link.kinds import Kind
from keras_ddl.link.listener import Listener
from keras_ddl.link.loop import READ, Source, serve

_FOR_REGROUPING = (Kind.QUESTION, Kind.RECORD, Kind.SHOWN)
_NOTICES = (signal.SIGUSR1, signal.SIGUSR2)  # forwarded to the ranks, which decide what they mean


class Supervisor:
    """The loop of one job. Call `run` only once."""

    def __init__(
        self,
        job: JobSpec,
        screen: Screen,
        *,
        stdin: int | None = None,
        terminals: dict[str, int] | None = None,
        will_restart: Callable[[JobResult], bool] = lambda result: False,
        watchers: Watchers | None = None,
    ) -> None:
        """
        Args:
            terminals: "stdout" and "stderr" -> descriptor, for streams that are terminals.
            will_restart: called once at the end; returns whether another attempt follows, which needs `job.kept`.
        """
        self._job, self._screen, self._will_restart = job, screen, will_restart
        self._watchers = watchers or Watchers()
        self._terminals = terminals or {}
        self._stdin = StdinForwarder(stdin)
        self.links: list[RankLink] = []
        self._result = JobResult([])
        for _ in range(job.num_ranks + job.spares):
            self.add_link()
        self._by_fd: dict[int, tuple[RankLink, Channel]] = {}
        self._process: StarterProcess | None = None
        self._stop_at: float | None = None  # when to ask the other ranks to end
        self._stopping = False
        self._end_starter_at: float | None = None
        self._killed = False
        self._hosts_changed = False
        self.changing: ChangingHosts | None = None
        self._refusal: str | None = None  # why the programs must not start
        self._regrouping: Regrouping | None = None
        if job.min_ranks is not None and job.mpirun is None:  # an mpirun ends all ranks when one dies
            # The same time as a collective waits for a living rank.
            patience = config.get("DEADLINE_SECONDS", job.environment) or float("inf")
            self._regrouping = Regrouping(
                self.links,
                job.num_ranks,
                job.min_ranks,
                patience,
                self.say,
                event=self._watchers.event,
                several_hosts=job.num_hosts > 1,
            )
            if job.hostfile is not None:
                plan = HostPlan(job.hosts, job.num_ranks, job.spares, job.min_ranks, job.max_ranks)
                self.changing = ChangingHosts(job.hostfile.path, plan, self._regrouping, self, Seconds.START)

    def notify_hosts_changed(self) -> None:
        """Makes the loop tell all ranks that a restart would use other hosts. May be called from another thread."""
        self._hosts_changed = True

    def run(self, signals: tuple[signal.Signals, ...]) -> JobResult:
        """Runs the job to its end. `signals`: signals that end it.

        Raises: LaunchError: not all ranks could be started.
        """
        job = self._job
        began = time.monotonic()
        self._folder = job_folder.make(job.folder, is_new=True)
        sockets = job_folder.make(self._folder / job_folder.SOCKETS, is_new=True)
        self._result.starter = job.starter
        listener, self._address = address.listen(None if job.several_hosts else sockets / "launcher")
        lost_after = Seconds.LOST_AFTER
        if self._regrouping is not None:  # the other ranks wait until the launcher notices a lost host
            lost_after = min(lost_after, config.get("LOST_AFTER_SECONDS", job.environment) or lost_after)
        self._listener = Listener(listener, self._address.token, len(self.links), lost_after)
        self._preflight = Preflight(job, self.say)
        try:
            with Interrupts((*signals, signal.SIGWINCH), self._kill_all) as self._interrupts:
                if not self._preflight.holds_start:
                    self._refusal = self._preflight.problems()
                if not self._refuses():
                    self._start_starter()
                    self._loop(began)
                    self._end_starter()
        finally:
            self._clean_up()
        self._result.seconds = time.monotonic() - began
        if self._refusal is not None:
            raise LaunchError(self._refusal)
        self._result.starter_text, self._result.starter_status = self._starter.text, self._starter.status
        if self._result.signal is None and not self._result.timed_out:
            self._preflight.check_started(self.links, self._starter)
        return self._result

    # ---- starting ------------------------------------------------------------------------------------------------

    def add_link(self) -> None:
        """Adds the launcher's end of a connection with one more rank, spare or newcomer."""
        rank = len(self.links)
        try:
            log = self._job.log_file(rank)
        except OSError as error:  # such as a full disk, which must not end the job
            self.say(f"rank {rank}'s output is not saved: {error}")
            log = None
        self.links.append(RankLink(rank, RankOutput(rank, self._screen, log), self._job.call))
        self._result.outcomes.append(self.links[rank].outcome)

    def start_on_host(self, message: dict[str, Any]) -> None:
        """Asks the starter to start more processes on a host (Kind.START_ON_HOST)."""
        assert self._starter.orders is not None
        self._starter.orders.send(Kind.START_ON_HOST, message)

    def _refuses(self) -> bool:
        """Whether the checks forbid the start. If so, no program runs, and a restart would not help."""
        self._result.refused = self._refusal is not None
        return self._result.refused

    def _start_starter(self) -> None:
        command = self._job.command()
        if self._job.verbose:
            self.say(masking.shown(command))
        environment = self._job.starter_environment(str(self._address))
        self._process = StarterProcess(
            command, environment, self._job.directory, takes_orders=self.changing is not None
        )

    @property
    def _starter(self) -> StarterProcess:
        assert self._process is not None  # the loop begins after _start_starter
        return self._process

    def _welcome(self, hello: dict[str, Any]) -> dict[str, object]:
        screens: dict[str, int] = dict.fromkeys(self._terminals, True)
        if screens:
            rows, columns = terminal.size(next(iter(self._terminals.values())))
            screens |= {"rows": rows, "columns": columns}
        return {
            "job": self._job.id,
            "host": self._address.hostname,
            "environment": dict(self._job.environment),
            "directory": self._job.directory,
            "terminal": screens,
            "stdin": self._stdin.wanted,
            "kept": self._job.kept,
            "regroups": self._regrouping is not None,
            "of_job": {  # for the program (link/program.py)
                "regroups": self._regrouping is not None,
                "takes_newcomers": self._regrouping is not None and self._job.takes_newcomers,
                "figures": self._watchers.want_figures,
                "clock": {name: value for name, value in hello.get("facts", {}).items() if name.startswith("offset")},
            },
        }

    # ---- the loop ------------------------------------------------------------------------------------------------

    def _loop(self, began: float) -> None:
        """Serves until all ranks are over, the starter has ended, or the job must be ended from outside."""
        deadline = None if self._job.timeout is None else began + self._job.timeout - self._job.seconds_spent
        while not all(link.over for link in self.links):
            now = time.monotonic()
            self._refusal = self._refusal or self._preflight.unreachable()
            if self._killed or self._refuses():
                self._end_starter_at = now
                return
            if self._screen.lost is not None and self._result.signal is None:
                self._result.signal = self._screen.lost
                self._stop_ranks(signal.SIGTERM, self._job.grace or Seconds.GRACE)
            if deadline is not None and now >= deadline:
                deadline = None
                self._result.timed_out = True
                self.say(f"the job did not end within {self._job.timeout:g} s and is being stopped.")
                self._stop_ranks(signal.SIGTERM, Seconds.GRACE)
            first = self.links[: self._job.num_ranks + self._job.spares]
            if not self._stopping and now - began > Seconds.START and any(each.is_missing for each in first):
                self._stop_ranks(signal.SIGTERM, Seconds.GRACE)
            if self._hosts_changed and all(link.started for link in self.links):
                self._hosts_changed = False
                for link in self.links:
                    link.send(Kind.HOSTS_CHANGED)
            if self._stop_at is not None and now >= self._stop_at:
                self._stop_ranks(signal.SIGTERM, Seconds.GRACE)
            if self._end_starter_at is not None and now >= self._end_starter_at:
                return
            ended_at = self._starter.ended_at
            if ended_at is not None and (
                now - ended_at > Seconds.STARTER_END or not (self._by_fd or self._listener.has_unproven)
            ):
                return
            self._serve(0.1 if self._tick() else 1.0)

    def _tick(self) -> bool:
        """Handles everything that depends on time. Returns whether it must be called again soon."""
        self._listener.tick()
        busy = self._screen.tick()
        for link in self.links:
            busy |= link.output.tick()
        if self._regrouping is not None:
            busy |= self._regrouping.answer()
            if self._stop_at is None and not self._stopping and any(each.outcome.is_missed for each in self.links):
                self._stop_at = time.monotonic()
        if self.changing is not None and not self._stopping and self.links[0].started:
            self.changing.tick()
        times = (self._stop_at, self._end_starter_at, self._starter.ended_at)
        return busy or any(when is not None for when in times) or self._job.timeout is not None

    def _serve(self, timeout: float) -> None:
        """Waits up to `timeout` seconds for an event, and handles it."""
        sources: list[Source] = [(self._interrupts.fileno(), READ, self._handle_signals)]
        sources += [(fd, READ, partial(self._admit, fd)) for fd in self._listener.fds]
        if not self._starter.silent:
            sources.append((self._starter.fileno(), READ, self._read_starter))
        orders = self._starter.orders
        if orders is not None and not orders.closed:
            sources.append((orders.fileno(), orders.events, partial(self._receive_from_starter, orders)))
        for fd, (_, channel) in list(self._by_fd.items()):
            if channel.closed:  # a send has failed
                self._serve_rank(fd)
            else:
                sources.append((fd, channel.events, partial(self._serve_rank, fd)))
        first = self.links[0]
        if self._stdin.readable() and first.started and not first.over:
            sources.append((self._stdin.fileno(), READ, partial(self._stdin.forward, first)))
        serve(timeout, sources)
        self._starter.poll()

    def _handle_signals(self) -> None:
        for signum in self._interrupts.take():
            if signum == signal.SIGWINCH:
                if self._terminals:
                    rows, columns = terminal.size(next(iter(self._terminals.values())))
                    for link in self.links:  # only ranks with a terminal use it
                        link.send(Kind.TERMINAL_SIZE, {"rows": rows, "columns": columns})
                continue
            if signum in _NOTICES:
                self._watchers.event("signal", signal=signal.Signals(signum).name)
                for link in self.links:
                    link.signal(signum)
                continue
            if self._result.signal is None:
                self._result.signal = signum
                self._watchers.event("signal", signal=signal.Signals(signum).name)
                again = " (press again to kill them)" if signum == signal.SIGINT else ""
                self.say(f"{signal.Signals(signum).name}: stopping the ranks{again}.")
            if signum == signal.SIGINT:
                self._stop_ranks(signal.SIGINT, self._job.grace or Seconds.INTERRUPT_GRACE)
            else:
                self._stop_ranks(signal.SIGTERM, self._job.grace or Seconds.GRACE)

    # ---- ranks ---------------------------------------------------------------------------------------------------

    def _admit(self, fd: int) -> None:
        """Admits a rank whose proof has arrived."""
        caller = self._listener.serve(fd)
        if caller is None:
            return
        channel, hello = caller.channel, caller.hello
        if (facts := hello.get("facts")) is not None:
            offset = host_facts.clock_offset(facts["clock"], caller.sent_at, time.time())
            facts["offset"], facts["offset_error"] = offset
        is_ours = hello["size"] == self._job.num_ranks and hello["rank"] < len(self.links)
        link = self.links[hello["rank"]] if is_ours else None
        if link is None or link.channel is not None or link.over:
            channel.close()
            return
        self._by_fd[channel.fileno()] = link, channel
        caller.welcome(self._address.token, self._welcome(hello))
        link.connect(channel, hello)
        self._preflight.take(hello["rank"], hello)
        if self._stopping:
            link.stop(signal.SIGTERM, 0.0)
        if self.changing is not None:
            self.changing.connected(link.outcome.rank)
        is_last = not any(each.is_missing and not each.over for each in self.links)
        if is_last and self.changing is None:
            self._listener.close()
        if not self._preflight.holds_start:
            link.start()
        elif self.links[0].started:
            if (problem := self._preflight.problem_of(link.outcome.rank)) is None:
                link.start()
            else:
                assert self.changing is not None  # only newcomers arrive this late
                self.changing.refuse(link.outcome.rank, problem)
        elif is_last:
            self._refusal = self._refusal or self._preflight.problems()
            for each in self.links if self._refusal is None else ():
                each.start()

    def _serve_rank(self, fd: int) -> None:
        if fd not in self._by_fd:
            return  # another handler just closed it
        link, channel = self._by_fd[fd]
        link.write()
        for kind, payload in () if channel.closed else channel.read():
            if kind is Kind.STDIN_CONSUMED:
                self._stdin.taken(json.loads(payload)["bytes"])
            elif kind in _FOR_REGROUPING and self._regrouping is not None:
                self._regrouping.take(link.outcome.rank, kind, payload)
            else:
                link.handle(kind, payload)
                self._watchers.take(link.outcome, kind, payload)
                if kind is Kind.WAITS:
                    self._report_ended_ranks(link)
        if channel.closed:
            del self._by_fd[fd]
            link.lose()
        if link.over and not link.counted:
            self.count(link)

    def count(self, link: RankLink) -> None:
        """Handles the end of a rank: tells the watchers, and decides whether the job continues."""
        link.counted = True
        for each in self.links:
            self._report_ended_ranks(each)
        self._watchers.rank_end(link.outcome)
        if self.changing is not None:
            self.changing.ended(link.outcome)
        if link.result is not None:
            self._result.results[link.outcome.rank] = link.result
        if self._regrouping is not None and self._regrouping.continues_without(link, is_stopping=self._stopping):
            return
        if link.outcome.done or self._stopping:
            return
        when = time.monotonic() + link.outcome.seconds_for_others(with_mpi=self._job.mpirun is not None)
        self._stop_at = when if self._stop_at is None else min(when, self._stop_at)

    def _report_ended_ranks(self, link: RankLink) -> None:
        """Tells a rank which of the ranks that it waits for have ended."""
        ended = [rank for rank in link.waits_for if rank < len(self.links) and self.links[rank].over]
        if ended:
            link.waits_for.difference_update(ended)
            link.send(Kind.ENDED, {"ranks": ended})

    def _stop_ranks(self, signum: int, grace_seconds: float) -> None:
        self._stopping = True
        self._stop_at = None
        for link in self.links:
            link.stop(signum, grace_seconds)
        self._end_starter_at = time.monotonic() + grace_seconds + Seconds.GRACE
        if not any(link.connected for link in self.links):
            self._end_starter_at = time.monotonic()

    # ---- the end -------------------------------------------------------------------------------------------------

    def _read_starter(self) -> None:
        data = self._starter.read()
        if self._job.verbose and data:
            self._screen.write_lines(
                "err", b"".join(b"[%s] %s\n" % (self._job.starter.encode(), x) for x in data.rstrip(b"\n").split(b"\n"))
            )

    def _receive_from_starter(self, orders: Channel) -> None:
        orders.write()
        for _, payload in () if orders.closed else orders.read():  # the starter sends only NOT_STARTED
            assert self.changing is not None
            self.changing.not_started(**json.loads(payload))

    def _end_starter(self) -> None:
        """Lets the wrappers exit and waits for mpirun, which may ignore SIGTERM."""
        last = not self._will_restart(self._result)
        for link in self.links:
            link.send(Kind.BYE, {"last": last, "job_continues": link.outcome.job_continues})
        is_late = self._end_starter_at is not None and time.monotonic() >= self._end_starter_at
        self._starter.end(0.0 if is_late else Seconds.STARTER_END, lambda: self._serve(0.05), lambda: self._killed)
        self._read_starter()

    def _kill_all(self) -> None:
        """Kills all processes at the second Ctrl-C, inside the signal handler: the loop may be blocked."""
        self._killed = True
        # Kill the programs first: their wrappers must still collect exit statuses.
        processes.kill_marked(f"/{self._folder.name}/", timeout=1.0)
        processes.kill_marked(self._address.token, timeout=1.0)

    def _clean_up(self) -> None:
        self._listener.close()
        for link in self.links:
            link.finish()
            self._watchers.rank_end(link.outcome)
        if self._process is not None:
            if self._job.several_hosts and self._process.ended_at is not None and not self._killed:
                processes.wait_for_marked(self._address.token, timeout=Seconds.DAEMONS)
            self._process.signal(signal.SIGKILL)
            self._process.wait()
        processes.kill_marked(f"/{self._folder.name}/")
        processes.kill_marked(self._address.token)
        shutil.rmtree(self._folder, ignore_errors=True)
        self._screen.finish()

    def say(self, text: str) -> None:
        self._screen.write_lines("err", f"keras-ddl: {text}\n".encode())
