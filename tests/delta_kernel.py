"""The kernels of Gated DeltaNet without a GPU, as JSON: `python -m tests.delta_kernel interpret`
runs them in Triton's interpreter, `compile 90` builds them for `sm_90`.

They run in a process of their own, as both change triton for the whole process.
"""

import itertools
import json
import os
import re
import subprocess
import sys
import tempfile
from types import SimpleNamespace

import numpy as np
import torch

from tests.delta_layers import relative
from torchtitan.models.delta import rule

DOCUMENTS = torch.tensor([[0] * 5 + [1] * 64 + [2] * 2 + [0] * 79])
CASES = {
    "documents": {"documents": DOCUMENTS, "value_size": 40},
    "state": {"seq": 70, "with_state": True},
    "bfloat16": {"seq": 70, "documents": DOCUMENTS[:, :70], "dtype": torch.bfloat16},
    "short": {"seq": 7, "with_state": True},
}


def inputs_of(seq=150, value_size=24, dtype=torch.float32, with_state=False, **_):
    """Two key heads with two value heads each: one doesn't decay, one by up to e^-20 per token."""
    generator = torch.Generator().manual_seed(5)

    def make(*shape):
        return torch.randn(1, *shape, generator=generator)

    q, k, v = make(seq, 2, 16), make(seq, 2, 16), make(seq, 4, value_size)
    g = -torch.rand(1, seq, 4, generator=generator) * torch.tensor([0.0, 0.1, 2.0, 20.0])
    inputs = [
        *(rule.normalize(x).to(dtype) for x in (q, k)),
        *(v.to(dtype), g, make(seq, 4).sigmoid().to(dtype)),
    ]
    return [*inputs, make(4, 16, value_size)] if with_state else inputs


def token_by_token(q, k, v, g, beta, state=None, documents=None):
    """The definition, each document by itself."""
    outs, starts = [], [0, v.shape[1]]
    if documents is not None:
        starts[1:1] = (documents[0].diff().nonzero().flatten() + 1).tolist()
    empty = v.new_zeros(1, v.shape[2], k.shape[-1], v.shape[-1])
    for begin, end in itertools.pairwise(starts):
        piece = (x[:, begin:end] for x in (q, k, v, g, beta))
        before = empty if begin or state is None else state
        out, last = rule.recurrent_delta_rule(*piece, before)
        outs.append(out)
    return torch.cat(outs, 1), last


def results(function, inputs, documents):
    """Outputs, last state and the gradients of all inputs."""
    inputs = [x.detach().requires_grad_() for x in inputs]
    outputs = function(*inputs, documents=documents)
    weights = [(torch.arange(x.numel()) % 17 / 16 - 0.5).to(x).view_as(x) for x in outputs]
    return [*outputs, *torch.autograd.grad(outputs, inputs, weights)]


def tf32(x):
    """`x` rounded to the 10 bits of TF32, as `cvt.rna.tf32.f32` does."""
    return ((x.view(np.uint32) + np.uint32(0x1000)) & np.uint32(0xFFFFE000)).view(np.float32)


def emulate_tensor_cores(parts):
    """Let the interpreter's products round as `tf32x3` does, or as `tf32` with one part."""
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    def create_dot(self, a, b, d, input_precision, max_num_imprecise_acc):
        x, y = (np.ascontiguousarray(operand.data) for operand in (a, b))
        (big_x, big_y), total = (tf32(x), tf32(y)), d.data
        if parts == 3:
            total = total + tf32(x - big_x) @ big_y + big_x @ tf32(y - big_y)
        return TensorHandle(total + big_x @ big_y, d.dtype.scalar)

    InterpreterBuilder.create_dot = create_dot


def interpret():
    """Largest relative differences of each case: from the CPU's loop over chunks, and from the
    definition in fp64.
    """
    assert os.environ["TRITON_INTERPRET"] == "1"
    has_kernel, found = rule._has_kernel, {}
    for parts, cases in ((3, CASES), (1, {"tf32": CASES["short"]})):
        emulate_tensor_cores(parts)
        for name, case in cases.items():
            documents, inputs = case.get("documents"), inputs_of(**case)
            rule._has_kernel = has_kernel
            actual = results(rule.chunked_delta_rule, inputs, documents)
            rule._has_kernel = lambda x: False
            loop = results(rule.chunked_delta_rule, inputs, documents)
            exact = results(token_by_token, [x.double() for x in inputs], documents)
            found[name] = [max(map(relative, actual, other)) for other in (loop, exact)]
    return found


def compile_for(arch):
    """Shared memory in bytes, target, instructions of tensor cores and spilled bytes per thread, of
    each kernel at Qwen3-Next's sizes.
    """
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.backends.nvidia.compiler import get_ptxas

    from torchtitan.models.delta import kernel

    driver = SimpleNamespace(
        get_current_target=lambda: GPUTarget("cuda", arch, 32),
        get_current_device=lambda: 0,
        get_current_stream=lambda device=0: 0,
        get_active_torch_device=lambda: torch.device("cuda", 0),
    )
    triton.runtime.driver.set_active(driver)
    built = {}
    for function in (kernel._forward, kernel._backward):

        def build(*args, run=function.run, name=function.__name__, **kwargs):
            built[name] = run(*args, **kwargs | {"warmup": True})

        function.run = build
    reads, values = torch.zeros(2, 3, 256, 64).mT.split([128, 128], -1)
    keys, decay, state = torch.zeros(2, 3, 64, 128), torch.zeros(2, 3), torch.zeros(3, 128, 128)
    states, stored, last = kernel.forward(reads, values, keys, decay, state)
    kernel.backward(states, stored, last, reads, keys, decay, states, stored)

    found = {}
    for name, made in built.items():
        ptx = made.asm["ptx"]
        target = re.search(r"\.target (\w+)", ptx)[1]
        with tempfile.NamedTemporaryFile("w", suffix=".ptx") as file:
            file.write(ptx)
            file.flush()
            command = [get_ptxas(arch).path, "-v", f"--gpu-name={target}", file.name]
            log = subprocess.run(
                [*command, "-o", os.devnull], capture_output=True, text=True, check=True
            ).stderr
        found[name] = {
            "shared": made.metadata.shared,
            "target": target,
            "tensor_cores": len(re.findall(r"wgmma\.mma_async|tcgen05\.mma", ptx)),
            "spilled": int(re.search(r"(\d+) bytes spill stores", log)[1]),
            "cubin": len(made.asm["cubin"]),
        }
    return found


if __name__ == "__main__":
    print(json.dumps(interpret() if sys.argv[1] == "interpret" else compile_for(int(sys.argv[2]))))
