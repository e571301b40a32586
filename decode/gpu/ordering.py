"""
In which order kernels and their programs run.

A kernel begins while the one before it ends: programmatic dependent launch, of GPUs since Hopper. Each kernel of a step
calls `wait` before it touches what the one before writes. There it waits until all of the kernel before has ended, and
so all before that.
"""
import torch
import triton
import triton.language as tl


def overlap(tensor):
    """The arguments of a kernel that is launched for this tensor's device."""
    on = tensor.is_cuda and torch.cuda.get_device_capability(tensor.device) >= (9, 0)
    return dict(OVERLAP=True, launch_pdl=True) if on else dict(OVERLAP=False)


@triton.jit
def wait(OVERLAP: tl.constexpr):
    """The kernel after this one may begin once all programs of this one are here."""
    if OVERLAP:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def is_last(counter, n_programs):
    """
    Is this the last of n_programs that come here? Then it can read what the others have written. counter: int32, 0,
    which it is again after the last one.
    """
    tl.debug_barrier()  # all threads of this one have written
    n_before = n_programs - 1
    if n_programs > 1:
        n_before = tl.atomic_add(counter, 1)
        if n_before == n_programs - 1:
            tl.store(counter, 0)
    return n_before == n_programs - 1
