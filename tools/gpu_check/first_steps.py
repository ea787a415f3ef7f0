"""Says how far a rank comes, step by step: the last line before a crash names the step."""

import faulthandler
import sys
from pathlib import Path

faulthandler.enable(all_threads=True)


def at(step: str) -> None:
    print(f"step: {step}", flush=True)


at("import torch")
import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402

at("import ranks")
sys.path.insert(0, str(Path(__file__).parent))
import ranks  # noqa: E402

if "cuda-last" not in sys.argv:
    at("device")
    WHERE = ranks.device()
at("import keras_ddl.torch")
import keras_ddl.torch  # noqa: E402, F401
from keras_ddl import communicator  # noqa: E402

at("load the core")
from keras_ddl.communicator import native_library  # noqa: E402

native_library.core()
at("communicator.init")
communicator.init()
at("init_process_group")
dist.init_process_group("ddl")
at("all_reduce on the CPU")
dist.all_reduce(torch.ones(3, device="cpu"))
at("device")
WHERE = ranks.device()
at(f"all_reduce on {WHERE}")
tensor = torch.ones(1000, device=WHERE)
dist.all_reduce(tensor)
at(f"result {tensor[0].item()}")
at("async")
dist.all_reduce(tensor, async_op=True).wait()
at("destroy")
dist.destroy_process_group()
at("done")
