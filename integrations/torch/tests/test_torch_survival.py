"""Training with backend "ddl" continues when a rank is killed, with the weights of one process.

integrations/torch/docs/pytorch.md shows how.
"""

import json
import re
from pathlib import Path

import pytest
from torch_needs import TORCH

from launch.launching import run, write_program

pytestmark = [TORCH, pytest.mark.parallel, pytest.mark.quiet]

# PLAN is {rank: step}, by launch ranks. In that step the rank kills itself while gradients are summed.
PROGRAM = """
import json, signal
import torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
import keras_ddl
import keras_ddl.torch

dist.init_process_group("ddl")
ME, PLAN = dist.get_rank(), {int(rank): step for rank, step in json.loads(sys.argv[1]).items()}
torch.manual_seed(0)
torch.set_default_dtype(torch.float64)
module = torch.nn.Sequential(torch.nn.Linear(30, 60), torch.nn.Tanh(), torch.nn.Linear(60, 1))
optimizer = torch.optim.Adam(module.parameters(), 0.01)
data = torch.randn(20, 12, 30)
sizes, step, model = [dist.get_world_size()], 0, DistributedDataParallel(module, bucket_cap_mb=0.001)

def again():
    global model, step
    keras_ddl.regroup()
    dist.init_process_group("ddl")
    steps = [None] * dist.get_world_size()
    dist.all_gather_object(steps, step)
    root = steps.index(max(steps))  # some may have finished the step
    state = [(step, module.state_dict(), optimizer.state_dict())]
    dist.broadcast_object_list(state, root)
    step, weights, slots = state[0]
    module.load_state_dict(weights)
    optimizer.load_state_dict(slots)
    model = DistributedDataParallel(module, bucket_cap_mb=0.001)
    sizes.append(dist.get_world_size())

while step < len(data):
    try:
        if not dist.is_initialized():
            again()
        if PLAN.get(ME) == step:
            module[2].weight.register_hook(lambda _: os.kill(os.getpid(), signal.SIGKILL))
        rows = data[step][dist.get_rank() :: dist.get_world_size()]
        optimizer.zero_grad()
        model(rows).square().mean().backward()
        optimizer.step()
        step += 1
    except RuntimeError as error:
        if keras_ddl.errors.lost_rank_behind(error) is None:
            raise
        if dist.is_initialized():
            dist.destroy_process_group()
weights = torch.cat([each.detach().ravel() for each in module.parameters()])
place = [os.environ["RANK"], os.environ["WORLD_SIZE"]]
print(json.dumps([ME, dist.get_rank(), sizes, place, weights.tolist()]), flush=True)
"""


def trained(folder: Path, ranks: int, plan: dict[int, int]) -> list[list]:
    env = {"TORCHINDUCTOR_CACHE_DIR": str(folder / "inductor")}
    program = write_program(folder, PROGRAM)
    arguments = ["run", "-np", f"1:{ranks}", "python", program, json.dumps(plan)]
    ended = run(arguments, folder, env=env)
    assert ended.status == 0, ended
    assert "Traceback" not in ended.err, ended
    return sorted(json.loads(re.sub(r"^\[\d(, was \d)?\] ", "", line)) for line in ended.out.splitlines())


LONG = [pytest.param(each, marks=pytest.mark.long) for each in ({1: 7}, {0: 7})]


@pytest.mark.parametrize("lost", [{0: 3, 2: 12}, *LONG], ids=str)
def test_survivors_continue_with_a_new_group(lost: dict[int, int], tmp_path: Path) -> None:
    ((*_, alone),) = trained(tmp_path, 1, {})
    left = [rank for rank in range(3) if rank not in lost]
    seen = trained(tmp_path, 3, lost)
    for place, (me, rank, sizes, environment, weights) in enumerate(seen):
        assert (me, rank, sizes) == (left[place], place, [3, *range(2, len(left) - 1, -1)])
        assert environment == [str(place), str(len(left))]
        assert weights == pytest.approx(alone, rel=1e-12, abs=1e-14)
        assert weights == seen[0][-1]
