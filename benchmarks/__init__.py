"""
What is measured, and how. `bench.py` runs the first ten of these; the others are scripts.

    train_step     time of a training iteration
    generate       tokens a second, with the cache and without
    peers/         the same weights in other engines: decoding, prefills, long contexts
    caches/        the caches of kvcache/ on the compiled step, in parts
    serve/         our server and llama-server under load, in parts
    memory         peak memory of generation
    loss           the cost of dropped context and rounded numbers, in nats
    positions      the same model trained with each kind of positions and window, in nats
    endless        one long text through a rolling cache: nats, time and memory to the end
    recall         what a model with a window remembers, by distance

    busy.py              the decoder and its choice of threads beside processes that keep the cores busy
    old_and_new.py       a commit or another work tree and this one, timed in turns (timed_tree.py runs in each)
    house.py             the picture of the modules and their imports
    figures/draw_*.py    the pictures that explain the caches

    shapes, rounds, report       the models that are measured; ways that take turns; JSON and the machine
    results/, figures/           the measured rows and the pictures of the documents
"""
