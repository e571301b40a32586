"""
What is measured, and how. `bench.py` runs these; the files below are scripts.

    train_step     time of a training iteration
    generate       tokens a second, with the cache and without
    memory         peak memory of generation
    loss           the cost of dropped context and rounded numbers, in nats
    caches         the caches of kvcache/ on the compiled step, in parts
    peers/         the same weights in other engines: decoding, prefills, long contexts
    serve/         our server and llama-server under load, in parts
    experiments/   models that are trained with other positions, endless texts, recall; busy neighbours

    old_and_new.py       a commit or another work tree and this one, timed in turns (timed_tree.py runs in each)
    house.py             the picture of the modules and their imports
    figures/draw_*.py    the pictures that explain the caches

    harness, shapes      how all of it is timed, printed, drawn and written; the models that are measured
    results/, figures/   the measured rows and the pictures of the documents
"""
