"""
The step of a GPT on a GPU, as Triton kernels that are recorded as CUDA graphs. The bits of a row's logits depend
neither on the other rows of its step, nor on how its text was divided into steps.

    executor     checks a batch, puts its inputs on the device, replays its graphs
    step         one step: what it reads, and which function follows which
    slots        the slot table: which sequence has which row, and where the slot of a position is
    draws        how rows draw their tokens: what is written before a call, and read back
    weights      the model's weights as the kernels read them
    storing, linear, attention, drawing    the functions of a step: Triton kernels, and what each computes
    queue        what the device does one after the other: graphs, copies, events
    graphs       another step, for `GPT.generate`: the model's own in PyTorch, as a CUDA graph
"""
