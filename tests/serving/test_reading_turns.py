"""Turns in which messages come in over gRPC, and what a server takes that gets many large ones at once."""

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor

import grpc
import pytest
from serving.serving import resident_bytes, serving

from keras_ddl.serving.grpc_interface import GrpcInterface
from keras_ddl.serving.limits import MEGABYTE, Memory
from keras_ddl.serving.metrics import Metrics
from keras_ddl.serving.reading_turns import ReadingTurns, turns_and_memory
from keras_ddl.serving.status import Code, RequestError


def test_no_more_turns_than_there_are():
    running, most = 0, 0

    async def one(turns: ReadingTurns) -> None:
        nonlocal running, most
        async with turns.turn():
            running += 1
            most = max(most, running)
            await asyncio.sleep(0.001)
            running -= 1

    async def many() -> None:
        turns = ReadingTurns(2, 60)
        await asyncio.gather(*(one(turns) for _ in range(20)))

    asyncio.run(many())
    assert most == 2


def test_who_takes_long_loses_the_turn_only_when_others_wait():
    async def scenario() -> None:
        turns = ReadingTurns(1, 60, patient_seconds=0.1)
        async with turns.turn():
            await asyncio.sleep(0.3)  # alone: nobody minds
        began = asyncio.Event()

        async def for_ever() -> None:
            async with turns.turn():
                began.set()
                await asyncio.Event().wait()

        slow = asyncio.create_task(for_ever())
        await began.wait()
        async with turns.turn():  # gets it although the other one would never end
            pass
        with pytest.raises(RequestError, match="did not come within .* s, and others wait") as error:
            await slow
        assert error.value.code == Code.DEADLINE_EXCEEDED

    asyncio.run(asyncio.wait_for(scenario(), 60))


def test_a_turn_and_the_wait_for_it_end_in_time():
    async def scenario() -> None:
        turns = ReadingTurns(1, 0.2, patient_seconds=60)

        async def for_ever() -> None:
            async with turns.turn():
                await asyncio.Event().wait()

        found = await asyncio.gather(for_ever(), for_ever(), return_exceptions=True)
        assert ["did not come within 0.2 s." in str(each) for each in found] == [True, True]
        async with turns.turn():  # and both have given it back
            pass

    asyncio.run(asyncio.wait_for(scenario(), 60))


def test_who_gives_up_waiting_takes_no_turn_with_him():
    async def scenario() -> None:
        turns = ReadingTurns(1, 60)
        async with turns.turn():
            waiting = [asyncio.create_task(turns.turn().__aenter__()) for _ in range(3)]
            await asyncio.sleep(0)
            for each in waiting:
                each.cancel()
            await asyncio.gather(*waiting, return_exceptions=True)
        async with asyncio.timeout(30), turns.turn():
            pass

    asyncio.run(scenario())


@pytest.mark.parametrize(("memory", "message"), [(1024, 64), (1024, 1), (64, 64), (10, 64)])
def test_turns_and_what_has_come_are_within_the_memory(memory, message):
    turns, rest = turns_and_memory(memory * MEGABYTE, message * MEGABYTE, 60)
    assert memory / 2 * MEGABYTE <= rest.limit <= memory * MEGABYTE
    assert isinstance(turns, ReadingTurns)


def test_memory_is_given_back_at_once_and_when_the_answer_has_gone():
    memory = Memory(100 * MEGABYTE)
    with memory.held() as held:
        held.add(20 * MEGABYTE)
        assert not memory.has_leftovers()  # somebody holds it
    found = [memory.has_leftovers() for _ in range(30)]
    assert found[0] and sum(found) == 2


def test_a_message_that_never_came_whole_leaves_something_to_give_back():
    class Handlers:
        def __getattr__(self, name):
            return None  # none is reached

    async def scenario() -> None:
        memory = Memory(100 * MEGABYTE)
        turns = ReadingTurns(1, 60)
        interface = GrpcInterface(Handlers(), Metrics(None), memory, turns, message_bytes=64 * MEGABYTE)
        (port,) = await interface.start(["127.0.0.1:0"])
        assert not memory.has_leftovers()
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            with pytest.raises(grpc.RpcError, match="DEADLINE_EXCEEDED"):
                await channel.stream_unary("/tensorflow.serving.PredictionService/Predict")(timeout=0.5)
        found = False
        for _ in range(500):
            found = found or memory.has_leftovers()
            await asyncio.sleep(0 if found else 0.01)
        await interface.stop(0)
        assert found

    asyncio.run(scenario())


@pytest.mark.alone
def test_many_large_messages_at_once_are_bounded_in_memory(versions):
    """20 messages of 60 MB are 1.2 GB, gRPC holds one up to three times, and one comes at a time."""
    with serving(versions, "--max-memory-mb", "512") as server:
        server.wait_for(3)
        before, pid = resident_bytes(server.process.pid), server.process.pid
        most, done = [0], threading.Event()

        def watch() -> None:
            while not done.wait(0.005):
                most[0] = max(most[0], resident_bytes(pid))

        watcher = threading.Thread(target=watch)
        watcher.start()
        try:
            with ThreadPoolExecutor(20) as pool:
                codes = set(pool.map(lambda _: _send(server.grpc_port, bytes(60 * MEGABYTE)), range(20)))
        finally:
            done.set()
            watcher.join()
        assert codes <= {grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.UNAVAILABLE}
        assert grpc.StatusCode.INVALID_ARGUMENT in codes
        assert most[0] - before < 400 * MEGABYTE


def _send(port: int, data: bytes) -> grpc.StatusCode:
    options = [("grpc.use_local_subchannel_pool", 1), ("grpc.max_send_message_length", -1)]
    with grpc.insecure_channel(f"127.0.0.1:{port}", options) as channel:
        try:
            channel.unary_unary("/tensorflow.serving.PredictionService/Predict")(data, timeout=120)
        except grpc.RpcError as error:
            return error.code()
    return grpc.StatusCode.OK
