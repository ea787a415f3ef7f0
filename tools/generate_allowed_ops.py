"""Writes export/proof/allowed_ops.txt, the fixed list of TensorFlow's own ops that a servable graph may contain.

    python tools/generate_allowed_ops.py [FILE]    # another file: to compare

Run it in a process that has loaded no op library, with the newest TensorFlow that keras_ddl supports. The registry of a
training process also contains keras_ddl's ops, which a scan would then let pass.

The list has all ops with a CPU kernel (so no TPU or XLA internals, nor the ops of TensorFlow's own tests), and a few
that run only on GPUs, marked `no-cpu-kernel`. It leaves out ops that call back into Python or talk to a cluster.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

import tensorflow as tf

# Private API of TensorFlow 2.21, because the registries of ops and kernels have no public Python API.
from tensorflow.core.framework import op_def_pb2
from tensorflow.python.client import pywrap_tf_session
from tensorflow.python.framework import kernels

TARGET = Path(__file__).resolve().parents[1] / "export" / "proof" / "allowed_ops.txt"
_CALLS_OUT = re.compile(
    r"^_?(EagerPyFunc|PyFunc|Collective|Nccl|Send$|Recv$|HostSend|HostRecv|RemoteCall|RemoteFusedGraph|Rpc|TPU|.*TPU"
    r"|Xla|DTensor|CopyToMesh|Relayout|RegisterDataset|DataServiceDataset|Test|Stub|Old$)"
)
_GPU_ONLY = re.compile(r"^(Cudnn\w+|CTCLossV2|GenerateBoundingBoxProposals|SparseMatrix\w+|MaxPoolGradGradWithArgmax)$")
_REWRITTEN = {"AccumulateNV2"}  # a pass replaces it before it runs, so it has no kernel


def main() -> None:
    ops = op_def_pb2.OpList.FromString(pywrap_tf_session.TF_GetBuffer(pywrap_tf_session.TF_GetAllOpList()))
    on_cpu = {each.op for each in kernels.get_all_registered_kernels().kernel if each.device_type in ("CPU", "DEFAULT")}
    on_cpu |= _REWRITTEN
    lines = []
    for name in sorted(op.name for op in ops.op if not _CALLS_OUT.match(op.name)):
        if name in on_cpu:
            lines.append(name)
        elif _GPU_ONLY.match(name):
            lines.append(f"{name} no-cpu-kernel")
    heading = f"# TensorFlow {tf.__version__}, {len(lines)} ops; from tools/generate_allowed_ops.py, not by hand."
    target = Path(sys.argv[1]) if len(sys.argv) > 1 else TARGET
    target.write_text("\n".join([heading, *lines]) + "\n")
    print(f"{target}: {len(lines)} of {len(ops.op)} ops")


if __name__ == "__main__":
    main()
