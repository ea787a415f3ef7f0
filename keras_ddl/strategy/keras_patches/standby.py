"""Stand-ins for writing callbacks on ranks that may become rank 0, in a job that continues when a rank is lost.

A standby follows the training in its writer's place. When rank 0 is lost, the standbys of the next rank 0 bring their
writers to the state of the lost ones, whose files stay. Nobody knows whether output since the last call that all ranks
have finished was written, so it is written again: the file of CSVLogger is compared with the rows that it
should have, and points of TensorBoard may appear twice, with equal values. Models are saved while all ranks wait,
because other callbacks change models.
"""

from __future__ import annotations

import functools
import io
import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from keras_ddl.communicator.first_rank import on_first_rank
from keras_ddl.compat import callbacks as keras_callbacks
from keras_ddl.compat.keras import keras
from keras_ddl.compat.tensorflow import tf
from keras_ddl.files.durable import sweep_temporaries
from keras_ddl.strategy import writers
from keras_ddl.strategy.keras_patches import hushed_writers
from keras_ddl.strategy.keras_patches.progress import JobBar

_Call = tuple[str, tuple[Any, ...]]


class Standby(keras.callbacks.Callback):
    """Follows the training in place of `writer`, or of the hooks that a callback inherits (hushed_writers.py).

    Args:
        finished: returns how many calls this rank has finished together with all others.
    """

    never_stops_within_epoch = True

    def __init__(self, writer: Any, finished: Callable[[], int]) -> None:
        super().__init__()
        self.writer = writer
        self.runs_last = getattr(writer, "runs_last", False)
        self._finished = finished
        self._last: list[_Call] = []  # hooks since the last call that all ranks have finished
        self._last_at = 0
        self._open: dict[str, tuple[Any, ...]] = {}  # before them: the begins of what has not ended
        self._is_over = False
        self._kind: Any = None if writers.only_writes(writer) else writers.writing_class(writer)

    def become_writer(self, *, may_lack_last: bool, has_begun: bool) -> Any:
        """Returns the writer, in the state that the training has reached on this rank.

        Args:
            may_lack_last: write again the output since the last call that all ranks have finished.
            has_begun: the ranks have agreed on the state that this training starts from. Before that, the writer starts
                by itself.
        """
        if not may_lack_last or self._last_at != self._finished():
            self._settle()
        if self._is_over:
            return self.writer
        if self.params:
            self.writer.set_params(self.params)
        if has_begun and self._open:
            self._bring_up()
        else:
            self._set_model()
            self._replay(self._open.items())
        self._replay(self._last)
        return self.writer

    def begin_late(self) -> None:
        """Called when this rank joins in the middle of a training whose earlier part rank 0 has written."""

    def hear(self, hook: str, args: tuple[Any, ...]) -> None:
        """Receives a call of a hook in this rank's training."""
        if self._last_at != self._finished():
            self._settle()
            self._last_at = self._finished()
        self._last.append((hook, args))

    def _bring_up(self) -> None:
        """Brings the writer to the end of the last call that all ranks have finished."""
        self._set_model()
        self._replay(self._open.items())

    def _set_model(self) -> None:
        (self._kind or type(self.writer)).set_model(self.writer, self.model)

    def _follow(self, hook: str, args: tuple[Any, ...]) -> None:
        """Notes a call of a hook that the writer on rank 0 has run."""
        if hook.endswith("_begin"):
            self._open[hook] = args
            return
        if self._open.pop(hook.removesuffix("_end") + "_begin", None) is not None:  # a hushed one hears few begins
            self._is_over = not self._open

    def _settle(self) -> None:
        for hook, args in self._last:
            self._follow(hook, args)
        self._last = []

    def _replay(self, calls: Iterable[_Call]) -> None:
        for hook, args in list(calls):
            if self._kind is None:
                getattr(self.writer, hook)(*args)
            else:  # the program's part of it has run
                with hushed_writers.writing(self.writer):
                    getattr(self._kind, hook)(self.writer, *args)


def _hearing(hook: str) -> Callable[..., None]:
    def method(self: Standby, *args: Any, **kwargs: Any) -> None:  # Keras passes the logs of batches by name
        self.hear(hook, hushed_writers.arguments_of(hook, args, kwargs))

    return method


for _hook in writers.HOOKS:
    setattr(Standby, _hook, _hearing(_hook))


class _Backup(Standby):
    """The standby of BackupAndRestore, which restores only when training begins. Its saves are `Saves` on all ranks."""

    def hear(self, hook: str, args: tuple[Any, ...]) -> None:
        if hook in ("on_epoch_end", "on_train_batch_end"):
            self._replay([(hook, args)])
        elif hook in ("on_train_begin", "on_train_end"):
            super().hear(hook, args)

    def set_model(self, model: Any) -> None:
        super().set_model(model)
        self.writer.set_model(model)

    def _bring_up(self) -> None:
        pass


class _OwnBackup(Standby):
    """The standby of a program's subclass of BackupAndRestore, of which only the hooks are known."""

    def _bring_up(self) -> None:
        self._set_model()


class _TensorBoard(Standby):
    """The standby of TensorBoard, which counts batches and has already written a description of the model."""

    def _follow(self, hook: str, args: tuple[Any, ...]) -> None:
        super()._follow(hook, args)
        keras_callbacks.follow_tensorboard(self.writer, hook)

    def _bring_up(self) -> None:
        writer = self.writer
        writes_graph, writer.write_graph = writer.write_graph, False
        self._set_model()
        writer.write_graph = writes_graph
        batches = [hook for hook in ("on_train_batch_begin", "on_test_batch_begin") if hook in self._open]
        with keras_callbacks.keeping_batches_seen(writer):
            self._replay((hook, args) for hook, args in self._open.items() if hook not in batches)
        for hook in batches:  # in the middle of one, which it is to count once
            keras_callbacks.follow_tensorboard(writer, hook, by=-1)
            self._replay([(hook, self._open[hook])])


class _Rows(Standby):
    """The standby of CSVLogger: keeps rows in memory, and later makes the file equal to them."""

    def __init__(self, writer: Any, finished: Callable[[], int]) -> None:
        super().__init__(writer, finished)
        self._text: io.StringIO | None = None  # None: training has not begun
        self._begin = 0  # bytes of the file then, where it is appended to

    def hear(self, hook: str, args: tuple[Any, ...]) -> None:
        if hook == "on_train_begin":
            self._text = io.StringIO()
            self._begin = keras_callbacks.begin_rows(self.writer, self._text)
        elif hook == "on_epoch_end":
            self._replay([(hook, args)])
        elif hook == "on_train_end":
            self._is_over = True

    def begin_late(self) -> None:
        self._text = io.StringIO()
        self._begin = keras_callbacks.begin_late_rows(self.writer, self._text)

    def become_writer(self, *, may_lack_last: bool, has_begun: bool) -> Any:
        self._set_model()
        if self._text is not None:
            _make_equal(self.writer.filename, self._begin, self._text.getvalue().encode())
            keras_callbacks.continue_rows(self.writer)
            if self._is_over:
                self._replay([("on_train_end", (None,))])
        return self.writer


def _make_equal(path: str, begin: int, text: bytes) -> None:
    """Makes a file have `text` from byte `begin` to its end, and rewrites only what differs."""
    written = b""
    if tf.io.gfile.exists(path):
        with tf.io.gfile.GFile(path, "rb") as file:
            written = file.read()
    if "://" in path:  # some of these file systems write complete files only
        if written[begin:] != text:
            with tf.io.gfile.GFile(path, "wb") as file:
                file.write(written[:begin] + text)
        return
    equal = len(os.path.commonprefix([written[begin:], text]))
    with Path(path).open("r+b" if written else "wb") as file:
        file.truncate(begin + equal)
        file.seek(begin + equal)
        file.write(text[equal:])


class _Bar(Standby):
    """The standby of the progress bar, which is drawn on every rank but hidden here."""

    def set_params(self, params: Any) -> None:
        super().set_params(params)
        self.writer.set_params({**params, "verbose": 0})

    def set_model(self, model: Any) -> None:
        super().set_model(model)
        self.writer.set_model(model)

    def hear(self, hook: str, args: tuple[Any, ...]) -> None:
        super().hear(hook, args)
        self._replay([(hook, args)])

    def become_writer(self, *, may_lack_last: bool, has_begun: bool) -> Any:
        if not may_lack_last or self._last_at != self._finished():
            self._settle()
        self.writer.show(self.params)
        self._replay(self._last)
        return self.writer


def standby_of(writer: Any, finished: Callable[[], int]) -> Standby:
    """Returns the stand-in for a writing callback."""
    if type(writer) in _KINDS and not (set(writers.HOOKS) & set(vars(writer))):
        return _KINDS[type(writer)](writer, finished)
    kind = next((standby for kind, standby in _KINDS_OF_OTHERS.items() if isinstance(writer, kind)), Standby)
    return kind(writer, finished)


class _Forever(Standby):
    """The stand-in in a job in which rank 0 cannot be lost, so no rank takes its place."""

    def __init__(self, writer: Any) -> None:
        super().__init__(writer, lambda: 0)

    def hear(self, hook: str, args: tuple[Any, ...]) -> None:
        if isinstance(self.writer, keras.callbacks.TensorBoard):
            keras_callbacks.follow_tensorboard(self.writer, hook)


def hush(writer: Any, kind: type, finished: Callable[[], int] | None) -> None:
    """Makes a callback whose class a program derives from `kind` run only the program's code.

    finished: as in `standby_of`; None: rank 0 cannot be lost.
    """
    if issubclass(kind, keras.callbacks.CSVLogger):
        follower: Standby = _Rows(writer, finished or (lambda: 0))
    elif finished is None:
        follower = _Forever(writer)
    else:
        follower = standby_of(writer, finished)
    hushed_writers.hush(writer, kind, follower)


def standing_in(callback: Any) -> Standby | None:
    """Returns the stand-in for a callback, or for its inherited hooks, on this rank, or None."""
    standby = callback if isinstance(callback, Standby) else hushed_writers.follower_of(callback)
    return standby if isinstance(standby, Standby) else None


def writers_of(callbacks: Iterable[Any]) -> list[Any]:
    """Returns callbacks as the program made them, the same on all ranks: the writer in place of its standby."""
    return [each.writer if isinstance(each, Standby) else each for each in callbacks]


def become_writer(standby: Standby, callback: Any, **options: bool) -> Any:
    """Returns the object that writes from now on in place of `callback`. options: as in `Standby.become_writer`."""
    if callback is not standby:
        hushed_writers.let_write(callback)
        standby.set_model(callback.model)
    return standby.become_writer(**options)


# Of Keras's own classes, and of programs' subclasses of them.
_KINDS: dict[type, type[Standby]] = {
    keras.callbacks.BackupAndRestore: _Backup,
    keras.callbacks.CSVLogger: _Rows,
    JobBar: _Bar,
}
_KINDS_OF_OTHERS: dict[type, type[Standby]] = {
    keras.callbacks.BackupAndRestore: _OwnBackup,
    keras.callbacks.CSVLogger: _Rows,
    keras.callbacks.TensorBoard: _TensorBoard,
}


class Saves:
    """The saves of a ModelCheckpoint or a BackupAndRestore: all ranks take part in each save, and rank 0 makes it."""

    def __init__(self, callback: Any) -> None:
        self._callback = callback

    @classmethod
    def of(cls, callback: Any) -> Saves | None:
        """Returns the Saves of a callback or of its stand-in, or None."""
        callback = callback.writer if isinstance(callback, Standby) else callback
        is_saver = isinstance(callback, keras.callbacks.ModelCheckpoint)
        return cls(callback) if is_saver or type(callback) is keras.callbacks.BackupAndRestore else None

    def share(self) -> None:
        """Makes the callback save by `save`, on all ranks."""
        keras_callbacks.replace_save(self._callback, self.save)

    def leave_to_rank_0(self, is_other: bool) -> None:
        """Lets the callback save by itself, if rank 0 cannot be lost or is the only rank. is_other: this is another
        rank."""
        decides = is_other and isinstance(self._callback, keras.callbacks.ModelCheckpoint)
        keras_callbacks.replace_save(
            self._callback, functools.partial(decide_only, self._callback) if decides else None
        )

    def save(self, *args: Any, **kwargs: Any) -> None:
        """Replaces the callback's own save. COLLECTIVE."""
        made = []

        def save() -> None:
            made.append(True)
            keras_callbacks.original_save(self._callback, *args, **kwargs)

        on_first_rank(save, "keras_ddl/save")
        if not made and isinstance(self._callback, keras.callbacks.ModelCheckpoint):
            decide_only(self._callback, *args, **kwargs)

    def become_first(self) -> None:
        """Called when this rank becomes rank 0: removes what the lost rank 0 has not completed."""
        path = keras_callbacks.path_of_saves(self._callback)
        sweep_temporaries(path.parent)
        sweep_temporaries(path)


def decide_only(checkpoint: keras.callbacks.ModelCheckpoint, epoch: int, batch: int | None, logs: Any) -> None:
    """Replaces saving on ranks other than 0: the best value is tracked on all ranks, but only rank 0 writes the
    file."""
    verbose, checkpoint.verbose = checkpoint.verbose, 0
    try:
        keras_callbacks.note_best(checkpoint, epoch, batch, logs)
    finally:
        checkpoint.verbose = verbose
