"""The kinds of frames that the processes of a job send each other, and their size limits.

    program  <-- UNIX socket -->  its wrapper  <-- UNIX socket or TCP -->  launcher

Most frames pass between the program and the launcher; the wrapper forwards them unchanged.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping

NONCE_BYTES = 32
RANK_BYTES = 4  # size of the rank at the beginning of a program's RECORD


class Kind(enum.IntEnum):
    """The contents of a frame. The sender is L: the launcher, R: the rank's wrapper, P: the rank's program."""

    # The handshake (handshake.py). A wrapper calls the launcher, and a rank calls a rank on another host.
    NONCE = 1  # The listener sends bytes.
    # The caller sends a proof, then JSON with a nonce. A wrapper adds rank, size, host and pid, and with several hosts
    # the facts of host_facts.py.
    HELLO = 2
    # The listener sends a proof, then JSON. The launcher's JSON has the environment, working directory and terminals.
    # A wrapper sends its program no proof, see program.py.
    WELCOME = 3
    # Between the launcher and the wrapper.
    START = 4  # L empty: start the program
    STARTED = 5  # R JSON: pid of the program
    OUT = 6  # R bytes of the program's stdout
    ERR = 7  # R bytes of the program's stderr
    STDIN = 8  # L bytes for the program's stdin; an empty frame closes it
    STDIN_CONSUMED = 9  # R JSON: number of bytes the program has taken
    TERMINAL_SIZE = 10  # L JSON: rows, columns
    STOP = 11  # L JSON: signal, grace_seconds
    SIGNAL = 12  # L JSON: signal, only for the program
    EXIT = 13  # R JSON: status, stopped_by
    BYE = 14  # L JSON: last (no other attempt follows), job_continues (without this rank): the wrapper may leave
    # Between the launcher and the program; the wrapper forwards them.
    CALL = 15  # P empty: asks for the call of `keras_ddl.run`; L its bytes; an empty frame ends them
    RESULT = 16  # P bytes of the call's result
    REPORT = 17  # P JSON: the uncaught exception that ends the program (error_report.py)
    IN_JOB = 18  # P JSON: in_job: whether the program is between init and shutdown, so that its end is a loss
    CHECKPOINT = 19  # P JSON: path, step, resume, is_new: the last complete checkpoint
    FIGURES = 20  # P JSON: training figures (strategy/figures.py), if the job has a watcher
    HOSTS_CHANGED = 21  # L empty: the job would be started on other hosts now (host_watch.py)
    QUESTION = 22  # P JSON: about the other ranks (membership.py, board.py)
    ANSWER = 23  # L JSON: to a QUESTION; for a membership: epoch, members, ended, and with several hosts doors, secret
    BOARD = 24  # L JSON: has_question, admit_at: what the program should do between two steps (board.py)
    SHOWN = 25  # R JSON: admit_at; the program sees it from now on
    WAITS = 26  # P JSON: ranks that the program waits for
    ENDED = 27  # L JSON: ranks among them whose programs have ended
    RECORD = 28  # P number of a newcomer, and bytes for it; L these bytes, to the newcomer
    # Between the launcher and remote_ranks.py, which starts the ranks of several hosts.
    START_ON_HOST = 29  # L JSON: host, first, local_ranks, local_size: more processes to start
    NOT_STARTED = 30  # JSON: host, why: its processes could not be started
    READY = 31  # from host_ranks.py to remote_ranks.py, empty: from now on, the ranks belong to the launcher


# Size limits keep a peer from making the other side allocate memory.
# Frames accepted before the peer's proof:
FROM_UNPROVEN_CALLER: Mapping[int, int] = {Kind.HELLO: 1 << 12}
FROM_UNPROVEN_LISTENER: Mapping[int, int] = {Kind.NONCE: NONCE_BYTES, Kind.WELCOME: 1 << 22}
# Frames that a wrapper accepts from its program:
FROM_PROGRAM: Mapping[int, int] = {
    Kind.CALL: 0,
    Kind.RESULT: 1 << 20,
    Kind.REPORT: 1 << 24,
    Kind.IN_JOB: 1 << 8,
    Kind.CHECKPOINT: 1 << 14,
    Kind.FIGURES: 1 << 16,
    Kind.QUESTION: 1 << 16,
    Kind.WAITS: 1 << 24,
    Kind.RECORD: 1 << 30,
}
JSON_FROM_PROGRAM = (Kind.REPORT, Kind.IN_JOB, Kind.CHECKPOINT, Kind.FIGURES, Kind.QUESTION, Kind.WAITS)
