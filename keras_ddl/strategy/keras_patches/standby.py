"""Silences callbacks that write, on ranks other than 0, and lets a rank that becomes rank 0 continue their output.

A callback stays in the list of callbacks, but the hooks that it inherits from the class that writes go to a stand-in
(compat/replacing.py). Code of a program's subclass runs on every rank: it may add to the logs, change a rate,
or stop.

In a job that continues without a lost rank, the stand-ins of the next rank 0 bring their writers to the state of the
lost writers, and continue their files. Output since the last call that all ranks have finished may be missing, so it is
written again: CSVLogger's file is made equal to the rows that it should have, and TensorBoard's points may appear
twice, with equal values. Models are saved while all ranks wait (model_saves.py), because other callbacks change models.
"""

from __future__ import annotations

import io
import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from keras_ddl.compat import callbacks as keras_callbacks
from keras_ddl.compat import replacing
from keras_ddl.compat.keras import keras
from keras_ddl.compat.tensorflow import tf
from keras_ddl.strategy.keras_patches.progress import JobBar
from keras_ddl.strategy.saving import writers

_Call = tuple[str, tuple[Any, ...]]


class StandIn:
    """Receives the hooks that `writer` inherits from `kind`, the class that writes. This base class does nothing: it is
    for a job that cannot lose rank 0.

    is_exact_class: the writer's class is a known one, not a program's subclass, so all its hooks are taken.
    """

    def __init__(self, writer: Any, kind: Any, *, is_exact_class: bool) -> None:
        self.writer, self._kind, self._before = writer, kind, type(writer)
        base: Any = keras.callbacks.Callback
        methods: dict[str, Any] = {
            hook: _hearing(self, hook)
            for hook in writers.HOOKS
            if is_exact_class or getattr(kind, hook) is not getattr(base, hook)
        }
        if kind is keras.callbacks.TensorBoard:
            methods |= keras_callbacks.SILENT_TENSORBOARD
        elif kind.set_model is not base.set_model:  # set_model may write a description of the model
            methods["set_model"] = base.set_model
        replacing.replace_on(writer, methods, inherited_from=None if is_exact_class else kind)

    def hear(self, hook: str, args: tuple[Any, ...]) -> None:
        """Receives a call of a hook in this rank's training."""
        if self._kind is keras.callbacks.TensorBoard:
            keras_callbacks.follow_tensorboard(self.writer, hook)

    def begin_late(self) -> None:
        """Called when this rank joins a running job. Rank 0 has written the earlier part."""

    def become_writer(self, params: Any, *, may_lack_last: bool, has_begun: bool) -> None:
        """Lets the writer write from now on.

        Args:
            params: the parameters of the list of callbacks, as passed to `set_params`; may be empty.
            may_lack_last: write again the output since the last call that all ranks have finished.
            has_begun: whether ranks have agreed on the state that training starts from; else the writer starts itself.
        """
        replacing.restore(self.writer, self._before)

    def _replay(self, calls: Iterable[_Call]) -> None:
        for hook, args in list(calls):  # the program's own code has already run
            getattr(self._kind, hook)(self.writer, *args)


def _hearing(stand_in: StandIn, hook: str) -> Callable[..., None]:
    names = ("epoch", "logs") if "epoch" in hook else ("batch", "logs") if "batch" in hook else ("logs",)

    def method(writer: Any, *args: Any, **kwargs: Any) -> None:  # Keras passes the logs of batches by name
        stand_in.hear(hook, tuple(args[n] if n < len(args) else kwargs.get(name) for n, name in enumerate(names)))

    return method


class Standby(StandIn):
    """Follows training instead of `writer`.

    finished: returns how many calls this rank has finished together with all others.
    """

    def __init__(self, writer: Any, kind: Any, finished: Callable[[], int], *, is_exact_class: bool) -> None:
        super().__init__(writer, kind, is_exact_class=is_exact_class)
        self._finished = finished
        self._last: list[_Call] = []  # hooks since the last call that all ranks have finished
        self._last_at = 0
        self._open: dict[str, tuple[Any, ...]] = {}  # earlier "begin" hooks whose "end" is still to come
        self._is_over = False

    def hear(self, hook: str, args: tuple[Any, ...]) -> None:
        if self._last_at != self._finished():
            self._settle()
            self._last_at = self._finished()
        self._last.append((hook, args))

    def become_writer(self, params: Any, *, may_lack_last: bool, has_begun: bool) -> None:
        super().become_writer(params, may_lack_last=may_lack_last, has_begun=has_begun)
        if not may_lack_last or self._last_at != self._finished():
            self._settle()
        self._continue(params, has_begun)

    def _continue(self, params: Any, has_begun: bool) -> None:
        if self._is_over:
            return
        if params:
            self.writer.set_params(params)
        if has_begun and self._open:
            self._bring_up()
        else:
            self._set_model()
            self._replay(self._open.items())
        self._replay(self._last)

    def _bring_up(self) -> None:
        """Brings the writer to the end of the last call that all ranks have finished."""
        self._set_model()
        self._replay(self._open.items())

    def _set_model(self) -> None:
        self._kind.set_model(self.writer, self.writer.model)

    def _follow(self, hook: str, args: tuple[Any, ...]) -> None:
        """Records a hook that the writer on rank 0 has run."""
        if hook.endswith("_begin"):
            self._open[hook] = args
            return
        # For a subclass, the stand-in receives few "begin" hooks.
        if self._open.pop(hook.removesuffix("_end") + "_begin", None) is not None:
            self._is_over = not self._open

    def _settle(self) -> None:
        for hook, args in self._last:
            self._follow(hook, args)
        self._last = []


class _Backup(Standby):
    """The stand-in of BackupAndRestore, which restores only when training begins. All ranks take part in its saves."""

    def hear(self, hook: str, args: tuple[Any, ...]) -> None:
        if hook in ("on_epoch_end", "on_train_batch_end"):
            self._replay([(hook, args)])
        elif hook in ("on_train_begin", "on_train_end"):
            super().hear(hook, args)

    def _bring_up(self) -> None:
        pass


class _SubclassedBackup(Standby):
    """The stand-in of a program's subclass of BackupAndRestore. Only its hooks are known."""

    def _bring_up(self) -> None:
        self._set_model()


class _TensorBoard(Standby):
    """The stand-in of TensorBoard, which counts batches and has already written a description of the model."""

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
        for hook in batches:  # within a batch, which must count once
            keras_callbacks.follow_tensorboard(writer, hook, by=-1)
            self._replay([(hook, self._open[hook])])


class _Rows(Standby):
    """The stand-in of CSVLogger: keeps the rows in memory, and later makes the file equal to them."""

    def __init__(self, writer: Any, kind: Any, finished: Callable[[], int], *, is_exact_class: bool) -> None:
        super().__init__(writer, kind, finished, is_exact_class=is_exact_class)
        self._text: io.StringIO | None = None  # None before training begins
        self._begin = 0  # size of the file at that time, if appending

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

    def _continue(self, params: Any, has_begun: bool) -> None:
        self._set_model()
        if self._text is not None:
            _make_equal(self.writer.filename, self._begin, self._text.getvalue().encode())
            keras_callbacks.continue_rows(self.writer)
            if self._is_over:
                self._replay([("on_train_end", (None,))])


def _make_equal(path: str, begin: int, text: bytes) -> None:
    """Makes `text` the content of a file from byte `begin` on, and rewrites only the part that differs."""
    written = b""
    if tf.io.gfile.exists(path):
        with tf.io.gfile.GFile(path, "rb") as file:
            written = file.read()
    if "://" in path:  # some remote file systems write complete files only
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
    """The stand-in of the progress bar, which runs on every rank but is hidden here."""

    def hear(self, hook: str, args: tuple[Any, ...]) -> None:
        super().hear(hook, args)
        self._replay([(hook, args)])

    def _continue(self, params: Any, has_begun: bool) -> None:
        self.writer.show(params)
        self._replay(self._last)


# The stand-ins of Keras's own classes; programs' subclasses follow.
_STANDBYS: dict[type, type[Standby]] = {
    keras.callbacks.BackupAndRestore: _Backup,
    keras.callbacks.CSVLogger: _Rows,
    JobBar: _Bar,
}
_STANDBYS_OF_SUBCLASSES: dict[type, type[Standby]] = {
    keras.callbacks.BackupAndRestore: _SubclassedBackup,
    keras.callbacks.CSVLogger: _Rows,
    keras.callbacks.TensorBoard: _TensorBoard,
}


def silence(callback: Any, finished: Callable[[], int] | None) -> StandIn | None:
    """Silences a callback that writes, until `replacing.restore`, and returns its stand-in. None: it does not write.

    finished: as in Standby; None: rank 0 cannot be lost.
    """
    kind, is_bar = writers.writing_class(callback), isinstance(callback, JobBar)
    if kind is None or (kind is keras.callbacks.ProgbarLogger and not is_bar):  # a bar with verbose=0 draws nothing
        return None
    is_exact_class = writers.only_writes(callback) or is_bar
    if finished is None and (is_exact_class or not issubclass(kind, keras.callbacks.CSVLogger)):
        return StandIn(callback, kind, is_exact_class=is_exact_class)
    standby = _STANDBYS.get(replacing.class_of(callback)) if is_exact_class else None
    if standby is None:
        standby = next((each for of, each in _STANDBYS_OF_SUBCLASSES.items() if issubclass(kind, of)), Standby)
    return standby(callback, kind, finished or (lambda: 0), is_exact_class=is_exact_class)
