"""The launcher's decisions when ranks end, ask or are silent. The ranks are simulated, without processes."""

from __future__ import annotations

import re
import signal
from pathlib import Path
from typing import Any

import pytest

from keras_ddl.config import Seconds
from keras_ddl.launch.hosts.placement import Discovery, Placement
from keras_ddl.link.kinds import Kind
from keras_ddl.link.program import RESTART_STATUS
from launch.launching import write_script
from launch.played import Event, Stage, asks, dies, exits, fails, gets, misses, says, stubborn, until, vanishes

KILLED = -signal.SIGKILL
TRACEBACK = "Traceback (most recent call last):\n  File x\nValueError: bad\n"


@pytest.fixture
def stage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Stage:
    return Stage(tmp_path, monkeypatch)


def test_job_succeeds_if_its_ranks_end_with_status_0(stage: Stage) -> None:
    events = [says(1, "hello\n", Kind.OUT), says(0, TRACEBACK), exits(1, 0), exits(0, 0)]
    played = stage.play(events, verbose=True)
    assert (played.status, played.out) == (0, "[1] hello\n")
    command, *logged = played.err.splitlines(keepends=True)
    assert command.endswith(" -m keras_ddl.launch.starters.host_ranks -np 2 -- program\n")
    assert "".join(logged) == TRACEBACK
    assert [each["event"] for each in played.events] == ["start", "rank_start", "rank_start", "rank_end", "rank_end"]
    assert played.orders(0, Kind.BYE) == [{"last": True, "job_continues": False}]


BY_STARTER = [exits(rank, -15, stopped_by="mpirun") for rank in (0, 1)]
ENDS: dict[str, tuple[list[Event], int, str]] = {
    "a status": ([exits(1, 3)], 3, r"rank 1 on host h failed first, .*: ended with exit status 3"),
    "a signal": ([exits(1, KILLED)], 137, r"rank 1 on host h failed first, .*: killed by SIGKILL"),
    "a wrapper that is gone": ([vanishes(1)], 1, r"rank 1 on host h failed first, .*: sent no report of its end"),
    "a traceback on stderr": (
        [says(1, TRACEBACK), exits(1, 1)],
        1,
        r"rank 1 .*\(exit status 1\):\nTr.*\n.*\n.*bad\n\Z",
    ),
    "the last words": ([says(1, "no licence left\n"), exits(1, 3)], 3, r"of its stderr:\nno licence left\n\Z"),
    "the cause after its consequence": (
        [misses(0, 1), fails(1, "ValueError: x", 7)],
        7,
        r"\Akeras-ddl: rank 1 (?s:.*)\nValueError: x\n\Z",
    ),
    "a death after its consequence": ([misses(0, 1), exits(1, KILLED)], 137, r"rank 1 on host h .* by SIGKILL"),
    "one that leaves and stays": ([misses(0, 1)], 1, r"rank 1 on host h failed first, .*: left while others waited"),
    "what has started them": (
        [dies(KILLED), *BY_STARTER],
        137,
        r"host_ranks ended \(killed by SIGKILL\) before the ranks had fin",
    ),
}


@pytest.mark.parametrize("what", ENDS)
def test_job_ends_with_the_first_failures_status_and_message(what: str, stage: Stage) -> None:
    events, status, words = ENDS[what]
    played = stage.play(events)
    assert played.status == status and re.search(words, played.err), played
    assert "RankLostError" not in played.err, "this error is only a consequence"
    for order in played.orders(0, Kind.STOP):
        assert order == {"signal": signal.SIGTERM, "grace_seconds": 0.05}


# ---- signals and times -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("signum", "grace", "seconds"),
    [(signal.SIGINT, None, 7.0), (signal.SIGTERM, None, 0.05), (signal.SIGHUP, None, 0.05), (signal.SIGTERM, 30, 30)],
)
def test_signal_to_the_launcher_ends_the_ranks(
    signum: signal.Signals, grace: float | None, seconds: float, stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Seconds, "INTERRUPT_GRACE", 7.0)
    played = stage.play([gets(signum)], grace=grace)
    assert played.status == 128 + signum and f"{signum.name}: stopping the ranks" in played.err
    passed_on = signal.SIGINT if signum == signal.SIGINT else signal.SIGTERM
    assert [played.orders(rank, Kind.STOP) for rank in (0, 1)] == [
        [{"signal": passed_on, "grace_seconds": seconds}]
    ] * 2
    assert [each["signal"] for each in played.of("signal")] == [signum.name]


def test_ranks_that_outlive_their_grace_are_abandoned(stage: Stage) -> None:
    played = stage.play([stubborn(0, 1), gets(signal.SIGTERM)])
    assert played.status == 143


def test_sigusr1_is_forwarded_and_ranks_ending_with_75_are_restarted(stage: Stage) -> None:
    saved = [gets(signal.SIGUSR1), until(0, Kind.SIGNAL), exits(0, RESTART_STATUS), exits(1, RESTART_STATUS)]
    played = stage.play(saved, [exits(0, 0), exits(1, 0)], loop={"limit": 1})
    assert played.status == 0
    assert "restart 1 of 1, with 2 ranks (the ranks ended with status 75)" in played.err
    again = stage.play([gets(signal.SIGTERM), *saved[2:]], grace=30.0)
    assert again.status == RESTART_STATUS and "the ranks ended with status 75 and ask to be started again" in again.err


def test_job_that_exceeds_its_timeout_is_ended(stage: Stage) -> None:
    played = stage.play([], timeout=0.2)
    assert played.status == 124 and "the job did not end within 0.2 s and is being stopped" in played.err


# ---- survivors -------------------------------------------------------------------------------------------------------


def after_loss(*ranks: int, epoch: int = 0) -> list[Event]:
    """Makes these ranks ask for the next membership."""
    return [asks(rank, epoch=epoch) for rank in ranks]


def continues(stage: Stage, *events: Event, ranks: int = 3, least: int = 2, **job: Any):
    return stage.play(events, ranks=ranks, min_ranks=least, **job)


BOTH_CONTINUE = [until(2, Kind.ANSWER), exits(0, 0), exits(2, 0)]  # ranks 0 and 2


@pytest.mark.parametrize("lost", [0, 1, 2])
def test_survivors_continue_without_a_killed_rank(lost: int, stage: Stage) -> None:
    left = [rank for rank in range(3) if rank != lost]
    print_all = [says(rank, "mine\n", Kind.OUT) for rank in left]
    played = continues(
        stage, exits(lost, KILLED), *after_loss(*left), until(left[1], Kind.ANSWER), *print_all, exits(left[0], 0),
        exits(left[1], 0),
    )  # fmt: skip
    assert (played.status, played.err) == (
        0,
        f"keras-ddl: rank {lost} was lost (killed by SIGKILL); 2 ranks continue.\n",
    )
    # The first of the remaining ranks is shown like rank 0, the other one with its new rank and its launch rank.
    assert played.out == f"mine\n[{'1' if left[1] == 1 else '1, was 2'}] mine\n"
    for rank in left:
        (answer,) = played.orders(rank, Kind.ANSWER)
        assert (answer["epoch"], answer["members"], answer["min_ranks"]) == (1, left, 2)
    first = played.of("rank_end")[0]
    assert (first["rank"], first["signal"], first["lost"]) == (lost, "SIGKILL", True)
    assert [(each["rank"], each["ranks"]) for each in played.of("rank_lost")] == [(lost, 2)]


def test_ranks_that_ask_are_answered_although_another_is_lost_meanwhile(stage: Stage) -> None:
    first = [exits(0, KILLED), *after_loss(1, 3), exits(2, KILLED), until(3, Kind.ANSWER)]
    played = continues(stage, *first, exits(1, 0), exits(3, 0), ranks=4)
    assert played.status == 0 and played.orders(1, Kind.ANSWER)[0]["members"] == [1, 3]


def test_rank_that_does_not_ask_is_killed_and_the_others_continue(stage: Stage) -> None:
    env = {"KERAS_DDL_DEADLINE_SECONDS": "0.1"}
    events = [*after_loss(0, 2), until(1, Kind.SIGNAL), exits(1, KILLED), *BOTH_CONTINUE]
    played = continues(stage, *events, env=env)
    assert played.status == 0 and played.orders(1, Kind.SIGNAL) == [{"signal": signal.SIGKILL}]
    assert "keras-ddl: rank 1 has not answered the other ranks for 0.1 s and is killed." in played.err


def test_rank_that_cannot_be_killed_is_abandoned(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Seconds, "KILLING", 0.1)
    played = continues(stage, *after_loss(0, 2), *BOTH_CONTINUE, env={"KERAS_DDL_DEADLINE_SECONDS": "0.1"})
    assert played.status == 0 and "rank 1 was lost (sent no report of its end); 2 ranks continue." in played.err


def test_job_ends_if_too_few_ranks_remain(stage: Stage) -> None:
    played = continues(stage, exits(1, KILLED), *after_loss(0, 2), least=3)
    assert played.status == 137 and "rank 1 on host h failed first" in played.err
    gone = continues(stage, exits(1, 0, in_job=True), *after_loss(0), ranks=2)
    assert gone.status == 1 and re.search("rank 1 on host h failed first, .* ended with status 0 in the mid", gone.err)


def test_rank_that_ends_with_status_0_in_the_middle_is_reported_as_lost(stage: Stage) -> None:
    played = continues(stage, exits(1, 0, in_job=True), *after_loss(0, 2), *BOTH_CONTINUE)
    middle = "ended with status 0 in the middle of the job (sys.exit or os._exit?)"
    assert played.status == 0 and f"keras-ddl: rank 1 was lost ({middle}); 2 ranks continue.\n" in played.err
    assert played.err.endswith(f"keras-ddl: the other ranks have continued without rank 1: {middle}.\n")
    at_end = continues(stage, exits(0, 0, in_job=True), exits(1, 0, in_job=True), ranks=2, least=1)
    assert (at_end.status, at_end.err) == (0, ""), "no rank missed them"


def test_program_error_ends_the_job(stage: Stage) -> None:
    played = continues(stage, fails(1, "ValueError: my own"), *after_loss(0, 2), least=1)
    assert played.status == 1 and played.err.endswith("ValueError: my own\n")
    assert played.orders(0, Kind.ANSWER) == []


def test_continuing_job_does_not_count_as_failing_to_start(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    hurry = lambda _: monkeypatch.setattr(Seconds, "START", 0.0)  # noqa: E731
    assert continues(stage, hurry, exits(1, KILLED), *after_loss(0, 2), *BOTH_CONTINUE).status == 0


def test_no_spare_starts_for_the_last_rank(stage: Stage) -> None:
    played = continues(stage, exits(0, 0), exits(1, 0), exits(2, KILLED), least=1, spares=1)
    assert played.status == 137 and "a spare" not in played.err and "killed by SIGKILL" in played.err


def test_spare_replaces_a_lost_rank(stage: Stage) -> None:
    events = [asks(2, start=True), exits(1, KILLED), until(2, Kind.ANSWER)]
    events += [asks(2, join=True), asks(0, epoch=0, admits=[2]), until(0, Kind.ANSWER), exits(0, 0), exits(2, 0)]
    played = continues(stage, *events, ranks=2, least=1, spares=1)
    assert played.status == 0, played
    assert "spare rank 2 takes the place of rank 1." in played.err
    assert "rank 2 has joined; 2 ranks continue." in played.err and played.orders(0, Kind.ANSWER)[0]["members"] == [
        0,
        2,
    ]


# ---- restarts --------------------------------------------------------------------------------------------------------


DIES = [exits(1, KILLED)]
ENDS_WELL = [exits(0, 0), exits(1, 0)]


def test_restarts_continue_until_an_attempt_succeeds(stage: Stage, tmp_path: Path) -> None:
    say = [[says(0, f"attempt {number}\n", Kind.OUT)] for number in range(3)]
    attempts = [[*say[0], *DIES], [*say[1], *DIES], [*say[2], *ENDS_WELL]]
    played = stage.play(*attempts, loop={"limit": 2}, output_dir=tmp_path / "out")
    assert played.status == 0 and played.out == "attempt 0\nattempt 1\nattempt 2\n"
    for number in (1, 2):
        assert f"keras-ddl: restart {number} of 2, with 2 ranks (rank 1: killed by SIGKILL)\n" in played.err
    assert played.err.count("rank 1 on host") == 2
    for number, folder in enumerate(("out", "out/restart-1", "out/restart-2")):
        assert (tmp_path / folder / "rank-0.log").read_text() == f"attempt {number}\n"
    assert [each["restart"] for each in played.of("start")] == [0, 1, 2]
    restarts = [(each["restart"], each["reason"]) for each in played.of("restart")]
    assert restarts == [(1, "rank 1: killed by SIGKILL"), (2, "rank 1: killed by SIGKILL")]
    welcomes = [play.ranks[1].received(Kind.WELCOME)[0] for play in played.plays]
    assert [each["environment"]["KERAS_DDL_RESTART"] for each in welcomes] == ["0", "1", "2"]
    assert len({each["kept"] for each in welcomes}) == 1 and len({each["job"] for each in welcomes}) == 3
    assert [play.ranks[0].received(Kind.BYE)[0]["last"] for play in played.plays] == [False, False, True]


@pytest.mark.parametrize(
    ("event", "attempts", "said"),
    [
        (exits(0, 2), 1, "exit status 2 means that the command cannot work"),
        (fails(0, "ValueError: as before"), 2, "rank 0 has failed in the same way twice"),
        (exits(0, KILLED), 6, "not started again: this was restart 5 of 5"),
        (exits(0, -signal.SIGABRT), 2, "in the same way twice"),
    ],
)
def test_no_restart_after_failures_that_it_cannot_fix(event: Event, attempts: int, said: str, stage: Stage) -> None:
    played = stage.play(*([event] for _ in range(attempts)), loop={"limit": 5})
    assert played.status != 0 and said in played.err


def test_restarts_share_one_timeout(stage: Stage) -> None:
    played = stage.play([exits(0, 3)], [], loop={"limit": 5}, timeout=1.0)
    assert played.status == 124 and "restart 1 of 5" in played.err and "did not end within 1 s" in played.err


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT])
def test_restarts_end_with_a_signal_while_the_launcher_waits_for_hosts(
    signum: signal.Signals, stage: Stage, tmp_path: Path
) -> None:
    # After the first attempt, the script prints no hosts and then sends the signal.
    text = f"cd {tmp_path}; [ -e asked ] && kill -{signum.value} $PPID; [ -e first ] && touch asked || echo localhost:1"
    discovery = Discovery(write_script(tmp_path / "hosts", f"{text}; touch first"))
    placement = Placement(1, (), discovery)
    played = stage.play([exits(0, 3)], ranks=1, loop={"limit": 5, "placement": placement})
    assert played.status == 128 + signum and "restart 1" not in played.err
    assert "waiting for hosts with room for 1 rank(s): the available hosts are none." in played.err


def test_restarts_take_hosts_and_number_of_ranks_from_a_script(stage: Stage, tmp_path: Path) -> None:
    text = f"cd {tmp_path}; [ -e first ] && echo localhost:1 || echo localhost:3; touch first"
    discovery = Discovery(write_script(tmp_path / "hosts", text))
    placement = Placement(2, (), discovery, min_ranks=1)
    played = stage.play(DIES, [exits(0, 0)], loop={"limit": 3, "placement": placement})
    assert played.status == 0 and "restart 1 of 3, with 1 rank on localhost:1" in played.err
    assert [len(play.ranks) for play in played.plays] == [2, 1]
