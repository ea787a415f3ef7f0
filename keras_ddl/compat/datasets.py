"""Private interfaces of tf.data: the inputs of datasets, their seeds, and what determines their order."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from keras_ddl.compat.tensorflow import ShuffleDataset, do_not_convert, tf

# Datasets whose order in a pass depends only on how often they were iterated.
_IN_A_CHAIN = (
    "FixedLengthRecordDatasetV2 TFRecordDatasetV2 TextLineDatasetV2 _AssertCardinalityDataset _BatchDataset "
    "_FilterDataset _IgnoreErrorsDataset _MapDataset _OptionsDataset _PaddedBatchDataset _ParallelBatchDataset "
    "_ParallelMapDataset _PrefetchDataset _RangeDataset _RebatchDataset _RestructuredDataset _ShardDataset "
    "_ShuffleDataset _SkipDataset _TakeDataset _TensorDataset _TensorSliceDataset _UnbatchDataset _ZipDataset"
)
_CHAIN = frozenset(_IN_A_CHAIN.split())
# Datasets that make inner iterators as they are read. They do not matter unless they contain a shuffle.
_LAZY = frozenset(("_RepeatDataset", "CacheDataset", "_ConcatenateDataset"))


class UnaryUnchangedStructureDataset(tf.data.Dataset):
    """A dataset with the structure of another one; subclasses define it. `variant`: its operation's handle."""

    def __init__(self, dataset: tf.data.Dataset, variant: tf.Tensor) -> None:
        self._input_dataset = dataset
        super().__init__(variant)

    def _inputs(self) -> list[tf.data.Dataset]:
        return [self._input_dataset]

    @property
    def element_spec(self) -> Any:
        return self._input_dataset.element_spec


def pipeline_of(dataset: Any, leave_out: Callable[[Any], bool] = lambda _: False) -> list[Any]:
    """Returns a dataset and all datasets that it reads, without `leave_out` and datasets that only these read."""
    pipeline, pending = [], [dataset]
    while pending:
        current = pending.pop()
        if not leave_out(current):
            pipeline.append(current)
            pending.extend(current._inputs() if isinstance(current, tf.data.Dataset) else ())
    return pipeline


def order_follows_from_passes(pipeline: Iterable[tf.data.Dataset]) -> bool:
    """Whether the order of a pass depends only on how many passes over the datasets were begun before it."""
    names = {type(each).__name__ for each in pipeline}
    return names <= _CHAIN or ("_ShuffleDataset" not in names and names <= _CHAIN | _LAZY)


def is_batched_at_once(dataset: Any) -> bool:
    """Whether one .batch() or the like makes all components of a dataset's elements, unless a later map changes that.

    False: the dataset is zipped from several or made by a generator, so nothing is known.
    """
    name = type(dataset).__name__
    if "Batch" in name and "Unbatch" not in name:
        return True
    inputs = dataset._inputs() if isinstance(dataset, tf.data.Dataset) else ()
    return name != "_ZipDataset" and bool(inputs) and all(map(is_batched_at_once, inputs))


def components_may_differ(dataset: tf.data.Dataset) -> bool:
    """Whether the components of a dataset's elements may have different numbers of rows.

    This is so if the dataset is zipped from several or nested, and no single .batch() made all components. Keras's own
    steps need equal numbers of rows in a plain (x, y, weights), and steps check this.
    """
    if is_batched_at_once(dataset):
        return False
    spec = dataset.element_spec
    is_plain = isinstance(spec, tuple) and len(spec) <= 3 and all(isinstance(leaf, tf.TypeSpec) for leaf in spec)
    return not is_plain or any(type(each).__name__ == "_ZipDataset" for each in pipeline_of(dataset))


def variant_tensor(dataset: tf.data.Dataset) -> tf.Tensor:
    """Returns the handle of a dataset, for a subclass of UnaryUnchangedStructureDataset that stands for it."""
    return dataset._variant_tensor


def is_nondeterministic(dataset: tf.data.Dataset) -> bool:
    """Whether a step of a dataset was given deterministic=False."""
    return getattr(dataset, "_deterministic", None) == "false"


def dataset_kind(dataset: tf.data.Dataset) -> str:
    """Returns the name of a dataset's last step, such as "ParallelMapDataset"."""
    return type(dataset).__name__.lstrip("_")


def shuffle_seeds(dataset: ShuffleDataset) -> tuple[int, int]:
    """Returns the two seeds of a `.shuffle()`; (0, 0) means a different order in every process."""
    return int(dataset._seed), int(dataset._seed2)


def continued(first: Any, iterator: tf.data.Iterator) -> tf.data.Iterator:
    """Returns an iterator over `first`, an element that `iterator` has already returned, and its remaining elements."""
    rest = iterator_of_type(iterator, iterator.element_spec)  # `iterator` itself may be deleted before the result
    following = tf.data.Dataset.range(2**62).map(do_not_convert(lambda _: rest.get_next_as_optional()))
    following = following.take_while(do_not_convert(lambda element: element.has_value()))
    following = following.map(do_not_convert(lambda element: element.get_value()))
    options = tf.data.Options()
    options.autotune.enabled = False
    options.experimental_optimization.apply_default_optimizations = False
    options.experimental_external_state_policy = tf.data.experimental.ExternalStatePolicy.IGNORE
    return iter(tf.data.Dataset.from_tensors(first).concatenate(following).with_options(options))


def iterator_of_type(iterator: tf.data.Iterator, element_spec: Any) -> tf.data.Iterator:
    """Returns the same iterator with other type specs for traced functions. The elements must conform to the specs."""
    spec = tf.data.IteratorSpec(element_spec)
    return spec._from_components(spec._to_components(iterator))
