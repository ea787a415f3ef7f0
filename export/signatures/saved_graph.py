"""Adds signatures to an existing SavedModel by editing its protocol buffer, without Keras and the model's code.

A SavedModel describes a signature twice, and both must agree. TensorFlow Serving reads the SignatureDef, which refers
to nodes of the main graph; `tf.saved_model.load` reads the object graph, which refers to functions:

    SignatureDef -> call in the main graph -.
                                             > wrapper function -> body function: the model
    object graph: signatures -> function   -'

All signatures share one body. A new signature is a wrapper that returns other outputs of the body; for a tensor inside
the body, an output is added to it. The model is not copied. TensorFlow inlines the functions and prunes, so it does not
compute what a wrapper does not return.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from keras_ddl.errors import ExportError
from keras_ddl.export import fingerprint
from keras_ddl.export.inference.replay import DEFAULT

_CALLS = ("PartitionedCall", "StatefulPartitionedCall")


@dataclass(frozen=True)
class InputTransform:
    """A function that runs before the model and computes one of its inputs from another tensor.

    Attributes:
        input: the model's input that it computes.
        argument, dtype, shape: the tensor that clients send instead.
        functions: FunctionDefs; the last one is the entry, and calls the others.
    """

    input: str
    argument: str
    dtype: str
    shape: list[int | None]
    functions: list[Any]


@dataclass(frozen=True)
class Outputs:
    """The outputs that the body can return.

    Attributes:
        answers: name -> [dtype, shape] of the body's own outputs, in their order.
        layers: name -> [place in the body, dtype, shape] of layers inside it.
        float32: whether 16-bit floats of layers are cast to float32, as the body's own outputs already are.
    """

    answers: Mapping[str, Any]
    layers: Mapping[str, Any]
    float32: bool = True


class SavedGraph:
    """A saved_model.pb, held in memory until `write`."""

    def __init__(self, folder: Path, outputs: Outputs) -> None:
        from tensorflow.core.protobuf import saved_model_pb2

        self.file = folder / "saved_model.pb"
        self.outputs = outputs
        self.proto = saved_model_pb2.SavedModel.FromString(self.file.read_bytes())
        (self._meta,) = self.proto.meta_graphs
        self._library = self._meta.graph_def.library
        self._objects = self._meta.object_graph_def
        self._map = next(node for node in self._objects.nodes if node.user_object.identifier == "signature_map")
        # Copies, because serving_default itself may be replaced.
        self._signature = copy.deepcopy(self._meta.signature_def[DEFAULT])
        self._entry = copy.deepcopy(self._objects.nodes[self._node_of(DEFAULT)])
        wrapper = self._entry.bare_concrete_function.concrete_function_name
        self._concrete = copy.deepcopy(self._objects.concrete_functions[wrapper])
        self._wrapper = copy.deepcopy(self._function(wrapper))
        (call,) = [node for node in self._wrapper.node_def if node.op in _CALLS]
        (main,) = [node for node in self._meta.graph_def.node if _calls(node) == wrapper]
        self._call, self._main = copy.deepcopy(call), copy.deepcopy(main)
        self._body = self._function(call.attr["f"].func.name)
        self._indices = {name: i for i, name in enumerate(outputs.answers)}
        if len(self._indices) != len(self._body.signature.output_arg):
            raise ExportError(
                f"A base graph's function must have the outputs that its manifest lists. Received: "
                f"{sorted(self._indices)} for {len(self._body.signature.output_arg)} outputs; please report it."
            )

    def add(self, name: str, outputs: Mapping[str, str], transform: InputTransform | None = None) -> None:
        """Adds the signature `name`, or replaces it.

        Args:
            outputs: public name -> name in `self.outputs`.
            transform: computes one of the inputs from another tensor.
        """
        outputs = dict(sorted(outputs.items()))  # tf.saved_model.load expects the values of a dict in this order
        places = [self._index(source) for source in outputs.values()]
        described = {public: self.described(source) for public, source in outputs.items()}
        decode = self._add_functions(name, transform.functions) if transform is not None else ""
        wrapper = self._add_wrapper(name, places, described, transform, decode)
        self._add_definition(name, self._add_call(name, wrapper, described, transform), described, transform)
        self._add_object(name, wrapper, described, transform)
        self._sweep()

    def write(self) -> None:
        """Writes saved_model.pb, and updates its fingerprint."""
        self.file.write_bytes(self.proto.SerializeToString(deterministic=True))
        fingerprint.follow_graph(self.file.parent, self._meta)

    # ---- the body ----------------------------------------------------------------------------------------------------

    def described(self, source: str) -> tuple[str, Any]:
        """Returns dtype and shape of a signature's output `source`."""
        if source in self.outputs.answers:
            dtype, shape = self.outputs.answers[source]
            return dtype, shape
        _, dtype, shape = self.outputs.layers[source]
        return ("float32" if self._is_cast(dtype) else dtype), shape

    def _is_cast(self, dtype: str) -> bool:
        return self.outputs.float32 and dtype in ("float16", "bfloat16")

    def _index(self, source: str) -> int:
        """Returns the index of the body's output for `source`; for a layer inside the body, adds one."""
        if source not in self._indices:
            place, dtype, shape = self.outputs.layers[source]
            if self._is_cast(dtype):
                node = self._body.node_def.add(
                    name=_unused(f"{_plain(source)}_float32", {node.name for node in self._body.node_def}), op="Cast"
                )
                node.input.append(place)
                node.attr["SrcT"].type, node.attr["DstT"].type = _enum(dtype), _enum("float32")
                node.attr["Truncate"].b = False
                place, dtype = f"{node.name}:y:0", "float32"
            index = len(self._body.signature.output_arg)
            argument = f"layer_{index}"
            self._body.signature.output_arg.add(name=argument, type=_enum(dtype))
            self._body.ret[argument] = place
            function_nodes = [node for each in self._library.function for node in each.node_def]
            for node in [*self._meta.graph_def.node, *function_nodes, self._call]:
                if _calls(node) == self._body.signature.name:
                    node.attr["Tout"].list.type.append(_enum(dtype))
                    if "_output_shapes" in node.attr:
                        _set_shape(node.attr["_output_shapes"].list.shape.add(), shape)
            self._indices[source] = index
        return self._indices[source]

    # ---- functions ---------------------------------------------------------------------------------------------------

    def _function(self, name: str) -> Any:
        return next(each for each in self._library.function if each.signature.name == name)

    def _add_functions(self, name: str, functions: list[Any]) -> str:
        """Adds functions under unused names; returns the name of the last."""
        taken = {each.signature.name for each in self._library.function}
        names = {each.signature.name: _unused(f"{_plain(name)}_{each.signature.name}", taken) for each in functions}
        for function in functions:
            added = self._library.function.add()
            added.CopyFrom(function)
            added.signature.name = names[function.signature.name]
            for node in added.node_def:
                for value in node.attr.values():
                    # Touches only the field that is set, because touching another field of the oneof would replace it.
                    kind = value.WhichOneof("value")
                    for each in [value.func] if kind == "func" else value.list.func if kind == "list" else []:
                        each.name = names.get(each.name, each.name)
        return names[functions[-1].signature.name]

    def _add_wrapper(
        self, name: str, places: list[int], described: Mapping[str, Any], transform: InputTransform | None, decode: str
    ) -> str:
        """Adds the function behind a new signature, which calls the same graph as serving_default. Returns its name.

        places: which outputs of that graph it returns.
        transform, decode: the function that makes one of its inputs from another argument, and that function's name.
        """
        taken = {each.signature.name for each in self._library.function}
        wrapper = self._library.function.add()
        wrapper.CopyFrom(self._wrapper)
        del wrapper.node_def[:]
        wrapper.ret.clear()
        wrapper.attr.pop("_input_shapes", None)
        signature = wrapper.signature
        signature.name = _unused(f"__inference_signature_wrapper_{_plain(name)}", taken)
        del signature.output_arg[:]
        call = wrapper.node_def.add()
        call.CopyFrom(self._call)
        for i, (place, (dtype, _)) in enumerate(zip(places, described.values())):
            signature.output_arg.add(name=f"identity_{i}", type=_enum(dtype))
            wrapper.ret[f"identity_{i}"] = f"{call.name}:output:{place}"
        if transform is not None:
            i = next(i for i, keyword in enumerate(self._keywords()) if keyword == transform.input)
            argument, attributes = signature.input_arg[i], wrapper.arg_attr[i].attr
            made, dtype = argument.name, argument.type
            argument.name, argument.type = f"{_plain(transform.argument).lower()}_before", _enum(transform.dtype)
            attributes["_user_specified_name"].s = transform.argument.encode()
            if "_output_shapes" in attributes:
                _set_shape(attributes["_output_shapes"].list.shape[0], transform.shape)
            node = wrapper.node_def.add(name="before", op=_CALLS[1], input=[argument.name])
            node.attr["f"].func.name = decode
            node.attr["Tin"].list.type.append(_enum(transform.dtype))
            node.attr["Tout"].list.type.append(dtype)
            call.input[list(call.input).index(made)] = "before:output:0"
        return signature.name

    def _keywords(self) -> list[str]:
        """Names of the original serving_default's inputs, in the order of its arguments."""
        return list(self._entry.bare_concrete_function.argument_keywords)

    # ---- for TensorFlow Serving --------------------------------------------------------------------------------------

    def _add_call(self, name: str, wrapper: str, described: Mapping[str, Any], transform: InputTransform | None) -> str:
        """Adds a node that calls the wrapper to the main graph; returns its name."""
        graph = self._meta.graph_def
        taken = {node.name for node in graph.node}
        call = graph.node.add()
        call.CopyFrom(self._main)
        call.name = _unused(f"signature_{_plain(name)}", taken)
        call.attr["f"].func.name = wrapper
        del call.attr["Tout"].list.type[:]
        call.attr["Tout"].list.type.extend(_enum(dtype) for dtype, _ in described.values())
        call.attr.pop("_output_shapes", None)
        if transform is not None:
            i = self._keywords().index(transform.input)
            node = graph.node.add(name=_unused(f"{_plain(name)}_{transform.argument}", taken), op="Placeholder")
            node.attr["dtype"].type = _enum(transform.dtype)
            _set_shape(node.attr["shape"].shape, transform.shape)
            call.input[i] = node.name
            call.attr["Tin"].list.type[i] = _enum(transform.dtype)
        return call.name

    def _add_definition(
        self, name: str, call: str, described: Mapping[str, Any], transform: InputTransform | None
    ) -> None:
        definition = self._meta.signature_def[name]
        definition.CopyFrom(self._signature)
        definition.outputs.clear()
        if transform is not None:
            del definition.inputs[transform.input]
            node = next(node for node in self._meta.graph_def.node if node.name == call)
            info = definition.inputs[transform.argument]
            info.name, info.dtype = f"{node.input[self._keywords().index(transform.input)]}:0", _enum(transform.dtype)
            _set_shape(info.tensor_shape, transform.shape)
        for i, (public, (dtype, shape)) in enumerate(described.items()):
            info = definition.outputs[public]
            info.name, info.dtype = f"{call}:{i}", _enum(dtype)
            _set_shape(info.tensor_shape, shape)

    # ---- for tf.saved_model.load -------------------------------------------------------------------------------------

    def _add_object(
        self, name: str, wrapper: str, described: Mapping[str, Any], transform: InputTransform | None
    ) -> None:
        """Adds a signature to the object graph, from which tf.saved_model.load restores it."""
        concrete = self._objects.concrete_functions[wrapper]
        concrete.CopyFrom(self._concrete)
        concrete.output_signature.Clear()
        answers = concrete.output_signature.dict_value.fields
        for public, (dtype, shape) in described.items():
            spec = answers[public].tensor_spec_value
            spec.name, spec.dtype = public, _enum(dtype)
            _set_shape(spec.shape, shape)
        index = self._node_of(name)
        if index is None:
            index = len(self._objects.nodes)
            self._objects.nodes.add()
            self._map.children.add(node_id=index, local_name=name)
        node = self._objects.nodes[index]
        node.CopyFrom(self._entry)
        function = node.bare_concrete_function
        function.concrete_function_name = wrapper
        if transform is None:
            return
        function.argument_keywords[self._keywords().index(transform.input)] = transform.argument
        for each in function.function_spec.fullargspec.named_tuple_value.values:
            for value in each.value.list_value.values:
                if value.string_value == transform.input:
                    value.string_value = transform.argument
        arguments = concrete.canonicalized_input_signature.tuple_value.values[1].dict_value.fields
        del arguments[transform.input]
        spec = arguments[transform.argument].tensor_spec_value
        spec.name, spec.dtype = transform.argument, _enum(transform.dtype)
        _set_shape(spec.shape, transform.shape)

    def _node_of(self, name: str) -> int | None:
        return next((each.node_id for each in self._map.children if each.local_name == name), None)

    def _sweep(self) -> None:
        """Removes the wrappers of replaced signatures, and the nodes that call them."""
        used = {node.bare_concrete_function.concrete_function_name for node in self._objects.nodes}
        used |= {name for node in self._objects.nodes for name in node.function.concrete_functions}
        unused = [name for name in self._objects.concrete_functions if name not in used]
        for name in unused:
            del self._objects.concrete_functions[name]
        _remove(self._library.function, lambda each: each.signature.name in unused)
        _remove(self._meta.graph_def.node, lambda node: _calls(node) in unused)


def _calls(node: Any) -> str | None:
    return node.attr["f"].func.name if node.op in _CALLS else None


def _remove(repeated: Any, condition: Callable[[Any], bool]) -> None:
    for i in reversed([i for i, each in enumerate(repeated) if condition(each)]):
        del repeated[i]


def _plain(name: str) -> str:
    """Replaces characters that TensorFlow does not allow in names of nodes and functions."""
    return re.sub(r"\W", "_", name)


def _unused(name: str, taken: Collection[str]) -> str:
    return next(each for each in (name, *(f"{name}_{i}" for i in range(1, len(taken) + 2))) if each not in taken)


def _enum(dtype: str) -> int:
    import tensorflow as tf

    return tf.as_dtype(dtype).as_datatype_enum


def _set_shape(proto: Any, shape: list[int | None] | None) -> None:
    import tensorflow as tf

    proto.CopyFrom(tf.TensorShape(shape).as_proto())
