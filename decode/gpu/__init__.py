"""
The step of a GPT on a GPU, recorded as CUDA graphs. The bits of a row's logits, and what is drawn from them, depend
neither on the other rows of its step nor on how its text was divided into steps.

    executor     checks a batch, puts its inputs on the device, replays its graphs
    check        what is tried when it is made: logits, bits and tokens on this device
    step         one step: which function follows which
    tables       which sequence has which row, and where its slots are; what is written before a call, and read back
    linears, attention, drawing    the functions of a step, which are Triton kernels
    ordering     a kernel begins before the one before it has ended; which program ends last
    queue        what the device does one after the other: graphs, copies, events
"""
