"""
Experiments that train models of their own, and one beside other programs.

    positions    the same model trained with each kind of positions and window, in nats
    endless      one long text through a rolling cache: nats, time and memory to the end
    recall       what a model with a window remembers, by distance
    busy         the decoder and its choice of threads beside processes that keep the cores busy
"""
