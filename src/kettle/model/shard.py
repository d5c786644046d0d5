"""Parameters sharded over the mesh with FSDP2: one unit per decoder layer and one for the rest."""

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from transformers.models.qwen2.modeling_qwen2 import Qwen2ForCausalLM

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def shard(model: Qwen2ForCausalLM, *, mesh: DeviceMesh, compute_dtype: str) -> None:
    """Shard in place along dimension 0; passes run in `compute_dtype`, gradients sum in float32."""
    precision = MixedPrecisionPolicy(
        param_dtype=DTYPES[compute_dtype], reduce_dtype=torch.float32, cast_forward_inputs=False
    )
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh, mp_policy=precision)
    fully_shard(model, mesh=mesh, mp_policy=precision)


def sharded_modules(model: nn.Module) -> list[FSDPModule]:
    """Every module whose gradients travel in a collective of its own."""
    return [module for module in model.modules() if isinstance(module, FSDPModule)]


def local(parameter: torch.Tensor) -> torch.Tensor:
    """This rank's rows of a sharded tensor."""
    assert isinstance(parameter, DTensor)
    return parameter.to_local()


def local_gradients(model: nn.Module) -> list[torch.Tensor]:
    """This rank's rows of every parameter's gradient, in the parameters' order."""
    gradients = []
    for parameter in model.parameters():
        assert parameter.grad is not None
        gradients.append(local(parameter.grad))
    return gradients


def clear_gradients(model: nn.Module) -> None:
    """Forget all gradients, so that nothing is added to them later."""
    for parameter in model.parameters():
        parameter.grad = None
